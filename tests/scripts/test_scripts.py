"""Odd scripts do under mpiddp what they do under plain Python, or the table says why not."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.holds import Hold
from tests.support import Mpi, alone, check

from .__main__ import BEGIN, DOCUMENT
from .catalogue import SCRIPTS, Script
from .reasons import explain
from .ways import HELD, ONE_RANK, PLAIN, TWO_RANKS, differences, run, run_held
from .ways import QUICK as QUICK_MPI

QUICK = ("open-global", "open-error-local", "zip", "tee", "fork-open-file")  # for tests/run: each of another kind
# A forked child's end may hang in torch's group, and a thread of the start may live on for a moment.
NEEDS_TORCH = re.compile("torch|loader|fork|multiprocessing|Process|active_count")


def marks_of(script: Script) -> list[pytest.MarkDecorator]:
    """Return the markers of a script's test."""
    needs_torch = NEEDS_TORCH.search("".join([script.text, *script.modules.values()]))
    return [pytest.mark.light] * (not needs_torch) + [pytest.mark.thorough] * (script.name not in QUICK)


@pytest.mark.mpi
@pytest.mark.parametrize("script", [pytest.param(script, id=script.name, marks=marks_of(script)) for script in SCRIPTS])
def test_a_script_does_the_same(script: Script) -> None:
    plain = run(script, PLAIN)
    for way in (ONE_RANK, TWO_RANKS):
        unexplained = [difference for difference in differences(plain, run(script, way))
                       if not explain(script.name, way, difference)]
        assert not unexplained, way


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hold]:
    """Give a hold to all scripts."""
    with contextlib.closing(Hold(QUICK_MPI, tmp_path_factory.mktemp("home"))) as hold:
        yield hold.wait_until_ready()


@pytest.mark.mpi
@pytest.mark.thorough("single scripts")
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_a_script_does_the_same_in_a_hold(script: Script, hold: Hold) -> None:
    assert not [difference for difference in differences(run(script, PLAIN), run_held(script, hold))
                if not explain(script.name, HELD, difference)]


@pytest.mark.thorough("test_a_script_does_the_same runs scripts in four of its five ways")
def test_the_command(quick: Mpi) -> None:
    done = check(alone(quick, "-m", "tests.scripts", "exit-zero"))
    assert done.stdout == "| `exit-zero` | `sys.exit(0)` | 0 | = | = | = | = |\n"
    assert done.stderr == ""


def test_the_table_has_all_scripts() -> None:
    rows = DOCUMENT.read_text().split(BEGIN)[1].splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| `{script.name}`", script.does] for script in SCRIPTS]
    assert "not explained" not in "".join(rows)
