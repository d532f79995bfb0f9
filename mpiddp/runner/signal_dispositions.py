"""Signals as a script finds them, and as it leaves them when it has failed."""

from __future__ import annotations

import faulthandler
import signal
import threading
from collections.abc import Iterable
from typing import Any

from ..sentinel.protocol import END_SIGNAL
from ..where.dumper import handled_signals

# Libraries take these signals for themselves: UCX freezes the process at SIGHUP (its UCX_DEBUG_SIGNO), MPICH
# swallows SIGUSR1, Intel MPI turns a crash into exit(1). A script gets them as Python has them.
FOR_SCRIPTS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
               signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
SIGACTION_BYTES = 256  # more than any Linux's C library has in a struct sigaction

preloaded: dict[int, Any] = {}  # the C handlers that were there before us, as C's sigaction() has them


def note_preloaded() -> None:
    """Note the handlers that a preloaded tool has set, such as a profiler: they stay."""
    for number in caught_in_c(FOR_SCRIPTS):
        if not (number in CRASHES and faulthandler.is_enabled()):
            import ctypes

            kept = ctypes.create_string_buffer(SIGACTION_BYTES)
            ctypes.CDLL(None).sigaction(number, None, kept)
            preloaded[number] = kept


def give_signals_back() -> None:
    """Undo what MPI_Init has done to signals: let each do what Python, or a preloaded tool, has it do."""
    for number in FOR_SCRIPTS:
        if number in preloaded:
            import ctypes

            ctypes.CDLL(None).sigaction(number, preloaded[number], None)
        else:
            signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def caught_in_c(numbers: Iterable[int]) -> set[int]:
    """Return the signals that have a handler unknown to Python: faulthandler.register() sets such ones."""
    return {number for number in handled_signals(numbers) if signal.getsignal(number) == signal.SIG_DFL}


def silence_handlers() -> None:
    """Replace the script's signal handlers, so that none of them raises while this process ends."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != END_SIGNAL:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else ignore)


def ignore(*_: object) -> None:
    """Be a signal's handler that does nothing. Unlike SIG_IGN, programs that are started don't inherit it."""


def is_ours(handler: object) -> bool:
    """Tell whether a signal's handler is a function of this package."""
    return str(getattr(handler, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
