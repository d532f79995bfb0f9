"""Signals of a rank: the script's handlers, the schedulers' stop signals, workers that leave these to the rank."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from ..base.termination import exit_status
from ..ipc.helper_process import END_SIGNAL
from ..where import progress
from ..where.dumper import handled_signals

# Libraries handle these signals: UCX freezes the process at SIGHUP (its UCX_DEBUG_SIGNO), MPICH swallows SIGUSR1,
# Intel MPI turns a crash into exit(1). A script gets them as under Python.
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
SCRIPT_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, *CRASH_SIGNALS)
SIGACTION_BYTES = 256  # more than a struct sigaction of any C library on Linux

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)  # by which schedulers end a job
PARENT_POLL_S, FOREVER_S = 1.0, 1e6
THREAD_ACT_S = 0.005  # for our thread to act on a received signal
TERMINATE_TIMEOUT_S = 1.0  # for a worker to act on terminate()
TERMINATE_POLL_S = 0.001

WORKER_FORKER = ".popen_fork"  # the module's name in multiprocessing, and in copies of it

preloaded_handlers: dict[int, Any] = {}  # the C handlers that were there before us, as C's struct sigaction
received = 0  # the most urgent stop signal received; 0 for none
_forking = threading.local()
_left: set[int] = set()  # in a worker, the signals that it leaves to its rank
_protecting = False


# Dispositions for the script

def save_preloaded_handlers() -> None:
    """Save the handlers that a preloaded tool has set, such as a profiler: they stay."""
    for number in find_c_handlers(SCRIPT_SIGNALS):
        if not (number in CRASH_SIGNALS and faulthandler.is_enabled()):
            import ctypes

            action = ctypes.create_string_buffer(SIGACTION_BYTES)
            ctypes.CDLL(None).sigaction(number, None, action)
            preloaded_handlers[number] = action


def restore_dispositions() -> None:
    """Undo what MPI_Init has done to signals: restore the handlers of Python, or of a preloaded tool."""
    for number in SCRIPT_SIGNALS:
        if number in preloaded_handlers:
            import ctypes

            ctypes.CDLL(None).sigaction(number, preloaded_handlers[number], None)
        else:
            signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)


def find_c_handlers(numbers: Iterable[int]) -> set[int]:
    """Return the signals with a handler unknown to Python, as faulthandler.register() sets one."""
    return {number for number in handled_signals(numbers) if signal.getsignal(number) == signal.SIG_DFL}


def mute_handlers() -> None:
    """Replace the script's signal handlers, so that none of them raises while this process ends."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != END_SIGNAL:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else ignore)


def ignore_clean_exits() -> None:
    """Make the script's signal handlers return if they call sys.exit(0): its exit functions have run."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler and not is_ours(handler):
            signal.signal(number, without_clean_exit(handler))


def without_clean_exit(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    """Return a signal's handler that ignores a SystemExit with status 0 of another one."""
    @functools.wraps(handler, updated=())
    def handle(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except SystemExit as error:
            if exit_status(error.code):
                raise

    return handle


def ignore(*_: object) -> None:
    """Handle a signal by doing nothing. Unlike SIG_IGN, started programs do not inherit that."""


def is_ours(handler: object) -> bool:
    """Return whether a signal's handler is a function of this package."""
    return str(getattr(handler, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


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
    protect_workers()


def release_signals() -> None:
    """Undo catch_signals() and protect_workers()."""
    global received, _protecting
    received, _protecting = 0, False
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == note_signal:
            signal.signal(number, signal.SIG_DFL)
    module: Any = sys.modules["_signal"]
    if getattr(module.signal, "watches_handlers", False):
        module.signal = module.signal.__wrapped__


def watch_handlers() -> None:
    """Replace what signal.signal() calls, so that the agent knows which stop signals the script leaves to us."""
    if not getattr(sys.modules["_signal"].signal, "watches_handlers", False):
        wrap_function("signal", with_handler_published, sys.modules["_signal"])


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


# Workers: schedulers send the signals to a rank's DataLoader workers, too

def protect_workers() -> None:
    """Make workers that multiprocessing forks from now on leave the stop signals to this rank.

    Other forked processes get the signals as under Python.
    """
    global _protecting
    _protecting = True
    register_fork_hooks()


@functools.cache
def register_fork_hooks() -> None:
    """Register our hooks for each fork; Python has no way to remove them."""
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)


def _before_fork() -> None:
    """Block the signals until the child has set its own mask: the parent may send one at once."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _forking.rank = os.getpid()


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)
    forker = sys._getframe(1).f_globals.get("__name__", "")
    if _protecting and forker.endswith(WORKER_FORKER):
        hook_terminate(forker)


def _in_child() -> None:
    global received
    received = 0
    c_handlers = find_c_handlers(STOP_SIGNALS)
    free = {number for number in filter(is_unhandled, STOP_SIGNALS) if number not in c_handlers}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == note_signal:
            signal.signal(number, signal.SIG_DFL)
    mask = _forking.mask - _left
    _left.clear()
    forker = sys._getframe(1).f_globals.get("__name__", "")
    if _protecting and forker.endswith(WORKER_FORKER):
        _left.update(free)
        defer_to_parent(_forking.rank)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | _left)


def defer_to_parent(parent: int) -> None:
    """Make this worker obey only stop signals of its parent and its own; its programs get signals as usual."""
    try:
        threading.Thread(target=obey_parent, args=(parent,), daemon=True).start()
    except RuntimeError:  # no thread can be started: it gets the signals as under Python
        _left.clear()
    else:
        hook_process_starts()


def obey_parent(parent: int) -> None:
    """End this process at the first signal that it has to obey.

    A DataLoader's worker ends with status 0, as in torch; its loader treats any other status as a failure.
    """
    number, sender = await_signal(parent)
    data = sys.modules.get("torch.utils.data")
    if sender != os.getpid() and data is not None and data.get_worker_info() is not None:
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def await_signal(parent: int) -> tuple[int, int]:
    """Return the first signal that this process or its parent sent, and the sender.

    A signal of another process counts if the parent has ended, too; its sender is 0 then.
    """
    pending = 0
    while not pending or os.getppid() == parent:
        info = signal.sigtimedwait(_left, PARENT_POLL_S if pending else FOREVER_S)
        if info is None:
            continue
        if info.si_signo not in _left:  # this process handles it itself by now
            os.kill(os.getpid(), info.si_signo)
        elif info.si_pid in (parent, os.getpid()):
            return info.si_signo, info.si_pid
        else:
            pending = info.si_signo
    return pending, 0


@functools.cache
def hook_terminate(module: str) -> None:
    """Make terminate() of the workers that a module forks kill those that cannot act on SIGTERM.

    The worker's thread that acts on it needs Python's lock (GIL), which native code may hold for ever.
    """
    workers = sys.modules[module].Popen
    workers.terminate = with_kill(workers.terminate)


def with_kill(terminate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a method like Popen.terminate(), which kills a worker whose thread takes SIGTERM and cannot act on it.

    A signal that no thread takes is pending: a worker blocks it for a while that handles it itself.
    """
    @functools.wraps(terminate)
    def terminate_or_kill(worker: Any) -> None:
        terminate(worker)
        deadline = time.monotonic() + TERMINATE_TIMEOUT_S
        while worker.poll() is None and is_masked(signal.SIGTERM, worker.pid, "SigBlk"):
            if time.monotonic() > deadline:
                if not is_masked(signal.SIGTERM, worker.pid, "ShdPnd"):
                    worker.kill()
                break
            time.sleep(TERMINATE_POLL_S)

    return terminate_or_kill


def is_masked(number: int, pid: int, name: str) -> bool:
    """Return whether a process's main thread blocks a signal (SigBlk), or one is pending (ShdPnd); man 5 proc."""
    try:
        with open(f"/proc/{pid}/status") as status:
            masks = [int(line.split()[1], 16) for line in status if line.startswith(f"{name}:")]
    except OSError:
        return False
    return any(mask >> (number - 1) & 1 for mask in masks)


@functools.cache
def hook_process_starts() -> None:
    """Replace what starts programs in this worker, and signal.signal(), for the rest of its life.

    Programs must not inherit the blocked signals, and a signal that the worker handles itself is unblocked.
    """
    import _posixsubprocess
    import posix

    wrap_function("fork_exec", with_unblocked_signals, _posixsubprocess)
    # subprocess has imported the same function by name
    wrap_function("_fork_exec", with_unblocked_signals, sys.modules.get("subprocess"))
    for name in ("execv", "execve"):
        wrap_function(name, with_settled_signals, posix, os)
    for name in ("posix_spawn", "posix_spawnp"):
        wrap_function(name, with_signal_mask, posix, os)
    wrap_function("system", with_spawned_shell, posix, os)
    wrap_function("signal", with_signal_claimed, sys.modules["_signal"])


def wrap_function(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *modules: Any) -> None:
    """Replace a function by `wrap` of it: by the same object in all modules that have it: pickle compares them."""
    owners = [module for module in modules if hasattr(module, name)]
    wrapped = wrap(getattr(owners[0], name)) if owners else None
    for module in owners:
        setattr(module, name, wrapped)


def with_unblocked_signals(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like `start`, which starts a program, so that the program inherits no blocked signal.

    fork_exec() itself blocks all signals while a child shares its memory. So a signal can only come just before and
    just after.
    """
    @functools.wraps(start)
    def start_unblocked(*arguments: Any) -> Any:
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _left)
        try:
            return start(*arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return start_unblocked


def with_settled_signals(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like os.execv(): the program blocks no signal, and none is lost with our thread."""
    @with_unblocked_signals
    @functools.wraps(execute)
    def execute_settled(*arguments: Any) -> Any:
        time.sleep(THREAD_ACT_S)
        return execute(*arguments)

    return execute_settled


def with_signal_mask(spawn: Callable[..., int]) -> Callable[..., int]:
    """Return a function like os.posix_spawn(): the program blocks none of the signals left to the rank."""
    @functools.wraps(spawn)
    def spawn_unblocked(*arguments: Any, **options: Any) -> int:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ()) - _left
        return spawn(*arguments, **{"setsigmask": mask, **options})

    return spawn_unblocked


def with_spawned_shell(system: Callable[[str], int]) -> Callable[[str], int]:
    """Return a function like os.system(), by os.posix_spawn(): C's system() gives the shell this process's mask."""
    @functools.wraps(system)
    def run_shell(command: str) -> int:
        return os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ), 0)[1]

    return run_shell


def with_signal_claimed(install: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """Return a function like signal.signal(): a signal that this worker handles is no longer left to the rank."""
    @functools.wraps(install)
    def install_claimed(number: int, handler: Any) -> Any:
        former = install(number, handler)
        if number in _left and handler != signal.SIG_DFL:
            _left.discard(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        return former

    return install_claimed
