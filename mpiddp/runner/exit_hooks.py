"""Notice how a program with its own main() ends: by an exception, by sys.exit(), or in order."""

from __future__ import annotations

import atexit
import builtins
import functools
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ..failure import exception
from .ending import Ending

EXITS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))


class Guard:
    """Ends the job if the program fails, as the launcher does for a script, until release().

    If the program ends in order without having left the job, `leave` is called.
    """

    def __init__(self, ending: Ending, leave: Callable[[], None]) -> None:
        """Watch the program; call this in its main thread."""
        self.ending, self._leave = ending, leave
        self._program = outermost(sys._getframe())
        ending.main = self._program.f_globals
        self._raised: BaseException | None = None  # by a `with` block; the job knows it
        self._exited: SystemExit | None = None  # what sys.exit(), exit() or quit() raised last; self._where is the line
        self._where = ""
        self._hook = sys.excepthook
        self._exits = [(module, name, leave := getattr(module, name), self._noting(leave)) for module, name in EXITS
                       if hasattr(module, name)]
        for module, name, _, noting in self._exits:
            setattr(module, name, noting)
        atexit.register(self._end)

    def watch_exceptions(self) -> None:
        """Put ours in the place of `sys.excepthook`; torch sets one with each default group, which ours then calls."""
        if sys.excepthook != self._fail:
            self._hook = sys.excepthook
            sys.excepthook = self._fail

    def report(self, error: BaseException) -> None:
        """Tell the job that the program raised; the program then has --abort-grace to end."""
        self._raised = self.ending.report(error)

    def release(self) -> None:
        """Let exceptions and exits do again what they did."""
        atexit.unregister(self._end)
        if sys.excepthook == self._fail:
            sys.excepthook = self._hook
        for module, name, leave, noting in self._exits:
            if getattr(module, name, None) is noting:
                setattr(module, name, leave)

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Be `sys.excepthook`. If another hook calls us, it may hold back output: leave the end to _end() then."""
        if not self.ending.is_ours() or not self._ends_program(traceback):
            self._hook(kind, error, traceback)
        elif sys.excepthook == self._fail:
            self.release()
            self.ending.fail_by(error)
        else:
            self.report(error)
            self._hook(kind, error, traceback)

    def _noting(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what `leave` does, and notes what that raises."""
        @functools.wraps(leave)
        def exit_(*arguments: Any, **options: Any) -> Any:
            try:
                return leave(*arguments, **options)
            except SystemExit as error:
                self._exited, self._where = error, exception.find_line_above(sys._getframe(1))
                raise

        return exit_

    def _end(self) -> None:
        """Leave the job at the end of the program, or end the job if the program has failed."""
        if not self.ending.is_ours():
            return
        last: BaseException | None = getattr(sys, "last_value", None)
        if self._raised is None and last is not None and self._ends_program(last.__traceback__):
            self._raised = last  # another hook has replaced ours
        if self._raised is None and has_raised(self._program):
            self._raised = self._exit_of_program()
        if self._raised is None:
            self._leave()
            return
        self.release()
        self.ending.fail_leaving(self._raised, shown=self._raised is last, where=self._where)

    def _exit_of_program(self) -> SystemExit | None:
        """Return the SystemExit by which the program has failed; None if it ended in order, or if nobody knows.

        If the program raised SystemExit itself, nobody knows its status. This rank then drops its connections:
        the other ranks notice that, as with a process that is gone.
        """
        if self._exited is not None:
            return self._exited if exception.find_script_status(self._exited) else None
        dist = sys.modules["torch.distributed"]
        if dist.is_initialized():
            self.ending.left(exception.find_line_above(self._program))  # said before anybody notices
            dist.destroy_process_group()
        return None

    def _ends_program(self, traceback: TracebackType | None) -> bool:
        """Tell whether an exception left the program, and was not just shown by it."""
        return traceback is not None and traceback.tb_frame is self._program


def outermost(frame: FrameType) -> FrameType:
    """Return the outermost frame, that of the program itself."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def has_raised(frame: FrameType) -> bool:
    """Tell whether a frame that has ended did so by an exception: its last instruction is no return."""
    import opcode

    return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
