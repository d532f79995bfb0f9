"""The offset between the clocks of two processes."""

from __future__ import annotations

import array
import time
from collections.abc import Callable

ROUND_TRIPS = 20

Message = Callable[["array.array[int]"], object]  # sends, or receives, an array of one number


def measure_clock_offset_ns(send: Message, receive: Message, asks: bool) -> int:
    """Return how far the other process's clock is ahead, in nanoseconds, on the one that `asks`; 0 on the other.

    As in NTP (RFC 5905), the other's time is assigned to the middle of the shortest of several round trips.
    """
    clock = array.array("q", [0])
    trips = []
    for _ in range(ROUND_TRIPS):
        if asks:
            sent = time.time_ns()
            send(clock)
            receive(clock)
            back = time.time_ns()
            trips.append((back - sent, clock[0] - (sent + back) // 2))
        else:
            receive(clock)
            clock[0] = time.time_ns()
            send(clock)
    return min(trips)[1] if asks else 0
