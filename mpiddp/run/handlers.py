"""Signals as a script finds them, and as it leaves them when it has failed."""

from __future__ import annotations

import signal
import threading

from ..sentinel.messages import END_SIGNAL

# Libraries take these signals for themselves: UCX freezes the process at SIGHUP (its UCX_DEBUG_SIGNO), MPICH
# swallows SIGUSR1, Intel MPI turns a crash into exit(1). A script gets them as Python has them.
FOR_SCRIPTS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
               signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def give_signals_back() -> None:
    """Undo what MPI_Init has done to signals: let each do what Python has it do."""
    for number in FOR_SCRIPTS:
        signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def silence_handlers() -> None:
    """Replace the script's signal handlers, so that none of them raises while this process ends."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != END_SIGNAL:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else ignore)


def ignore(*_: object) -> None:
    """Be a signal's handler that does nothing. Unlike SIG_IGN, programs that are started don't inherit it."""
