"""What a process beside a rank waits for: connections, processes and the clock."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from .channel import Wire

LONGEST_S = 86400.0  # of one wait: epoll_wait(2) counts milliseconds in 32 bits
FEW = 64  # removed timers that may stay in the heap until they are due


class Loop:
    """Calls a function for each event, in the order in which the kernel saw the events.

    If a function raises, `excuse` gets the exception and the loop goes on. What a wake-up costs does not grow with the
    number of connections and timers: a coordinator has a timer for each connection that has not shown its token.
    """

    def __init__(self, excuse: Callable[[Exception], None]) -> None:
        self.over = False  # set it to let run() return
        self._excuse = excuse
        self._selector = selectors.EpollSelector()
        self._timers: dict[str, tuple[int, Callable[[], object]]] = {}  # each with its number
        self._due: list[tuple[float, int, str]] = []  # a heap: when, which number, of which name; removed ones, too
        self._last_number = 0

    def run(self) -> None:
        """Wait for events and act on them, until `over` is set."""
        while not self.over:
            self._forget_removed()
            pause = min(max(0.0, self._due[0][0] - time.monotonic()), LONGEST_S) if self._due else None
            for key, _ in self._selector.select(pause):
                now = self._selector.get_map().get(key.fd)  # an earlier event may have closed it, and another opened
                if now is not None and now.data is key.data and not self.attempt(key.data):
                    self._drop(key)
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _, number, name = heappop(self._due)
                if self._is_current(number, name):
                    self.attempt(self._timers.pop(name)[1])

    def attempt(self, act: Callable[[], object]) -> bool:
        """Call `act` and tell whether it came to its end."""
        try:
            act()
        except Exception as error:
            self._excuse(error)
            return False
        return True

    def listen(self, source: Wire | socket.socket | int, act: Callable[[], object]) -> None:
        """Call `act` whenever something can be read from `source`."""
        self._selector.register(source, selectors.EVENT_READ, act)

    def await_end(self, pid: int, act: Callable[[], None]) -> None:
        """Call `act` once when a process has ended; the kernel tells of it from Linux 5.3 on."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.set_timer(f"end of {pid}", 0, act)
            return
        except (OSError, AttributeError):  # a Python may have been built without it
            return

        def tell() -> None:
            self.forget(descriptor)
            os.close(descriptor)
            act()

        self.listen(descriptor, tell)

    def await_room(self, source: Wire | socket.socket, waits: bool = True) -> None:
        """Call what is called for `source` also when more can be written to it; no longer if not `waits`."""
        key = self._selector.get_key(source)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def forget(self, source: Wire | socket.socket | int) -> None:
        """Stop to listen to a source."""
        self._selector.unregister(source)

    def set_timer(self, name: str, after_s: float, act: Callable[[], object]) -> None:
        """Call `act` once, `after_s` from now; a timer of the same name is replaced."""
        self._last_number += 1
        self._timers[name] = (self._last_number, act)
        heappush(self._due, (time.monotonic() + after_s, self._last_number, name))

    def is_set(self, name: str) -> bool:
        """Tell whether there is a timer of this name."""
        return name in self._timers

    def drop_timers(self, *names: str) -> None:
        """Remove the timers of these names."""
        for name in names:
            self._timers.pop(name, None)

    def _is_current(self, number: int, name: str) -> bool:
        """Tell whether a timer was neither removed nor replaced."""
        return name in self._timers and self._timers[name][0] == number

    def _forget_removed(self) -> None:
        """Remove from the heap what is no timer any more: what is due first, and all where it is most of the heap."""
        if len(self._due) > 2 * len(self._timers) + FEW:
            self._due = [one for one in self._due if self._is_current(*one[1:])]
            heapify(self._due)
        while self._due and not self._is_current(*self._due[0][1:]):
            heappop(self._due)

    def _drop(self, key: selectors.SelectorKey) -> None:
        """Stop to listen to a source whose function raised: what it did not read would call it again at once."""
        if self._selector.get_map().get(key.fd) == key:
            self._selector.unregister(key.fd)
