"""Say what went wrong, once per job, and end the job on every rank."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, NoReturn

from ..facts import runtime

PATIENCE_S = 2.0  # for rank 0 to speak, before a launcher that sees another rank end silences it
FORWARDING_S = 0.1  # for the launcher to pass on our last words: MPICH's drops what it has not read yet
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def refuse(message: str, status: int) -> int:
    """Print a reason not to start, before MPI is there to speak over, and return the exit status.

    Each rank knows its own rank from the launcher's variables alone: the first one speaks.
    """
    launcher = runtime.detect(os.environ)
    if launcher is not None and launcher.rank > 0:
        time.sleep(PATIENCE_S)
    else:
        print(message, file=sys.stderr, flush=True)
    return status


def report(error: BaseException) -> int:
    """Tell what a script raised as Python would, without our own frames; return its exit status."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr, flush=True)
        return 1
    traceback = without_our_frames(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts in the script."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(ours):
        traceback = traceback.tb_next
    return traceback


def abort(mpi: Any, status: int) -> NoReturn:
    """End the job on every rank with a status (MPI 4.1, MPI_Abort); MPICH's may return before it has."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(FORWARDING_S)
    mpi.COMM_WORLD.Abort(status)
    os._exit(status)
