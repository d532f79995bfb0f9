"""Work with a time limit, in a thread."""

from __future__ import annotations

import threading

import pytest

from mpiddp.base.timeouts import run_briefly, run_with_timeout


def test_the_result_and_the_error_of_work_are_the_callers() -> None:
    assert run_with_timeout(60, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(60, lambda: 1 // 0)


def test_work_that_hangs_is_given_up() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError):
        run_with_timeout(0.05, released.wait)
    run_briefly(released.wait, 0.05)
    released.set()


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_nothing_is_raised_where_a_job_ends(error: type[BaseException]) -> None:
    """As a script's own file may, when it is flushed."""
    def fail() -> None:
        raise error

    run_briefly(fail, 60)
