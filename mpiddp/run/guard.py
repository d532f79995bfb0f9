"""Notice how a program with a main() of its own ends: by an exception, by sys.exit(), or without a word."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from . import failure
from .ending import Ending


class Guard:
    """Ends the job where the program fails, as the launcher does for a script; until release().

    A program that comes to its end otherwise calls `leave` first, if it has not done so itself.
    """

    def __init__(self, ending: Ending, leave: Callable[[], None]) -> None:
        """Watch the program of the main thread, which calls this."""
        self.ending, self._leave = ending, leave
        self._program = outermost(sys._getframe())
        self._raised: BaseException | None = None  # by a block, and told to the job
        self._exited: SystemExit | None = None  # what sys.exit() has raised last, and where
        self._where = ""
        self._hook, self._exit = sys.excepthook, sys.exit
        sys.exit = self._note_exit
        atexit.register(self._end)

    def watch_exceptions(self) -> None:
        """Stand in for `sys.excepthook`, in which torch puts one of its own with each default group."""
        if sys.excepthook != self._fail:
            self._hook = sys.excepthook
            sys.excepthook = self._fail

    def accuse(self, error: BaseException) -> None:
        """Tell the job that the program raised; what it does on its way out has --abort-grace."""
        self._raised = self.ending.accuse(error)

    def release(self) -> None:
        """Let exceptions and exits do again what they did."""
        atexit.unregister(self._end)
        if sys.excepthook == self._fail:
            sys.excepthook = self._hook
        if sys.exit == self._note_exit:
            sys.exit = self._exit

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Be `sys.excepthook`; inside of another hook, which may hold back what is printed, leave the end to _end()."""
        if not self.ending.is_ours() or not self._ends_program(traceback):
            self._hook(kind, error, traceback)
        elif sys.excepthook == self._fail:
            self.release()
            self.ending.fail_by(error)
        else:
            self.accuse(error)
            self._hook(kind, error, traceback)

    def _note_exit(self, status: object = None) -> NoReturn:
        """Be `sys.exit`."""
        self._exited, self._where = SystemExit(status), failure.line_at(sys._getframe(1))
        raise self._exited

    def _end(self) -> None:
        """Leave the job at the end of the program, or end it where the program has failed."""
        if not self.ending.is_ours():
            return
        last: BaseException | None = getattr(sys, "last_value", None)
        if self._raised is None and last is not None and self._ends_program(last.__traceback__):
            self._raised = last  # another hook has taken the place of ours
        if self._raised is None and has_raised(self._program):
            self._raised = self._exit_of_program()
        if self._raised is None:
            self._leave()
            return
        self.release()
        self.ending.fail_leaving(self._raised, shown=self._raised is last, where=self._where)

    def _exit_of_program(self) -> SystemExit | None:
        """Return the failure by which the program has ended, None where that is in order, or nobody knows.

        Of a SystemExit that it raised by itself nobody knows the status. The other ranks are to notice it then
        as that of a process that is gone: they lose their connections.
        """
        if self._exited is not None:
            return self._exited if failure.status_of(self._exited) else None
        dist = sys.modules["torch.distributed"]
        if dist.is_initialized():
            dist.destroy_process_group()
        return None

    def _ends_program(self, traceback: TracebackType | None) -> bool:
        """Tell whether an exception came through the whole program, and was not just shown by it."""
        return traceback is not None and traceback.tb_frame is self._program


def outermost(frame: FrameType) -> FrameType:
    """Return the frame of the program itself."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def has_raised(frame: FrameType) -> bool:
    """Tell whether a frame that has come to its end did so by an exception: its last instruction is no return."""
    import opcode

    return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
