"""Watches how a program with its own main() ends: by an exception, by sys.exit(), or in order."""

from __future__ import annotations

import atexit
import builtins
import functools
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from ..failure import exception
from .termination import Termination

EXIT_FUNCTIONS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))


class ExitGuard:
    """Ends the job if the program fails, as the launcher does for a script, until release().

    If the program ends in order without having left the job, `leave` is called.
    """

    def __init__(self, termination: Termination, leave: Callable[[], None]) -> None:
        """Watch the program; call this in its main thread."""
        self.termination, self._leave = termination, leave
        self._program = find_outermost(sys._getframe())
        termination.main_globals = self._program.f_globals
        self._raised: BaseException | None = None  # by a `with` block; the job knows it
        self._exited: SystemExit | None = None  # what an exit function raised last; self._where is the line
        self._where = ""
        self._excepthook = sys.excepthook
        self._exits = [(module, name, original := getattr(module, name), self._with_note(original))
                       for module, name in EXIT_FUNCTIONS if hasattr(module, name)]
        for module, name, _, hook in self._exits:
            setattr(module, name, hook)
        atexit.register(self._on_exit)

    def watch_exceptions(self) -> None:
        """Replace `sys.excepthook`; torch sets one with each default group, which ours then calls."""
        if sys.excepthook != self._on_exception:
            self._excepthook = sys.excepthook
            sys.excepthook = self._on_exception

    def report(self, error: BaseException) -> None:
        """Report that the program raised; it then has --abort-grace to end."""
        self._raised = self.termination.report_exception(error)

    def release(self) -> None:
        """Remove the hooks."""
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        for module, name, original, hook in self._exits:
            if getattr(module, name, None) is hook:
                setattr(module, name, original)

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Act as `sys.excepthook`. If another hook calls this, it may print later: then _on_exit() ends the job."""
        if not self.termination.is_own_process() or not self._ends_program(traceback):
            self._excepthook(kind, error, traceback)
        elif sys.excepthook == self._on_exception:
            self.release()
            self.termination.fail_by_exception(error)
        else:
            self.report(error)
            self._excepthook(kind, error, traceback)

    def _with_note(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an exit function that notes the SystemExit of the original one."""
        @functools.wraps(original)
        def exit_(*arguments: Any, **options: Any) -> Any:
            try:
                return original(*arguments, **options)
            except SystemExit as error:
                self._exited, self._where = error, exception.find_line_above(sys._getframe(1))
                raise

        return exit_

    def _on_exit(self) -> None:
        """Leave the job at the end of the program, or end the job if the program has failed."""
        if not self.termination.is_own_process():
            return
        last: BaseException | None = getattr(sys, "last_value", None)
        if self._raised is None and last is not None and self._ends_program(last.__traceback__):
            self._raised = last  # another hook has replaced ours
        if self._raised is None and has_raised(self._program):
            self._raised = self._find_failed_exit()
        if self._raised is None:
            self._leave()
            return
        self.release()
        self.termination.fail_at_end(self._raised, is_printed=self._raised is last, where=self._where)

    def _find_failed_exit(self) -> SystemExit | None:
        """Return the SystemExit by which the program has failed; None if it ended in order, or with unknown status.

        The status is unknown if the program raised SystemExit itself. This rank then closes its connections, which
        other ranks notice as if its process had ended.
        """
        if self._exited is not None:
            return self._exited if exception.find_script_status(self._exited) else None
        dist = sys.modules["torch.distributed"]
        if dist.is_initialized():
            self.termination.announce_script_end(exception.find_line_above(self._program))  # before others notice
            dist.destroy_process_group()
        return None

    def _ends_program(self, traceback: TracebackType | None) -> bool:
        """Return whether an exception ended the program, rather than being just printed by it."""
        return traceback is not None and traceback.tb_frame is self._program


def find_outermost(frame: FrameType) -> FrameType:
    """Return the outermost frame, that of the program itself."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def has_raised(frame: FrameType) -> bool:
    """Return whether a frame that has ended did so by an exception: its last instruction is no return."""
    import opcode

    return not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
