"""Notice how a program with a main() of its own ends: by an exception, by sys.exit(), or without a word."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from . import failure
from .ending import Ending


class Guard:
    """Ends the job where the program fails, as the launcher does for a script; until release().

    A program that comes to its end in order calls `leave` first, if it has not done so itself.
    """

    def __init__(self, ending: Ending, leave: Callable[[], None]) -> None:
        self.ending, self._leave = ending, leave
        self._error: BaseException | None = None  # by which the program ends, as far as we know
        self._where = ""  # it called sys.exit()
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
        self._error = error
        self.ending.accuse(error)

    def release(self) -> None:
        """Let exceptions and exits do again what they did."""
        atexit.unregister(self._end)
        if sys.excepthook == self._fail:
            sys.excepthook = self._hook
        if sys.exit == self._note_exit:
            sys.exit = self._exit

    def _fail(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Be `sys.excepthook`; inside of another hook, which may hold back what is printed, leave the end to _end()."""
        if not self.ending.is_ours():
            self._hook(kind, error, traceback)
        elif sys.excepthook == self._fail:
            self.release()
            self.ending.fail_by(error)
        else:
            self.accuse(error)
            self._hook(kind, error, traceback)

    def _note_exit(self, status: object = None) -> NoReturn:
        """Be `sys.exit`."""
        error = SystemExit(status)
        if status not in (None, 0) and threading.current_thread() is threading.main_thread():
            self._error, self._where = error, failure.line_at(sys._getframe(1))
        raise error

    def _end(self) -> None:
        """Leave the job at the end of the program, or end it where the program has failed."""
        if not self.ending.is_ours():
            return
        error = self._error
        if error is None and not hasattr(sys, "ps1"):  # at a prompt there may have been any number
            error = getattr(sys, "last_value", None)
        if error is None:
            self._leave()
            return
        self.release()
        self.ending.fail_leaving(error, shown=error is getattr(sys, "last_value", None), where=self._where)
