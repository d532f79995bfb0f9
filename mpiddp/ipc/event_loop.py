"""The event loop of a helper process: connections, processes and timers."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import HasFileno

MAX_WAIT_S = 86400.0  # epoll_wait(2) counts milliseconds in 32 bits
PROCESS_INTERVAL_S = 2.0
MAX_CANCELLED_TIMERS = 64  # that may stay in the heap until they are due


class EventLoop:
    """Calls a function for each event, in the order in which the kernel saw the events.

    If a function raises, `on_error` gets the exception and the loop goes on. The cost of a wake-up does not grow with
    the number of connections and timers: a coordinator has a timer for each unauthenticated connection.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self.stopped = False
        self._on_error = on_error
        self._selector = selectors.EpollSelector()
        self._timers: dict[str, tuple[int, Callable[[], object]]] = {}  # each with its number
        self._heap: list[tuple[float, int, str]] = []  # due time, number and name, also of timers that were cancelled
        self._last_number = 0
        self._posted: deque[Callable[[], object]] = deque()
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        EventLoop.watch(self, self._wakeup_fd, self._run_posted)

    def run(self) -> None:
        """Wait for events and act on them, until stop() is called."""
        while not self.stopped:
            self._forget_cancelled()
            wait_s = min(max(0.0, self._heap[0][0] - time.monotonic()), MAX_WAIT_S) if self._heap else None
            for key, _ in self._selector.select(wait_s):
                if self.stopped:
                    return
                now = self._selector.get_map().get(key.fd)  # an earlier event may have replaced it
                if now is not None and now.data is key.data and not self.call_safely(key.data):
                    self._drop(key)
            now_s = time.monotonic()
            while not self.stopped and self._heap and self._heap[0][0] <= now_s:
                _, number, name = heappop(self._heap)
                if self._is_current(number, name):
                    self.call_safely(self._timers.pop(name)[1])

    def stop(self) -> None:
        """Make run() return."""
        self.stopped = True

    def call_safely(self, act: Callable[[], object]) -> bool:
        """Call `act`, and return whether it did not raise."""
        try:
            act()
        except PartError:
            return False
        except Exception as error:
            self._on_error(error)
            return False
        return True

    def post(self, act: Callable[[], object]) -> None:
        """Make run() call `act` soon; another thread may call this."""
        self._posted.append(act)
        os.eventfd_write(self._wakeup_fd, 1)

    def watch(self, source: HasFileno | int, act: Callable[[], object]) -> None:
        """Call `act` whenever `source` is readable."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def watch_process(self, pid: int, act: Callable[[], None]) -> None:
        """Call `act` once when a process has ended; before Linux 5.3 it is looked for every two seconds."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.set_timer(f"end of {pid}", 0, act)
            return
        except (OSError, AttributeError):  # a Python may have been built without it
            def look() -> None:
                if os.path.exists(f"/proc/{pid}"):
                    self.set_timer(f"end of {pid}", PROCESS_INTERVAL_S, look)
                else:
                    act()

            look()
            return

        def on_end() -> None:
            self.unwatch(descriptor)
            os.close(descriptor)
            act()

        self.watch(descriptor, on_end)

    def watch_writable(self, source: HasFileno, enabled: bool = True) -> None:
        """Call the function of `source`, which is watched, also when it is writable; no longer if not `enabled`."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if enabled else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def unwatch(self, source: HasFileno | int) -> None:
        """Stop watching a source; raise KeyError if it is not watched."""
        self._selector.unregister(source)

    def set_timer(self, name: str, after_s: float, act: Callable[[], object]) -> None:
        """Call `act` once, `after_s` from now; a timer of the same name is replaced."""
        self._last_number += 1
        self._timers[name] = (self._last_number, act)
        heappush(self._heap, (time.monotonic() + after_s, self._last_number, name))

    def has_timer(self, name: str) -> bool:
        """Return whether there is a timer of this name."""
        return name in self._timers

    def cancel_timers(self, *names: str) -> None:
        """Cancel the timers of these names."""
        for name in names:
            self._timers.pop(name, None)

    def _run_posted(self) -> None:
        os.eventfd_read(self._wakeup_fd)
        for _ in range(len(self._posted)):
            self.call_safely(self._posted.popleft())

    def _is_current(self, number: int, name: str) -> bool:
        """Return whether a timer was neither cancelled nor replaced."""
        return name in self._timers and self._timers[name][0] == number

    def _forget_cancelled(self) -> None:
        """Remove cancelled timers from the heap: those due first, and all if they are most of the heap."""
        if len(self._heap) > 2 * len(self._timers) + MAX_CANCELLED_TIMERS:
            self._heap = [entry for entry in self._heap if self._is_current(*entry[1:])]
            heapify(self._heap)
        while self._heap and not self._is_current(*self._heap[0][1:]):
            heappop(self._heap)

    def _drop(self, key: selectors.SelectorKey) -> None:
        """Stop watching a source whose function raised: unread data would call it again at once."""
        if self._selector.get_map().get(key.fd) == key:
            self._selector.unregister(key.fd)


class PartError(Exception):
    """A function of a part of the loop has raised, and the part has handled that."""


class LoopPart(EventLoop):
    """The part of an event loop that one component uses: its timers have names of their own, and it handles errors."""

    def __init__(self, loop: EventLoop, name: str, on_error: Callable[[Exception], None]) -> None:
        self._loop, self._prefix, self._on_error = loop, f"{name}: ", on_error

    def watch(self, source: HasFileno | int, act: Callable[[], object]) -> None:
        """Call `act` whenever `source` is readable."""
        self._loop.watch(source, partial(self._call, act))

    def watch_writable(self, source: HasFileno, enabled: bool = True) -> None:
        """Call the function of `source`, which is watched, also when it is writable; no longer if not `enabled`."""
        self._loop.watch_writable(source, enabled)

    def unwatch(self, source: HasFileno | int) -> None:
        """Stop watching a source; raise KeyError if it is not watched."""
        self._loop.unwatch(source)

    def post(self, act: Callable[[], object]) -> None:
        """Call `act` soon; another thread may call this."""
        self._loop.post(partial(self._call, act))

    def set_timer(self, name: str, after_s: float, act: Callable[[], object]) -> None:
        """Call `act` once, `after_s` from now; a timer of the same name is replaced."""
        self._loop.set_timer(self._prefix + name, after_s, partial(self._call, act))

    def has_timer(self, name: str) -> bool:
        """Return whether there is a timer of this name."""
        return self._loop.has_timer(self._prefix + name)

    def cancel_timers(self, *names: str) -> None:
        """Cancel the timers of these names."""
        self._loop.cancel_timers(*(self._prefix + name for name in names))

    def _call(self, act: Callable[[], object]) -> None:
        """Call `act`; raise PartError if it raises: the loop then stops watching its source."""
        if not self.call_safely(act):
            raise PartError
