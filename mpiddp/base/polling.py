"""Wait with a deadline, asleep between looks.

A rank that spins in a blocking MPI call takes the core that another one needs to get ready.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02


def sleep_until(look: Callable[[], bool]) -> None:
    """Sleep until `look` returns True, without a deadline: the caller relies on somebody else's."""
    wait_for(lambda: look() or None, math.inf, TimeoutError, lambda _: None, math.inf)


def wait_for(
    look: Callable[[], Found | None],
    deadline: float | Callable[[], float],
    late: Callable[[], Exception],
    remind: Callable[[float], None],
    remind_after_s: float,
) -> Found:
    """Return the first result of `look` that is not None; raise `late()` once `deadline` has passed.

    `deadline` is a time of time.monotonic(), or returns what it is by now, and may be infinite. `remind` is called
    with the seconds waited: first after `remind_after_s`, and again each time that the wait has doubled.
    """
    start = time.monotonic()
    while (found := look()) is None:
        now = time.monotonic()
        if now > (deadline if isinstance(deadline, float | int) else deadline()):
            raise late()
        if now - start > remind_after_s:
            remind(now - start)
            remind_after_s *= 2
        time.sleep(min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, (now - start) / 100)))
    return found
