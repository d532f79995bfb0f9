"""os.execv() and its like, by which a script puts another program, or itself once more, in the place of this process.

That program is no rank that MPI knows: a process can start MPI once only. So the rank leaves its job before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Callable, Collection
from typing import Any

from ..base.errors import LaunchError
from ..ipc.helper_process import fork_detached, reap, silence

LEFT = "_MPIDDP_LEFT"  # the process which has been a rank, and has left its job so


def note_exec(leave: Callable[[str], object]) -> None:
    """Call `leave` with a function's name before it replaces this process; a call that must fail just fails.

    os.execl(), os.execvp() and the others end in one of these two.
    """
    def leaving(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def executed(path: Any, argv: Any, env: Any = None) -> Any:
            if can_be_run(path):
                leave(f"os.{name}")
                mark = {LEFT: str(os.getpid())}
                os.environ.update(mark)
                env = None if env is None else {**env, **mark}
            return execute(path, argv) if env is None else execute(path, argv, env)

        return executed

    os.execv = leaving("execv", os.execv)
    os.execve = leaving("execve", os.execve)


def can_be_run(path: Any) -> bool:
    """Tell whether a path, or a descriptor, is a program."""
    return isinstance(path, int) or (os.path.isfile(path) and os.access(path, os.X_OK))


def keep_connected(pids: Collection[int]) -> None:
    """Keep this rank's connection to its launcher, which has the number PMI_FD, until all of the processes have ended.

    MPICH 5.0's mpiexec kills all ranks of a node as soon as one of them closes it by ending after MPI_Finalize.
    """
    connection = os.environ.get("PMI_FD", "")
    if pids and connection.isdecimal():
        reap(fork_detached(functools.partial(await_end, pids), kept=(int(connection),),
                           name="the process that keeps a rank's connection to its launcher"))


def await_end(pids: Collection[int]) -> None:
    """Return when all of the processes have ended; at once before Linux 5.3, which does not tell."""
    silence(0, 1, 2)  # a launcher waits until nobody holds them
    ends = []
    for pid in pids:
        with contextlib.suppress(OSError, AttributeError):
            ends.append(os.pidfd_open(pid))
    for end in ends:
        awaited = select.poll()
        awaited.register(end, select.POLLIN)
        awaited.poll()


def refuse_again() -> None:
    """Raise LaunchError `started-again` if this process was a rank and has been replaced."""
    if os.environ.get(LEFT) == str(os.getpid()):
        raise LaunchError(
            "started-again",
            actual="os.execv has started mpiddp once more in a process that was a rank of this job",
            needed="one start of MPI for each process (MPI standard, MPI_Init)",
            do="let os.execv start the script itself, as in [sys.executable, *sys.argv]: it finds its variables",
        )
