"""The signals by which schedulers end a job. A rank notes them, and its forked workers leave them to the rank."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from . import signal_dispositions

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
LOOK_S, FOREVER_S = 1.0, 1e6
SETTLING_S = 0.005

noted = 0  # the most urgent signal that came; 0 for none
_forking = threading.local()
_left: set[int] = set()  # in a worker, the signals that it leaves to its rank
_protecting = False


def note(number: int, _: FrameType | None) -> None:
    """Note a signal, as its handler."""
    global noted
    noted = max(noted, number)


def are_free(number: int) -> bool:
    """Tell whether neither the script nor a preloaded tool has a handler of its own for a signal."""
    return signal.getsignal(number) in (signal.SIG_DFL, note) and number not in signal_dispositions.preloaded


def catch() -> None:
    """Note from now on the signals that the script does not handle itself."""
    for number in filter(are_free, SIGNALS):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, note)
    protect_workers()


def release() -> None:
    """Undo catch(), for workers too."""
    global noted, _protecting
    noted, _protecting = 0, False
    for number in SIGNALS:
        if signal.getsignal(number) == note:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold the signals back during this block and note them at its end: MPI_Init sets handlers of its own."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        catch()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def protect_workers() -> None:
    """Let workers that multiprocessing forks from now on leave the signals to this rank.

    Schedulers send the signals to a rank's DataLoader workers, too. Other forked processes get the
    signals as Python has them.
    """
    global _protecting
    _protecting = True
    register()


@functools.cache
def register() -> None:
    """Register our hooks for each fork."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _before_fork() -> None:
    """Block the signals until the child has set its own mask: the parent may send one at once."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _forking.rank = os.getpid()


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    global noted
    noted = 0
    caught = signal_dispositions.caught_in_c(SIGNALS)
    free = {number for number in filter(are_free, SIGNALS) if number not in caught}
    for number in SIGNALS:
        if signal.getsignal(number) == note:
            signal.signal(number, signal.SIG_DFL)
    mask = _forking.mask - _left
    _left.clear()
    forker = sys._getframe(1).f_globals.get("__name__", "")
    if _protecting and forker.endswith(".popen_fork"):  # multiprocessing's, or a copy of it
        _left.update(free)
        begin_worker(_forking.rank)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | _left)


def begin_worker(parent: int) -> None:
    """Obey only the parent in this worker, which may be gone; programs that the worker starts get signals as usual."""
    threading.Thread(target=obey_parent, args=(parent,), daemon=True).start()
    let_others_in()


def obey_parent(parent: int) -> None:
    """End this process by the first signal that it has to obey.

    A DataLoader's worker ends with status 0, as in torch; its loader would call anything else a failure.
    """
    number = await_order(parent)
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def await_order(parent: int) -> int:
    """Return the first signal that the parent sent, or that came from elsewhere and has ended the parent, too."""
    came = 0
    while not came or os.getppid() == parent:
        sent = signal.sigtimedwait(_left, LOOK_S if came else FOREVER_S)
        if sent is None:
            continue
        if sent.si_signo not in _left:  # this process handles it itself by now
            os.kill(os.getpid(), sent.si_signo)
        elif sent.si_pid == parent:
            return sent.si_signo
        else:
            came = sent.si_signo
    return came


@functools.cache
def let_others_in() -> None:
    """Let this worker's own handlers, and programs that it starts, get the signals that it leaves to its rank."""
    import _posixsubprocess
    import posix

    replace("fork_exec", unblocked, _posixsubprocess)
    replace("_fork_exec", unblocked, sys.modules.get("subprocess"))  # it has imported the same function by name
    for name in ("execv", "execve"):
        replace(name, settled, posix, os)
    for name in ("posix_spawn", "posix_spawnp"):
        replace(name, with_mask, posix, os)
    replace("system", by_spawn, posix, os)
    replace("signal", heeded, sys.modules["_signal"])


def replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *modules: Any) -> None:
    """Replace a function by what `wrap` makes of it, in all of the modules that have it: pickle compares them."""
    found = [module for module in modules if hasattr(module, name)]
    made = wrap(getattr(found[0], name)) if found else None
    for module in found:
        setattr(module, name, made)


def unblocked(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `start`, which starts a program, so that the program inherits no blocked signal.

    fork_exec() itself blocks all signals while a child shares its memory. So a signal can only come in
    just before and just after.
    """
    @functools.wraps(start)
    def started(*arguments: Any) -> Any:
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _left)
        try:
            return start(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return started


def settled(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like os.execv(): the program blocks no signal, and no signal is lost with our thread."""
    @unblocked
    @functools.wraps(execute)
    def executed(*arguments: Any) -> Any:
        time.sleep(SETTLING_S)  # our thread may have a signal already, and has to act on it
        return execute(*arguments)

    return executed


def with_mask(spawn: Callable[..., int]) -> Callable[..., int]:
    """Return a function like os.posix_spawn(): the program blocks none of the signals left to the rank."""
    @functools.wraps(spawn)
    def spawned(*arguments: Any, **options: Any) -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - _left
        return spawn(*arguments, **{"setsigmask": mask, **options})

    return spawned


def by_spawn(system: Callable[[str], int]) -> Callable[[str], int]:
    """Return a function like os.system(), by os.posix_spawn(): C's system() gives the shell this process's mask."""
    @functools.wraps(system)
    def ran(command: str) -> int:
        return os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ), 0)[1]

    return ran


def heeded(install: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """Return a function like signal.signal(): a signal that this process handles is not left to the rank any more."""
    @functools.wraps(install)
    def installed(number: int, handler: Any) -> Any:
        former = install(number, handler)
        if number in _left and handler != signal.SIG_DFL:
            _left.discard(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        return former

    return installed
