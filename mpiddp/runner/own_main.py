"""Ends the job if a program with its own main() fails, as `python -m mpi4py` does: by MPI_Abort, after Python's report.

No agent watches such a program. Python passes an uncaught exception to atexit functions, as `sys.last_value`, but not
a SystemExit: hence the hook of sys.exit().
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import NoReturn

from ..base.stderr import warn
from ..base.termination import abort, flush_and_wait
from ..failure import exception
from ..options.table import variable_name

ADVICE = "start it by `python -m mpiddp --no-init main.py`"
AGENT_OPTIONS = ("log-dir", "prefix", "show", "error-file", "stall", "exit-timeout", "abort-grace")


class ExitWatch:
    """Ends the job when the program ends by an exception or a failed sys.exit(), until release().

    If the program ends in order without having left the job, `leave` is called.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave, self._pid = leave, os.getpid()
        self._program = find_outermost(sys._current_frames()[threading.main_thread().ident or 0])
        self._exit = sys.exit
        self._exited: SystemExit | None = None  # the last one of sys.exit()
        sys.exit = self._note_exit
        atexit.register(self._on_exit)

    def release(self) -> None:
        """Stop watching."""
        atexit.unregister(self._on_exit)
        if sys.exit == self._note_exit:
            sys.exit = self._exit

    def fail(self, error: BaseException) -> NoReturn:
        """Print an exception and end the job now: the program may still catch it, and the other ranks would wait."""
        exception.print_exception(error)
        end_job(error)

    def _note_exit(self, status: str | int | None = None, /) -> NoReturn:
        """Act as `sys.exit`."""
        try:
            self._exit(status)
        except SystemExit as error:
            self._exited = error
            raise

    def _on_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        last: BaseException | None = getattr(sys, "last_value", None)
        if last is not None and last.__traceback__ is not None and last.__traceback__.tb_frame is self._program:
            end_job(last)  # others that Python or a library has printed did not leave the program
        if has_raised(self._program):
            if self._exited is None:
                close_group()
            elif exception.find_script_status(self._exited):
                end_job(self._exited)
        self._leave()


def end_job(error: BaseException) -> NoReturn:
    """End the job on all ranks with Python's status for an exception, which is printed already."""
    from mpi4py import MPI

    flush_and_wait()
    abort(MPI, exception.find_script_status(error))


def close_group() -> None:
    """Destroy the process group of a rank that raised SystemExit, of unknown status: ranks that wait for it fail."""
    dist = sys.modules["torch.distributed"]
    if dist.is_initialized():
        dist.destroy_process_group()


def find_outermost(frame: FrameType) -> FrameType:
    """Return the outermost frame, that of the program itself."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def has_raised(frame: FrameType) -> bool:
    """Return whether a frame that has ended did so by an exception: its last instruction is no return."""
    import opcode

    return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def warn_unused_options(environ: Mapping[str, str]) -> None:
    """Warn `needs-launcher` if a variable is set of an option that needs an agent."""
    if unused := [name for name in map(variable_name, AGENT_OPTIONS) if environ.get(name)]:
        warn([f"needs-launcher: no effect in a program with its own main(): {', '.join(unused)}; {ADVICE}"])
