"""os.execv() and similar calls, by which a script replaces this process by another program, or starts itself again.

A process can start MPI only once, so that program is no MPI rank: the rank leaves its job first.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from ..base.errors import LaunchError

LEFT_VARIABLE = "_MPIDDP_LEFT"  # holds the process id of a rank that has left its job this way


def hook_exec(leave: Callable[[str], object]) -> None:
    """Call `leave` with a function's name before it replaces this process, unless the call must fail.

    os.execl(), os.execvp() and the others call these two. The hook stays: the script runs until the process ends.
    """
    def with_leave(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def leave_and_execute(path: Any, argv: Any, env: Any = None) -> Any:
            if is_program(path):
                with contextlib.suppress(FileNotFoundError):
                    execute("", argv) if env is None else execute("", argv, env)  # raises if these are wrong
                leave(f"os.{name}")
                mark = {LEFT_VARIABLE: str(os.getpid())}
                os.environ.update(mark)
                env = None if env is None else {**env, **mark}
            return execute(path, argv) if env is None else execute(path, argv, env)

        return leave_and_execute

    os.execv = with_leave("execv", os.execv)
    os.execve = with_leave("execve", os.execve)


def is_program(path: Any) -> bool:
    """Return whether a path, or a descriptor, is a program."""
    return isinstance(path, int) or (os.path.isfile(path) and os.access(path, os.X_OK))


def check_started_once() -> None:
    """Raise LaunchError `started-again` if the agent of this rank was a rank itself, and has been replaced."""
    if os.environ.get(LEFT_VARIABLE) == str(os.getppid()):
        raise LaunchError(
            "started-again",
            actual="os.execv started mpiddp again in a process that was a rank of this job",
            needed="a process that has not started MPI: it can do so only once (MPI standard, MPI_Init)",
            do="start the script itself with os.execv, as in [sys.executable, *sys.argv]: its variables are still set",
        )
