"""Ways to end this process, or the whole job with it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from .stderr import LAUNCHER_FORWARDING_S, STDERR

FILE = io.IOBase.__bases__[0]  # the type in C of all files: a check against it calls no Python code
hard_exit = os._exit  # Python's own: os._exit is replaced while a script runs, so that its call is noticed
LARGEST_LONG, LARGEST_INT = 2**63 - 1, 2**31 - 1  # of C, on all Linux systems with 64 bits


def exit_status(code: object) -> int:
    """Return the status with which Python ends a process after SystemExit with this `code` (Python/pythonrun.c).

    A number that C's long cannot hold is -1 there. Anything but a number and None is printed, and gives 1.
    """
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFF if -LARGEST_LONG - 1 <= code <= LARGEST_LONG else 0xFF


def c_int(status: int) -> int:
    """Return a status as os._exit() takes it; raise TypeError or OverflowError, as that does."""
    number = operator.index(status)
    if not -LARGEST_INT - 1 <= number <= LARGEST_INT:
        raise OverflowError("Python int too large to convert to C int")
    return number


def run_exit_functions() -> None:
    """Join the threads and call the atexit functions, as Python does at the end of a program."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:  # raised by a signal's handler
        if exit_status(error.code):
            raise
    atexit._run_exitfuncs()


def flush_python() -> str:
    """Flush Python's stdout and stderr, and return why that failed.

    The reason is empty if it worked, or if the stream is closed or nobody reads it.
    """
    failed = ""
    for name in ("stdout", "stderr"):
        try:
            with contextlib.suppress(BrokenPipeError, ValueError, AttributeError):
                getattr(sys, name).flush()
        except Exception as error:  # a script may have put any object in the stream's place
            failed = f"{name}: {getattr(error, 'strerror', error)}"
    return failed


def flush() -> str:
    """Flush Python's stdout and stderr and C's stdout, and return why that failed for Python's.

    C's other streams are left alone: a thread that waits in input() has locked stdin.
    """
    import ctypes

    failed = flush_python()
    libc = ctypes.CDLL(None)
    libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))
    return failed


def flush_streams() -> None:
    """Flush all of C's streams, but do not wait long for a stream that a thread has locked."""
    import ctypes

    shortly(lambda: ctypes.CDLL(None).fflush(None))


def shortly(act: Callable[[], object]) -> None:
    """Call `act` in another thread, and do not wait long for it."""
    acting = threading.Thread(target=act, daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        acting.start()
        acting.join(LAUNCHER_FORWARDING_S)


def flush_files() -> list[Any]:
    """Flush all files that this process has open for writing, but those that cannot be flushed; return all files.

    They are what gc.get_objects() finds, also those that only a library holds.
    """
    files = [one for one in gc.get_objects() if issubclass(type(one), FILE)]  # a proxy may deceive isinstance()
    for file in files:
        with contextlib.suppress(Exception):
            if file.writable():
                file.flush()
    return files


def let_through() -> None:
    """Flush, and wait until the launcher has probably read the output, but not for a file system that hangs."""
    shortly(flush_files)
    flush()
    time.sleep(LAUNCHER_FORWARDING_S)


def c_exit(status: int) -> NoReturn:
    """Leave by C's exit() and keep the interpreter's lock, so that no thread runs Python code meanwhile."""
    import ctypes

    ctypes.PyDLL(None).exit(status)
    hard_exit(status)


def skip_exit_functions() -> None:
    """Let C's exit() call the exit functions that are registered after this call, and none from before.

    C calls exit functions in reverse order (man 3 exit). This call registers two: one writes out C's streams,
    the next ends the process. They run after those of the script's libraries. Those of torch never
    run: they would take apart its tables of operators, which takes 0.2 s. Does nothing if libc lacks
    on_exit() or fcloseall() (glibc has them).
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)  # on_exit() hands the status to _exit()
        libc.__cxa_atexit(libc.fcloseall, None, None)  # waits for no stream that a thread has locked (man 3 fcloseall)


def abort(mpi: Any, status: int, told: bool = True) -> NoReturn:
    """End the job on every rank with a status (MPI 4.1, MPI_Abort), and this process if MPI_Abort returns.

    MPICH's may return before the job has ended. Where the reason is `told`, what MPI says of it is not printed.
    """
    if not mpi.Is_finalized():
        if told:
            with contextlib.suppress(Exception):  # a library without these symbols; no descriptor is left
                abort_open_mpi(mpi, status)
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
        mpi.COMM_WORLD.Abort(status)
    hard_exit(status)


def abort_open_mpi(mpi: Any, status: int) -> None:
    """End the job as Open MPI's MPI_Abort does after it has given the launcher a page to print; else return.

    That page goes past stderr. What `opal_abort_print_stack` and `opal_abort_delay` ask for is still printed.
    """
    import ctypes

    name, version = mpi.get_vendor()
    if name == "Open MPI" and (4,) <= version < (6,):
        library = ctypes.PyDLL(mpi.__file__)
        library.ompi_mpi_abort(ctypes.byref(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world")), status)


class HardExit(SystemExit):
    """A call of os._exit(), as if it raised an error."""
