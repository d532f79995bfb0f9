"""Wait with a deadline, asleep between looks.

A rank that spins in a blocking MPI call takes the core that another one needs to get ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.02


def wait_for(
    look: Callable[[], Found | None],
    deadline: float,
    late: Callable[[], Exception],
    remind: Callable[[], None] | None = None,
    remind_after_s: float = 60.0,
) -> Found:
    """Return what `look` finds as soon as it is not None; raise `late()` once `deadline` has passed.

    `deadline` is on time.monotonic()'s clock and may be infinite. `remind` is called once, when the
    wait has lasted `remind_after_s` seconds.
    """
    start = time.monotonic()
    while (found := look()) is None:
        now = time.monotonic()
        if now > deadline:
            raise late()
        if remind is not None and now - start > remind_after_s:
            remind()
            remind = None
        time.sleep(min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, (now - start) / 10)))
    return found
