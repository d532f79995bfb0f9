"""The signals by which schedulers end a job: a rank notes them, and the workers that it forks leave them to it."""

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

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
LOOK_S, FOREVER_S = 1.0, 1e6
SETTLING_S = 0.005

noted = 0  # the signal that came, the most urgent of them; 0 for none
_forking = threading.local()
_left: set[int] = set()  # in a worker, the signals that it leaves to its rank
_protecting = False


def note(number: int, _: FrameType | None) -> None:
    """Note a signal, as its handler."""
    global noted
    noted = max(noted, number)


def are_free(number: int) -> bool:
    """Tell whether the script leaves a signal to us."""
    return signal.getsignal(number) in (signal.SIG_DFL, note)


def caught_in_c() -> set[int]:
    """Return the signals for which there is a handler that Python knows nothing of: faulthandler.register()'s, say."""
    with open("/proc/self/status") as file:
        mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
    return {number for number in SIGNALS if mask >> (number - 1) & 1 and signal.getsignal(number) == signal.SIG_DFL}


def catch() -> None:
    """Note the signals from now on, where the script does not handle them itself."""
    for number in filter(are_free, SIGNALS):
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(number, note)
    protect_workers()


def release() -> None:
    """Let signals do again what they did before catch(), in workers too."""
    global noted, _protecting
    noted, _protecting = 0, False
    for number in SIGNALS:
        if signal.getsignal(number) == note:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Keep the signals until the end of this block and then note them: MPI_Init has handlers of its own in place."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        catch()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def protect_workers() -> None:
    """Let the workers that multiprocessing forks from now on leave the signals to this rank.

    Schedulers send them to a rank's DataLoader workers, too. Any other process that is forked finds
    the signals as Python leaves them.
    """
    global _protecting
    _protecting = True
    register()


@functools.cache
def register() -> None:
    """Be called at each fork."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _before_fork() -> None:
    """Keep signals from the child until it has its own way with them: its parent may send one at once."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    global noted
    noted = 0
    caught = caught_in_c()
    free = {number for number in filter(are_free, SIGNALS) if number not in caught}
    for number in SIGNALS:
        if signal.getsignal(number) == note:
            signal.signal(number, signal.SIG_DFL)
    mask = _forking.mask - _left
    _left.clear()
    forker = sys._getframe(1).f_globals.get("__name__", "")
    if _protecting and forker.endswith(".popen_fork"):  # multiprocessing's, or a copy of it
        _left.update(free)
        begin_worker()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | _left)


def begin_worker() -> None:
    """Obey the parent alone in this process, and let the programs that it starts obey whom they would."""
    threading.Thread(target=obey_parent, args=(os.getppid(),), daemon=True).start()
    let_others_in()


def obey_parent(parent: int) -> None:
    """End this process by the first of the signals that it has to obey.

    A DataLoader's worker ends with status 0 then, as torch has it; its loader would call it a failure otherwise.
    """
    number = await_order(parent)
    data = sys.modules.get("torch.utils.data")
    if data is not None and data.get_worker_info() is not None:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def await_order(parent: int) -> int:
    """Return the first signal that the parent has sent, or that came from elsewhere and has ended the parent."""
    came = 0
    while not came or os.getppid() == parent:
        sent = signal.sigtimedwait(_left, LOOK_S if came else FOREVER_S)
        if sent is None:
            continue
        if sent.si_signo not in _left:  # by now this process handles it itself
            os.kill(os.getpid(), sent.si_signo)
        elif sent.si_pid == parent:
            return sent.si_signo
        else:
            came = sent.si_signo
    return came


@functools.cache
def let_others_in() -> None:
    """Let handlers of this worker's own, and programs that it starts, get the signals that it leaves to its rank."""
    import _posixsubprocess
    import posix

    replace("fork_exec", unblocked, _posixsubprocess)
    replace("_fork_exec", unblocked, sys.modules.get("subprocess"))  # the same, which it has imported by name
    for name in ("execv", "execve"):
        replace(name, settled, posix, os)
    for name in ("posix_spawn", "posix_spawnp"):
        replace(name, with_mask, posix, os)
    replace("system", by_spawn, posix, os)
    replace("signal", heeded, sys.modules["_signal"])


def replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *modules: Any) -> None:
    """Put what `wrap` makes of a function in its place in modules that have it; pickle compares it in both."""
    found = [module for module in modules if hasattr(module, name)]
    made = wrap(getattr(found[0], name)) if found else None
    for module in found:
        setattr(module, name, made)


def unblocked(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return `start`, by which a program begins, such that it inherits no blocked signal.

    fork_exec() blocks all signals itself while a child shares its memory, so that none can come in but
    in the moments before and after.
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
    """Return os.execv() such that the program blocks no signal, and none is lost with the thread that awaits them."""
    @unblocked
    @functools.wraps(execute)
    def executed(*arguments: Any) -> Any:
        time.sleep(SETTLING_S)  # for that thread to act on a signal that it was handed before they were unblocked
        return execute(*arguments)

    return executed


def with_mask(spawn: Callable[..., int]) -> Callable[..., int]:
    """Return os.posix_spawn() such that the program blocks none of the signals left to the rank."""
    @functools.wraps(spawn)
    def spawned(*arguments: Any, **options: Any) -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - _left
        return spawn(*arguments, **{"setsigmask": mask, **options})

    return spawned


def by_spawn(system: Callable[[str], int]) -> Callable[[str], int]:
    """Return os.system() by os.posix_spawn(): C's has no way to give a shell a mask but this process's own."""
    @functools.wraps(system)
    def ran(command: str) -> int:
        return os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ), 0)[1]

    return ran


def heeded(install: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """Return signal.signal() such that what this process handles itself is no longer left to the rank."""
    @functools.wraps(install)
    def installed(number: int, handler: Any) -> Any:
        former = install(number, handler)
        if number in _left and handler != signal.SIG_DFL:
            _left.discard(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        return former

    return installed
