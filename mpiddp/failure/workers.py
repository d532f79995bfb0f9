"""Which worker of this process has ended abnormally: a process of multiprocessing's, such as a DataLoader's worker."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..base.polling import poll_until
from .postmortem import describe_signal
from .traceback import list_code_lines, parse_error_text

END_TIMEOUT_S = 5.0  # for a worker that has closed its connections to end
CONNECTION_FILE = "/multiprocessing/connection.py"
DEADLY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def find_dead_worker(errors: Sequence[BaseException]) -> str:
    """Return which worker has ended abnormally, and how; empty if none has, or if one of the errors quotes a worker's.

    A worker that somebody has asked to end does not count. A connection to a worker is lost before the worker has
    ended: after an error of that kind this waits for the end.
    """
    if any(parse_error_text(error) is not None for error in errors):
        return ""
    workers = list_workers()
    deadline = time.monotonic() + (END_TIMEOUT_S if any(map(is_lost_connection, errors)) else 0.0)
    with contextlib.suppress(TimeoutError):
        return poll_until(lambda: describe_dead(workers), deadline)
    return ""


def list_workers() -> list[Any]:
    """Return the processes that multiprocessing has started here and that somebody still holds, the first one first."""
    module: Any = sys.modules.get("multiprocessing.process")
    workers = [worker for worker in (module._dangling if module is not None else ())
               if worker._parent_pid == os.getpid() and not worker._closed and worker.pid is not None]
    return sorted(workers, key=lambda worker: worker._identity)


def describe_dead(workers: Sequence[Any]) -> str | None:
    """Return the first worker that has ended abnormally, and how; empty if all others have ended, None if not."""
    statuses = [worker.exitcode for worker in workers]
    for worker, status in zip(workers, statuses, strict=True):
        if status is not None and (status > 0 or -status in DEADLY_SIGNALS):
            how = describe_signal(-status, out_of_memory=False) if status < 0 else f"exited with status {status}"
            return f"worker {worker.name} (pid {worker.pid}) {how}"
    return None if None in statuses else ""


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error says that a process at the other end of multiprocessing's connection is gone."""
    lines = list_code_lines(error.__traceback__)
    return (isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and bool(lines)
            and lines[-1].file.endswith(CONNECTION_FILE))
