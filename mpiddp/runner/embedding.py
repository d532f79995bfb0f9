"""Finds out whether Python itself runs this package, or a program that continues afterwards, such as a profiler."""

from __future__ import annotations

import atexit
import itertools
from types import FrameType

from ..base.termination import c_exit
from . import teardown

PACKAGE = __name__.partition(".")[0]


def is_run_by_python(frame: FrameType) -> bool:
    """Return whether Python itself runs our `__main__`, or another module that has called us."""
    return all(caller.f_globals.get("__name__") == "runpy" for caller in find_callers(frame)[1:])


def find_callers(frame: FrameType) -> list[FrameType]:
    """Return the frames outside this package that have called it, innermost first."""
    outer = []
    while frame.f_back is not None:
        frame = frame.f_back
        outer.append(frame)

    def is_ours(caller: FrameType) -> bool:
        return str(caller.f_globals.get("__name__")).startswith(f"{PACKAGE}.")

    return list(itertools.dropwhile(is_ours, outer))


class ExitStatusKeeper:
    """Keeps our exit status: a program that runs ours may lose it, as Python's profilers do."""

    def __init__(self, frame: FrameType) -> None:
        """If our `__main__` is run, exit with the status, after all atexit functions registered later."""
        self.status = 0
        spec = find_callers(frame)[0].f_globals.get("__spec__")
        if getattr(spec, "name", "") == f"{PACKAGE}.__main__":
            atexit.register(self._exit)

    def _exit(self) -> None:
        if self.status:
            teardown.drop_modules()
            c_exit(self.status)
