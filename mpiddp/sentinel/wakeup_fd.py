"""Sends the sentinel the number of each signal, by the process's wake-up descriptor (signal.set_wakeup_fd).

Python writes to it from its handler in C, and also if _thread.interrupt_main() simulates a signal.
"""

from __future__ import annotations

import _thread
import contextlib
import signal


class WakeupFd:
    """Sends each signal's number to a descriptor, also after an event loop of the script has replaced it.

    asyncio and uvloop use the process's only wake-up descriptor while they run, and leave none set.
    """

    def __init__(self, descriptor: int) -> None:
        """Begin; the descriptor does not block."""
        self._descriptor = descriptor
        self._set_wakeup_fd = signal.set_wakeup_fd
        self._interrupt_main = _thread.interrupt_main
        self._is_on = True  # checked later: a library may keep our function
        self.lent = False  # others have used the process's descriptor, and may have got a signal's number
        self.simulated = False  # the script has called _thread.interrupt_main()
        if (former := self._set_wakeup_fd(descriptor, warn_on_full_buffer=False)) >= 0:
            self._set_wakeup_fd(former)
            self.lent = True
        signal.set_wakeup_fd = self._set
        _thread.interrupt_main = self._simulate

    def end(self) -> None:
        """Stop using the descriptor; one of others stays set."""
        self._is_on = False
        if signal.set_wakeup_fd == self._set:
            signal.set_wakeup_fd = self._set_wakeup_fd
        if _thread.interrupt_main == self._simulate:
            _thread.interrupt_main = self._interrupt_main
        with contextlib.suppress(ValueError):  # not in the main thread
            if (descriptor := self._set_wakeup_fd(-1)) != self._descriptor:
                self._set_wakeup_fd(descriptor)

    def _set(self, fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        """Act as `signal.set_wakeup_fd`: if the script unsets its own, ours is set again; ours is returned as -1."""
        if fd == -1 and self._is_on:
            fd, warn_on_full_buffer = self._descriptor, False
        self.lent |= fd != self._descriptor
        former = self._set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
        return -1 if former == self._descriptor and self._is_on else former

    def _simulate(self, signum: signal.Signals = signal.SIGINT, /) -> None:
        """Act as `_thread.interrupt_main`."""
        self.simulated |= signum == signal.SIGINT
        self._interrupt_main(signum)
