"""CPython's own tests have the same results in a rank as in plain Python, or the package says why not."""

from __future__ import annotations

import re

import pytest

from tests.support import Mpi, alone, check, need

from . import comparison, reasons
from .comparison import MODULES, PLAIN, Result, Results, compare
from .reasons import Reason

TEST = "test.test_os.Tests.test_it"
PASSED, FAILED = Result("passed"), Result("failed")


@pytest.mark.alone
@pytest.mark.thorough("test_a_script_does_the_same runs scripts of our own")
@pytest.mark.parametrize("module", MODULES)
def test_a_rank_is_as_python(module: str) -> None:
    need(comparison.list_missing_modules())
    found = compare(module)
    assert found.unexplained == {}
    assert found.stale == []
    assert found.tests > 0


@pytest.mark.thorough("test_a_script_does_the_same runs scripts of our own")
def test_the_command(quick: Mpi) -> None:
    need(comparison.list_missing_modules())
    done = check(alone(quick, "-m", "tests.cpython", "test_atexit"))
    assert re.fullmatch(r"test_atexit: \d+ tests, 0 differ\n", done.stdout)


def test_what_differs_each_time_is_found() -> None:
    assert compare_with([FAILED] * 3).unexplained == {TEST: (PASSED, FAILED)}


def test_what_differs_once_is_not() -> None:
    assert compare_with([FAILED, PASSED, FAILED]).unexplained == {}


def test_an_explanation_that_explains_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = Reason("test_os", r"test\.test_os\.Tests\..*", "why not")
    monkeypatch.setattr(reasons, "REASONS", [reason])
    assert compare_with([FAILED]).explained == {TEST: reason}
    assert compare_with([FAILED]).stale == []
    assert compare_with([PASSED]).stale == [reason]


def test_one_failure_of_a_test_is_its_result() -> None:
    lines = ['["a", "did not end", ""]', '["a", "failed", "why"]', '["a", "passed", ""]', '["b", "did not end", ""]']
    assert comparison.read_results(lines) == {"a": Result("failed", "why"), "b": Result("did not end")}


def test_each_explanation_is_of_a_module_that_runs() -> None:
    assert {reason.module for reason in reasons.REASONS} <= set(MODULES)


def compare_with(results: list[Result]) -> comparison.Comparison:
    """Compare a test that passes in plain Python with what a rank says each time."""
    ranks = iter(results)

    def run(_: str, way: str) -> Results:
        return {TEST: PASSED if way == PLAIN else next(ranks)}

    return compare("test_os", run)
