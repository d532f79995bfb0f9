"""Who runs this package: Python itself, or another program that has work to do after us, a profiler, say."""

from __future__ import annotations

import atexit
import itertools
from types import FrameType

from ..exits import c_exit

PACKAGE = __name__.partition(".")[0]


def is_python(frame: FrameType) -> bool:
    """Tell whether Python runs our `__main__`, or another module that has called us, and nobody is in between."""
    return all(caller.f_globals.get("__name__") == "runpy" for caller in callers(frame)[1:])


def callers(frame: FrameType) -> list[FrameType]:
    """Return the frames of those that have called this package, innermost first."""
    outer = []
    while frame.f_back is not None:
        frame = frame.f_back
        outer.append(frame)
    return list(itertools.dropwhile(lambda one: str(one.f_globals.get("__name__")).startswith(f"{PACKAGE}."), outer))


class Status:
    """Our exit status, which a program that runs ours may swallow, as Python's profilers do."""

    def __init__(self, frame: FrameType) -> None:
        """End the process with the status after all that is registered from now on, if our `__main__` is run."""
        self.number = 0
        spec = callers(frame)[0].f_globals.get("__spec__")
        if getattr(spec, "name", "") == f"{PACKAGE}.__main__":
            atexit.register(self._insist)

    def _insist(self) -> None:
        if self.number:
            c_exit(self.number)
