"""End this process, or the whole job: flush files, run exit functions, leave by C's exit() or by MPI_Abort."""

from __future__ import annotations

import contextlib
import gc
import io
import operator
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from .stderr import LAUNCHER_FORWARDING_S, STDERR
from .timeouts import run_briefly

IO_BASE = io.IOBase.__bases__[0]  # the type in C of all files: issubclass() with it calls no Python code
hard_exit = os._exit  # Python's own: os._exit is replaced while a script runs
MAX_LONG, MAX_INT = 2**63 - 1, 2**31 - 1  # of C on 64-bit Linux


def exit_status(code: object) -> int:
    """Return the exit status that Python gives SystemExit(code) (Python/pythonrun.c).

    A number that C's long cannot hold counts as -1. Anything but a number and None is printed, and gives 1.
    """
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFF if -MAX_LONG - 1 <= code <= MAX_LONG else 0xFF


def to_c_int(status: int) -> int:
    """Return a status as os._exit() takes it; raise TypeError or OverflowError as it does."""
    number = operator.index(status)
    if not -MAX_INT - 1 <= number <= MAX_INT:
        raise OverflowError("Python int too large to convert to C int")
    return number


def flush_python() -> None:
    """Flush Python's stdout and stderr, as far as possible: a script may have replaced them by any object."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()


def flush() -> None:
    """Flush Python's stdout and stderr and C's stdout.

    C's other streams are left alone: a thread that waits in input() has locked stdin.
    """
    import ctypes

    flush_python()
    libc = ctypes.CDLL(None)
    libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))


def flush_files() -> None:
    """Flush all Python files that are open for writing, also libraries', as far as possible.

    To find them takes 0.1 s for a million of the script's objects.
    """
    for item in gc.get_objects():
        if issubclass(type(item), IO_BASE):  # a proxy may deceive isinstance()
            with contextlib.suppress(Exception):
                if item.writable():
                    item.flush()


def flush_and_wait() -> None:
    """Flush, and give the launcher time to read the output; do not wait for a file system that hangs."""
    run_briefly(flush_files, LAUNCHER_FORWARDING_S)
    flush()
    time.sleep(LAUNCHER_FORWARDING_S)


def needs_exit_functions(environ: Mapping[str, str]) -> bool:
    """Return whether a profiler may be loaded into this process: it writes its results in a C exit function."""
    return any(environ.get(name) for name in ("LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH"))


def skip_exit_functions() -> None:
    """Make C's exit() skip the exit functions that are registered so far.

    C calls exit functions in reverse order (man 3 exit). This call registers two: one flushes C's streams, the next
    ends the process. So those that the script's libraries register later run, and those of torch do not: to take apart
    its tables of operators takes 0.2 s. Does nothing if libc lacks on_exit() or fcloseall(), which are glibc's.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)  # on_exit() hands the status to _exit()
        libc.__cxa_atexit(libc.fcloseall, None, None)  # waits for no stream that a thread has locked (man 3 fcloseall)


def abort(mpi: Any, status: int, reason_printed: bool = True) -> NoReturn:
    """End the job on every rank by MPI_Abort(status) (MPI 4.1), and this process, if MPI_Abort returns.

    MPICH's may return before the job has ended. If the reason is printed already, what MPI prints of it is suppressed.
    """
    if not mpi.Is_finalized():
        if reason_printed:
            with contextlib.suppress(Exception):  # a library without these symbols; no descriptor is left
                abort_open_mpi(mpi, status)
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
        mpi.COMM_WORLD.Abort(status)
    hard_exit(status)


def abort_open_mpi(mpi: Any, status: int) -> None:
    """End the job as Open MPI's MPI_Abort does after it has printed a page of help; return under another MPI.

    That page does not go through stderr. What `opal_abort_print_stack` and `opal_abort_delay` ask for is still printed.
    """
    import ctypes

    if has_quiet_abort(mpi):
        library = ctypes.PyDLL(mpi.__file__)
        library.ompi_mpi_abort(ctypes.byref(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world")), status)


def has_quiet_abort(mpi: Any) -> bool:
    """Return whether abort_open_mpi() ends the job."""
    name, version = mpi.get_vendor()
    return bool(name == "Open MPI" and (4,) <= version < (7,))


def abort_at_exit(mpi: Any, status: int) -> bool:
    """Let C's exit() end the job as abort_open_mpi() does, whatever status it gets; return whether it will.

    glibc calls a function that __cxa_atexit() has registered with its argument and the exit status, the last one first.
    If that is exit() itself, its status counts for the others (stdlib/exit.c). C's streams are flushed before the
    abort; exit functions that were registered earlier do not run.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if not has_quiet_abort(mpi) or mpi.Is_finalized() or not hasattr(libc, "on_exit"):
        return False
    library = ctypes.CDLL(mpi.__file__)
    comm_world = ctypes.byref(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world"))
    libc.__cxa_atexit(library.ompi_mpi_abort, comm_world, None)
    libc.__cxa_atexit(libc.fcloseall, None, None)
    libc.__cxa_atexit(libc.exit, ctypes.c_void_p(status), None)
    return True


def exit_by_c(status: int) -> NoReturn:
    """End this process by C's exit functions, without Python's own end."""
    import ctypes

    ctypes.CDLL(None).exit(status)
    hard_exit(status)


class HardExit(SystemExit):
    """Stands for a call of os._exit() where an exception is reported."""
