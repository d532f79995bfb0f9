"""The layers of tests, and what tests/run selects of them."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter, defaultdict

import pytest

from tests.support import ROOT, Mpi, alone, check

ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (.*) \|$", re.MULTILINE)


def test_a_unit_test_can_start_no_program() -> None:
    with pytest.raises(AssertionError, match=r"has none of subprocess\.Popen: mark it"):
        subprocess.run(["true"])


def test_a_unit_test_cannot_fork() -> None:
    with pytest.raises(AssertionError, match=r"has none of os\.fork: mark it"):
        os.fork()


@pytest.mark.light
def test_each_test_is_selected_once_and_what_is_left_out_has_a_reason(quick: Mpi) -> None:
    """One of the three calls of pytest in tests/run has it, or the one for GPUs.

    A test that has no case in tests/run names another one in its marker.
    """
    selections = [*re.findall(r'-m "([^"]*)\$without"', (ROOT / "tests/run").read_text()), "gpu"]
    assert len(selections) == 4
    code = ("import runpy\nleft_out = runpy.run_module('tests.left_out', run_name='__main__')\nprint('marks')\n"
            "for test in left_out['collect'](): print(test.originalname, *{mark.name for mark in test.iter_markers()})")
    table, lines = check(alone(quick, "-c", code)).stdout.split("\nmarks\n")
    tests = [(name, frozenset(marks)) for name, *marks in map(str.split, lines.splitlines())]
    marks = Counter(names for _, names in tests)
    assert marks.total() > 3000
    for names in marks:
        markers = defaultdict(bool, dict.fromkeys(names, True))
        assert sum(bool(eval(selection, {}, markers)) for selection in selections) == 1, names
    rows = ROW.findall(table)
    assert "test_an_end" in {name for name, *_ in rows}
    assert [name for name, _, _, instead in rows if not instead] == []
    named = {other for _, _, _, instead in rows for other in re.findall(r"\btest_\w+\b(?!\.py)", instead)}
    assert named <= {name for name, names in tests if not names & {"thorough", "gpu"}}, "tests/run has them instead"
    assert all(int(some) < int(every) for _, some, every, _ in rows)
