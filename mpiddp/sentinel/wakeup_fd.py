"""The rank's word to its sentinel that a signal came, by the process's wake-up descriptor (signal.set_wakeup_fd).

Python writes to it from its handler in C, and also where no signal came: _thread.interrupt_main() acts as if one had.
"""

from __future__ import annotations

import _thread
import contextlib
import signal


class Wakeup:
    """Lets a descriptor have the number of each signal, also after an event loop of the script has taken its place.

    asyncio and uvloop take the process's one wake-up descriptor while they run, and leave none behind.
    """

    def __init__(self, descriptor: int) -> None:
        """Begin; the descriptor does not block."""
        self._descriptor = descriptor
        self._original = signal.set_wakeup_fd
        self._interrupt_main = _thread.interrupt_main
        self._on = True  # a library may keep our function
        self.lent = False  # others have had the process's descriptor, and may have had word of a signal
        self.simulated = False  # the script has called _thread.interrupt_main()
        if (other := self._original(descriptor, warn_on_full_buffer=False)) >= 0:
            self._original(other)
            self.lent = True
        signal.set_wakeup_fd = self._set
        _thread.interrupt_main = self._simulate

    def end(self) -> None:
        """Leave the descriptor alone, and others' as it is."""
        self._on = False
        if signal.set_wakeup_fd == self._set:
            signal.set_wakeup_fd = self._original
        if _thread.interrupt_main == self._simulate:
            _thread.interrupt_main = self._interrupt_main
        with contextlib.suppress(ValueError):  # not in the main thread
            if (descriptor := self._original(-1)) != self._descriptor:
                self._original(descriptor)

    def _set(self, fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        """Be `signal.set_wakeup_fd`; where the script wants none, ours is back, and the script is told of none."""
        if fd == -1 and self._on:
            fd, warn_on_full_buffer = self._descriptor, False
        self.lent |= fd != self._descriptor
        former = self._original(fd, warn_on_full_buffer=warn_on_full_buffer)
        return -1 if former == self._descriptor and self._on else former

    def _simulate(self, signum: signal.Signals = signal.SIGINT, /) -> None:
        """Be `_thread.interrupt_main`."""
        self.simulated |= signum == signal.SIGINT
        self._interrupt_main(signum)
