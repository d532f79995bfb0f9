"""Wait by polling: with a deadline, and asleep between polls.

A rank that spins in a blocking MPI call takes the core that another rank needs to get ready.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

MIN_PAUSE_S, MAX_PAUSE_S = 0.0002, 0.02


def sleep_until(is_done: Callable[[], bool]) -> None:
    """Sleep until `is_done` returns True; there is no deadline here, because the caller relies on another one."""
    poll_until(lambda: is_done() or None)


def poll_until(
    poll: Callable[[], Result | None],
    deadline: float | Callable[[], float] = math.inf,
    make_timeout: Callable[[], Exception] = TimeoutError,
    remind: Callable[[float], object] = bool,
    remind_after_s: float = math.inf,
) -> Result:
    """Return the first result of `poll` that is not None; raise `make_timeout()` after the deadline.

    `deadline` is a time of time.monotonic(), or a function that returns it, if it may change. `remind` is called with
    the seconds waited: first after `remind_after_s`, then each time that the wait has doubled.
    """
    start = time.monotonic()
    while (result := poll()) is None:
        now = time.monotonic()
        if now > (deadline if isinstance(deadline, float | int) else deadline()):
            raise make_timeout()
        if now - start > remind_after_s:
            remind(now - start)
            remind_after_s *= 2
        time.sleep(min(MAX_PAUSE_S, max(MIN_PAUSE_S, (now - start) / 100)))
    return result
