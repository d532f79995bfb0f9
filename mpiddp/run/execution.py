"""os.execv() and its like, by which a script puts another program, or itself once more, in the place of this process.

That program is no rank that MPI knows: a process can start MPI once only. So the rank leaves its job before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from ..errors import LaunchError

LEFT = "_MPIDDP_LEFT"  # the process which has been a rank, and has left its job so


def note_exec(leave: Callable[[str], object]) -> None:
    """Call `leave` with a function's name before it replaces this process; a call that must fail just fails.

    os.execl(), os.execvp() and the others end in one of these two.
    """
    def leaving(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def executed(path: Any, argv: Any, *env: Any) -> Any:
            if can_be_run(path):
                leave(f"os.{name}")
                mark = {LEFT: str(os.getpid())}
                os.environ.update(mark)
                env = tuple({**variables, **mark} for variables in env)
            return execute(path, argv, *env)

        return executed

    os.execv = leaving("execv", os.execv)
    os.execve = leaving("execve", os.execve)


def can_be_run(path: Any) -> bool:
    """Tell whether a path, or a descriptor, is a program."""
    return isinstance(path, int) or (os.path.isfile(path) and os.access(path, os.X_OK))


def refuse_again() -> None:
    """Raise LaunchError `started-again` if this process was a rank and has been replaced."""
    if os.environ.get(LEFT) == str(os.getpid()):
        raise LaunchError(
            "started-again",
            found="os.execv has started mpiddp once more in a process that was a rank of this job",
            needed="one start of MPI for each process (MPI standard, MPI_Init)",
            do="let os.execv start the script itself, as in [sys.executable, *sys.argv]: it finds its variables",
        )
