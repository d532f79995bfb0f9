"""The event loop of the processes beside a rank."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import pytest

from mpiddp.ipc import event_loop
from mpiddp.ipc.event_loop import EventLoop

FAR_S = 3600.0


@pytest.fixture
def empty() -> EventLoop:
    """Return a loop in which nothing may go wrong."""
    return EventLoop(lambda error: pytest.fail(str(error)))


def lines_of_wakeups(timers: int, wakeups: int) -> int:
    """Return how many lines of loop.py run for so many events beside so many timers, of which half were removed."""
    loop, lines = EventLoop(lambda error: pytest.fail(str(error))), 0
    for number in range(timers):
        loop.set_timer(str(number), FAR_S, lambda: None)
    loop.cancel_timers(*map(str, range(0, timers, 2)))
    reading, writing = os.pipe()
    os.write(writing, bytes(wakeups))

    def read() -> None:
        loop.stopped = len(os.read(reading, 1)) == 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != event_loop.__file__:
            return None
        lines += event == "line"
        return trace

    os.close(writing)
    loop.watch(reading, read)
    former = sys.gettrace()
    sys.settrace(trace)
    try:
        loop.run()
    finally:
        sys.settrace(former)
        os.close(reading)
    return lines


def test_a_wakeup_looks_at_no_timer_that_is_not_due() -> None:
    few, many = (lines_of_wakeups(timers, 100) for timers in (10, 10_000))
    assert many < 2 * few


def test_timers_that_are_removed_or_replaced_take_no_memory_until_they_are_due(empty: EventLoop) -> None:
    for number in range(10_000):
        empty.set_timer("replaced", FAR_S, lambda: None)
        empty.set_timer(f"removed {number}", FAR_S, lambda: None)
        empty.cancel_timers(f"removed {number}")
    assert empty.has_timer("replaced")
    empty.set_timer("over", 0.0, empty.stop)
    empty.run()
    assert len(empty._heap) < 1000


def test_timers_are_due_in_their_order_and_only_as_they_were_set_last(empty: EventLoop) -> None:
    came: list[str] = []

    def end() -> None:
        came.append("end")
        empty.stopped = True

    empty.set_timer("end", 1.0, end)  # far apart: this process may be stopped between two of these lines
    empty.set_timer("second", 0.0, lambda: pytest.fail("it was replaced"))
    empty.set_timer("removed", 0.0, lambda: pytest.fail("it was removed"))
    empty.set_timer("second", 0.5, lambda: came.append("second"))
    empty.set_timer("first", 0.0, lambda: came.append("first"))
    empty.cancel_timers("removed", "unknown")
    assert not empty.has_timer("removed")
    empty.run()
    assert came == ["first", "second", "end"]
    assert not empty.has_timer("first")


def test_a_timer_may_be_due_in_years(empty: EventLoop) -> None:
    empty.set_timer("far", 1e9, lambda: pytest.fail("it has come"))
    reading, writing = os.pipe()
    os.close(writing)
    empty.watch(reading, empty.stop)
    empty.run()
    os.close(reading)
