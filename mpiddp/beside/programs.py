"""Tell of each program that the script starts: once its parent has ended, nothing shows that it descends from here."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def tell_of_programs(tell: Callable[[int], object]) -> Callable[[], None]:
    """Call `tell` with the process of each program that subprocess or multiprocessing starts; return what undoes this.

    os.register_at_fork() does not see them: both start programs by the same function of C.
    """
    import _posixsubprocess

    start = _posixsubprocess.fork_exec

    @functools.wraps(start)
    def started(*arguments: Any) -> int:
        pid: int = start(*arguments)
        tell(pid)
        return pid

    # subprocess may have imported the function by name
    places = [(_posixsubprocess, "fork_exec"), (sys.modules.get("subprocess"), "_fork_exec")]
    replace(places, start, started)
    return functools.partial(replace, places, started, start)


def replace(places: list[tuple[Any, str]], former: object, new: object) -> None:
    """Put a function in the place of another one, wherever that still is."""
    for module, name in places:
        if getattr(module, name, None) is former:
            setattr(module, name, new)
