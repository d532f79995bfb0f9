"""A rank's stack, which its sentinel asks for: a signal's handler in C prints it, whatever holds the interpreter."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterable

from .ends import file_of
from .messages import STACK_SIGNAL


class StackPipe:
    """The pipe into which a rank, and the processes that it forks, print the stack of their main thread.

    Other threads' stacks are left out: to read one while its thread runs may crash the process (python/cpython#116008).
    """

    def __init__(self) -> None:
        """Let STACK_SIGNAL print from now on; raise OSError where that can't be, or something else uses the signal."""
        if signal.getsignal(STACK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN) or caught([STACK_SIGNAL]):
            raise OSError("the signal is used already")
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)  # what the sentinel does not read is lost: the rank never waits for it
        faulthandler.register(STACK_SIGNAL, file=self.writing, all_threads=False)

        self._files = [file_of(one) for one in (self.reading, self.writing)]

    def end(self) -> None:
        """Print no more; a signal that is on its way is no harm."""
        faulthandler.unregister(STACK_SIGNAL)
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
        for descriptor, file in zip((self.reading, self.writing), self._files, strict=True):
            with contextlib.suppress(OSError):
                if file_of(descriptor) == file:  # a program may have closed it, and opened another
                    os.close(descriptor)


def caught(numbers: Iterable[int]) -> set[int]:
    """Return the signals for which this process has a handler, Python's or another one."""
    mask = 0
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
    return {number for number in numbers if mask >> (number - 1) & 1}
