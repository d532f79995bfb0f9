"""A window into a rank: its sentinel asks for its stack, and how far it is."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterable

from .ends import file_of
from .messages import STACK_SIGNAL

ENDING_S = 1.0  # for the thread
PIPE_BYTES = 2**20  # as much as any user may have


class Window:
    """What a sentinel sees its rank through: a pipe and a socket.

    STACK_SIGNAL lets the rank, and each process that it has forked, print the stack of its main thread into the pipe,
    by a handler in C, whatever holds the interpreter. Other threads' stacks are left out: to read one while its thread
    runs may crash the process (python/cpython#116008). What comes through the socket asks for a `Progress`, which a
    thread of the rank answers as soon as the interpreter lets it.
    """

    def __init__(self) -> None:
        """Open it; raise OSError where that can't be, or something else uses the signal."""
        if signal.getsignal(STACK_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN) or caught([STACK_SIGNAL]):
            raise OSError("the signal is used already")
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)  # what the sentinel does not read is lost: the rank never waits for it
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._ours, self.its = (one.detach() for one in socket.socketpair())
        os.set_blocking(self._ours, False)
        self._files = {one: file_of(one) for one in (self.reading, self.writing, self._ours, self.its)}
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # as it is again when faulthandler lets go of it
        faulthandler.register(STACK_SIGNAL, file=self.writing, all_threads=False)
        self._answers = _thread.allocate_lock()  # held as long as the thread runs
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_OTHERS)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _thread.start_new_thread(self._answer, ())  # which a script does not find in threading.enumerate()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def end(self) -> None:
        """Close it; a signal that is on its way is no harm, until forget()."""
        faulthandler.unregister(STACK_SIGNAL)
        if self._is_ours(self.its):
            with socket.socket(fileno=os.dup(self.its)) as other, contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)  # which ends the thread
            self._answers.acquire(timeout=ENDING_S)
        for descriptor in filter(self._is_ours, self._files):
            os.close(descriptor)

    def forget(self) -> None:
        """Let the signal do what it did, because nobody is left to send it."""
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(STACK_SIGNAL) == signal.SIG_IGN:
                signal.signal(STACK_SIGNAL, signal.SIG_DFL)

    def _is_ours(self, descriptor: int) -> bool:
        """Tell whether a descriptor is still that file: a program may have closed it, and opened another."""
        try:
            return file_of(descriptor) == self._files[descriptor]
        except OSError:
            return False

    def _answer(self) -> None:
        """Answer the sentinel until the window is closed."""
        from .lines import encode
        from .progress import progress

        asked = select.poll()
        asked.register(self._ours, select.POLLIN)
        with self._answers, contextlib.suppress(Exception):  # a thread of ours shows no traceback
            while asked.poll() and self._is_ours(self._ours) and os.read(self._ours, 100):
                with contextlib.suppress(BlockingIOError):
                    os.write(self._ours, encode(progress()) + b"\n")


# What the thread leaves to the others: all signals but those that a fault of its own brings.
FOR_OTHERS = signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


def caught(numbers: Iterable[int]) -> set[int]:
    """Return the signals for which this process has a handler, Python's or another one."""
    mask = 0
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
    return {number for number in numbers if mask >> (number - 1) & 1}
