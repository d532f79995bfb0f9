"""The rank's word to its sentinel that a signal came, by the process's wake-up descriptor (signal.set_wakeup_fd)."""

from __future__ import annotations

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
        self._on = True  # a library may keep our function
        if (other := self._original(descriptor, warn_on_full_buffer=False)) >= 0:
            self._original(other)
        signal.set_wakeup_fd = self._set

    def end(self) -> None:
        """Leave the descriptor alone, and others' as it is."""
        self._on = False
        if signal.set_wakeup_fd == self._set:
            signal.set_wakeup_fd = self._original
        with contextlib.suppress(ValueError):  # not in the main thread
            if (descriptor := self._original(-1)) != self._descriptor:
                self._original(descriptor)

    def _set(self, fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        """Be `signal.set_wakeup_fd`; where the script wants none, ours is back, and the script is told of none."""
        if fd == -1 and self._on:
            fd, warn_on_full_buffer = self._descriptor, False
        former = self._original(fd, warn_on_full_buffer=warn_on_full_buffer)
        return -1 if former == self._descriptor and self._on else former
