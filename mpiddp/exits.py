"""Ways out of this process, and out of the job with it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any, NoReturn

from .say import FORWARDING_S

hard_exit = os._exit  # which a script's call does not reach


def run_exit_functions() -> None:
    """Join the threads and call the atexit functions, as Python does at the end of a program."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:  # of a signal's handler
        if error.code not in (None, 0):
            raise
    atexit._run_exitfuncs()


def flush_python() -> str:
    """Write out what Python's streams hold, and return why that failed, empty where nobody wants it."""
    failed = ""
    for name in ("stdout", "stderr"):
        try:
            with contextlib.suppress(BrokenPipeError, ValueError, AttributeError):
                getattr(sys, name).flush()
        except Exception as error:  # of a stream of the script's own, perhaps
            failed = f"{name}: {getattr(error, 'strerror', error)}"
    return failed


def flush() -> str:
    """Write out what Python's stdout and stderr hold, and C's stdout, and return why that failed for Python's.

    No other stream of C's: a thread that waits in input() has stdin locked.
    """
    import ctypes

    failed = flush_python()
    libc = ctypes.CDLL(None)
    libc.fflush(ctypes.c_void_p.in_dll(libc, "stdout"))
    return failed


def flush_streams() -> None:
    """Write out what all of C's streams hold, but wait for none that a thread has locked."""
    import ctypes

    flushing = threading.Thread(target=ctypes.CDLL(None).fflush, args=(None,), daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        flushing.start()
        flushing.join(FORWARDING_S)


def let_through() -> None:
    """Return when what was said has probably reached the launcher."""
    flush()
    time.sleep(FORWARDING_S)


def c_exit(status: int) -> NoReturn:
    """Leave by C's exit(), which holds the interpreter: no thread runs on in it."""
    import ctypes

    ctypes.PyDLL(None).exit(status)
    hard_exit(status)


def skip_exit_functions() -> None:
    """Let C's exit() call the exit functions that are registered after this, and none from before.

    They run in reverse order (man 3 exit): after those of the script's libraries comes one that writes out
    C's streams and one that leaves, before those of torch, which take apart its tables of operators for
    0.2 s. Does nothing where libc lacks on_exit() and fcloseall() (glibc has them).
    """
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit") and hasattr(libc, "fcloseall"):
        libc.on_exit(libc._exit, None)  # which is called with the status
        libc.__cxa_atexit(libc.fcloseall, None, None)  # waits for no stream that a thread has locked (man 3 fcloseall)


def abort(mpi: Any, status: int) -> NoReturn:
    """End the job on every rank with a status (MPI 4.1, MPI_Abort); MPICH's may return before it has."""
    if not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(status)
    hard_exit(status)
