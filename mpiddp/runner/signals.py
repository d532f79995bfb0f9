"""Signals of a rank: the script's handlers, and the stop signals of schedulers."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from ..base.sigaction import get_action, set_action
from ..where import progress
from ..where.dumper import handled_signals
from .workers import protect_workers

# Libraries handle these signals: UCX freezes the process at SIGHUP (its UCX_DEBUG_SIGNO), MPICH swallows SIGUSR1,
# Intel MPI turns a crash into exit(1). A script gets them as under Python.
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
SCRIPT_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *CRASH_SIGNALS)
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)  # by which schedulers end a job
MAX_ATTEMPTS = 20

preloaded_handlers: dict[int, Any] = {}  # the C handlers that were there before us, as C's struct sigaction
received = 0  # the most urgent stop signal received; 0 for none
_forking = threading.local()  # the `mask` of the thread that forks


# Dispositions for the script

def save_preloaded_handlers() -> None:
    """Save the handlers that a preloaded tool has set, such as a profiler: they stay."""
    for number in find_c_handlers(SCRIPT_SIGNALS):
        if not (number in CRASH_SIGNALS and faulthandler.is_enabled()):
            preloaded_handlers[number] = get_action(number)


def restore_dispositions() -> None:
    """Undo what MPI_Init has done to signals: restore the handlers of Python, or of a preloaded tool."""
    for number in SCRIPT_SIGNALS:
        if number in preloaded_handlers:
            set_action(number, preloaded_handlers[number])
        else:
            signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def find_c_handlers(numbers: Iterable[int]) -> set[int]:
    """Return the signals with a handler unknown to Python, as faulthandler.register() sets one."""
    return {number for number in handled_signals(numbers) if signal.getsignal(number) == signal.SIG_DFL}


# Stop signals

def note_signal(number: int, _: FrameType | None) -> None:
    """Handle a stop signal: note it for should_stop()."""
    global received
    received = max(received, number)


def is_unhandled(number: int) -> bool:
    """Return whether neither the script nor a preloaded tool handles a signal."""
    return signal.getsignal(number) in (signal.SIG_DFL, note_signal) and number not in preloaded_handlers


def catch_signals() -> None:
    """Note stop signals that the script does not handle itself, until release_signals()."""
    watch_handlers()
    for number in filter(is_unhandled, STOP_SIGNALS):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, note_signal)
    register_fork_hooks()
    protect_workers()


def release_signals() -> None:
    """Undo catch_signals(), except what it does for workers, which may outlive the job."""
    global received
    received = 0
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == note_signal:
            signal.signal(number, signal.SIG_DFL)
    module: Any = sys.modules["_signal"]
    if getattr(module.signal, "watches_handlers", False):
        module.signal = module.signal.__wrapped__


def watch_handlers() -> None:
    """Replace what signal.signal() calls, so that the agent knows which stop signals the script leaves to us."""
    module: Any = sys.modules["_signal"]
    if not getattr(module.signal, "watches_handlers", False):
        module.signal = with_handler_published(module.signal)


def with_handler_published(install: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """Return a function like signal.signal() that also tells the agent of this process which signals are noted."""
    owner = os.getpid()

    @functools.wraps(install)
    def install_published(number: int, handler: Any) -> Any:
        former = install(number, handler)
        if number in STOP_SIGNALS and os.getpid() == owner:
            progress.publish_noted_signals(stop for stop in STOP_SIGNALS if signal.getsignal(stop) == note_signal)
        return former

    install_published.watches_handlers = True  # type: ignore[attr-defined]
    return install_published


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block the stop signals in this block and note them at its end: MPI_Init sets handlers of its own."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        catch_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# A failure

class HandlerGuard:
    """Drops what the script's handlers of signals raise, while it is active.

    One may raise at any line, as torch's does when a DataLoader's worker has ended, also where the rank reports its
    failure. In a thread other than the main one, where no handler is called, this does nothing; nor in a process that
    is forked meanwhile.
    """

    def __init__(self) -> None:
        self.is_active = True
        self._owner = os.getpid()
        self._handlers: dict[int, Any] = {}
        self._own = self._call
        persist(self._install)

    def end(self) -> None:
        """Put the script's handlers back, unless others have been set meanwhile."""
        self.is_active = False
        persist(self._restore)

    def _install(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler is not self._own and handler is not note_signal:
                self._handlers[number] = handler
                replace_handler(number, self._own)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is self._own:
                replace_handler(number, handler)

    def _call(self, number: int, frame: FrameType | None) -> None:
        if self.is_active and os.getpid() == self._owner:
            with contextlib.suppress(BaseException):
                self._handlers[number](number, frame)
        else:
            self._handlers[number](number, frame)


def replace_handler(number: int, handler: Any) -> None:
    """Replace Python's handler of a signal that has one; C's disposition, with its flags, stays."""
    action = get_action(number)
    signal.signal(number, handler)
    set_action(number, action)


def persist(act: Callable[[], object]) -> None:
    """Call a function until it does not raise, but not for ever."""
    for _ in range(MAX_ATTEMPTS):
        with contextlib.suppress(BaseException):  # of a handler
            act()
            return


# Forks: SIGTERM ends a child of the rank, as under Python; SIGUSR1, which schedulers send to it too, does nothing there

@functools.cache
def register_fork_hooks() -> None:
    """Register our hooks for each fork; Python has no way to remove them."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _before_fork() -> None:
    """Block SIGTERM until the child has reset its handler: the parent may send one at once."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    if signal.getsignal(signal.SIGTERM) == note_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
