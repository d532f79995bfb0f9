"""os.execv() and similar calls, by which a script replaces this process by another program, or starts itself again.

A process can start MPI only once, so that program is no MPI rank: the rank leaves its job first.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..base.errors import LaunchError

MAX_INTERPRETERS = 5  # that Linux goes through (fs/exec.c, exec_binprm())
MAX_HEAD_BYTES = 256  # that Linux reads of a program to find out what it is (BINPRM_BUF_SIZE)
MAX_STRING_BYTES = 32 * os.sysconf("SC_PAGE_SIZE")  # of an argument or a variable (MAX_ARG_STRLEN)
MAX_STRINGS_BYTES = 6 * 2**20  # of all of them (bprm_stack_limits() in fs/exec.c), and at most SC_ARG_MAX
POINTER_BYTES = 8
LEFT_VARIABLE = "_MPIDDP_LEFT"  # holds the process id of a rank that has left its job this way


def hook_exec(leave: Callable[[str], object]) -> None:
    """Call `leave` with a function's name before it replaces this process, if that is going to succeed.

    If that is unknown, the process does not leave: a call that succeeds all the same counts as the end of the rank.
    os.execl(), os.execvp() and the others call these two. The hook stays: the script runs until the process ends.
    """
    def with_leave(name: str, execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def leave_and_execute(path: Any, argv: Any, env: Any = None) -> Any:
            if is_program(path):
                with contextlib.suppress(FileNotFoundError):
                    execute("", argv) if env is None else execute("", argv, env)  # raises if these are wrong
                if fits(argv, os.environ if env is None else env):
                    leave(f"os.{name}")
                    mark = {LEFT_VARIABLE: str(os.getpid())}
                    os.environ.update(mark)
                    env = None if env is None else {**env, **mark}
            return execute(path, argv) if env is None else execute(path, argv, env)

        if execute in os.supports_fd:
            os.supports_fd.add(leave_and_execute)
        return leave_and_execute

    os.execv = with_leave("execv", os.execv)
    os.execve = with_leave("execve", os.execve)


def is_program(path: Any, interpreters: int = MAX_INTERPRETERS) -> bool:
    """Return whether a path, or a descriptor, is surely a program: an ELF file, or a script of such a program.

    A file that only the kernel may read is taken for one.
    """
    file = f"/proc/self/fd/{path}" if isinstance(path, int) else path
    if interpreters == 0 or not (os.path.isfile(file) and os.access(file, os.X_OK)):
        return False
    try:
        with open(file, "rb") as program:
            head = program.read(MAX_HEAD_BYTES)
    except OSError:
        return True
    words = head.removeprefix(b"#!").split(b"\n")[0].split()
    return head.startswith(b"\x7fELF") or (
        head.startswith(b"#!") and bool(words) and is_program(words[0], interpreters - 1))


def fits(argv: Iterable[Any], env: Mapping[Any, Any]) -> bool:
    """Return whether Linux takes so many and so long arguments and variables (man 2 execve)."""
    sizes = [len(os.fsencode(argument)) + 1 for argument in argv]
    sizes += [len(os.fsencode(name)) + len(os.fsencode(value)) + 2 for name, value in env.items()]
    total = sum(sizes) + POINTER_BYTES * len(sizes)
    return max(sizes) <= MAX_STRING_BYTES and total <= min(MAX_STRINGS_BYTES, os.sysconf("SC_ARG_MAX"))


def check_started_once() -> None:
    """Raise LaunchError `started-again` if the agent of this rank was a rank itself, and has been replaced."""
    if os.environ.get(LEFT_VARIABLE) == str(os.getppid()):
        raise LaunchError(
            "started-again",
            actual="os.execv started mpiddp again in a process that was a rank of this job",
            needed="a process that has not started MPI: it can do so only once (MPI standard, MPI_Init)",
            do="start the script itself with os.execv, as in [sys.executable, *sys.argv]: its variables are still set",
        )
