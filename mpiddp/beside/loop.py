"""What a process beside a rank waits for: connections, processes and the clock."""

from __future__ import annotations

import math
import os
import selectors
import socket
import time
from collections.abc import Callable

from .wire import Wire


class Loop:
    """Calls a function for each event, in the order in which the kernel saw the events.

    If a function raises, `excuse` gets the exception and the loop goes on.
    """

    def __init__(self, excuse: Callable[[Exception], None]) -> None:
        self.over = False  # set it to let run() return
        self._excuse = excuse
        self._selector = selectors.EpollSelector()
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}

    def run(self) -> None:
        """Wait for events and act on them, until `over` is set."""
        while not self.over:
            due = min((at for at, _ in self._timers.values()), default=math.inf)
            pause = None if due == math.inf else max(0.0, due - time.monotonic())
            for key, _ in self._selector.select(pause):
                now = self._selector.get_map().get(key.fd)  # an earlier event may have closed it, and another opened
                if now is not None and now.data is key.data and not self.attempt(key.data):
                    self._drop(key)
            now_s = time.monotonic()
            for name, (at, act) in list(self._timers.items()):
                if at <= now_s and name in self._timers:
                    del self._timers[name]
                    self.attempt(act)

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

    def set_timer(self, name: str, after_s: float, act: Callable[[], None]) -> None:
        """Call `act` once, `after_s` from now; a timer of the same name is replaced."""
        self._timers[name] = (time.monotonic() + after_s, act)

    def is_set(self, name: str) -> bool:
        """Tell whether there is a timer of this name."""
        return name in self._timers

    def drop_timers(self, *names: str) -> None:
        """Remove the timers of these names."""
        for name in names:
            self._timers.pop(name, None)

    def _drop(self, key: selectors.SelectorKey) -> None:
        """Stop to listen to a source whose function raised: what it did not read would call it again at once."""
        if self._selector.get_map().get(key.fd) == key:
            self._selector.unregister(key.fd)
