"""Signals as a script finds them, and as it leaves them when it has failed."""

from __future__ import annotations

import signal
import threading

from ..sentinel.wire import END

# Libraries take these signals for their own use: UCX freezes the process at SIGHUP (its UCX_DEBUG_SIGNO),
# MPICH swallows SIGUSR1, Intel MPI makes an exit(1) of a crash. A script finds them as Python leaves them.
FOR_SCRIPTS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
               signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def give_signals_back() -> None:
    """Let signals do again what Python has them do, which MPI_Init may have changed."""
    for number in FOR_SCRIPTS:
        signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def silence_handlers() -> None:
    """Let no signal's handler of the script raise any more, in what is left of this process."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != END:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else ignore)


def ignore(*_: object) -> None:
    """Be a signal's handler; a program that is started finds the signal as ever, as it would not if it was ignored."""
