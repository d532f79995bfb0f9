"""Run work that may hang in a thread, which is abandoned at a timeout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_with_timeout(limit_s: float, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, or raise its error; raise TimeoutError if it takes longer."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome[:] = (True, work())
        except BaseException as error:
            outcome[:] = (False, error)

    thread = threading.Thread(target=run, daemon=True, name="mpiddp-timeout")
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise TimeoutError
    has_returned, result = outcome
    try:
        if not has_returned:
            raise result
        return result  # type: ignore[no-any-return]
    finally:
        outcome.clear()  # breaks the cycle of an error and this frame, so that memory held by `work` is freed now
        del result


def run_briefly(action: Callable[[], object], limit_s: float) -> None:
    """Call `action` in another thread, and wait for it no longer than `limit_s`; raise nothing.

    The caller ends the job afterwards, also if no thread can be started, it takes longer, or a script's file raises.
    """
    with contextlib.suppress(BaseException):
        run_with_timeout(limit_s, action)
