"""Processes beside a rank: forked before MPI and torch are there, and out of the script's sight."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from posix import fork  # os.fork may be a debugger's own, which holds up the process that it makes

from ..say import say

FROM_TERMINALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_detached(main: Callable[[], None], kept: Collection[int], name: str) -> int:
    """Run `main` in a new process that keeps stdin, stdout, stderr and the `kept` descriptors of this one.

    The process has a session of its own: signals that are sent to the rank's do not reach it. It is no child
    of the rank: a script that waits for its children does not find it. Where `main` raises, or the process cannot be
    made, that is said in a line with its `name`. Returns the child that forks it and ends, 0 if there is none; the
    caller has to reap() that child.
    """
    try:
        child = fork()
    except OSError as error:
        say(f"mpiddp: {name} cannot be started: {error}")
        return 0
    if child:
        return child
    status = 1
    try:
        if fork() == 0:
            os.setsid()
            os.chdir("/")
            signal.set_wakeup_fd(-1)
            for number in FROM_TERMINALS:
                signal.signal(number, signal.SIG_IGN)
            close_all_but(kept)
            main()
        status = 0
    except Exception as error:
        say(f"mpiddp: {name} has failed: {type(error).__name__}: {error}")
    finally:
        os._exit(status)


def reap(child: int) -> None:
    """Wait for a child that ends by itself; if SIGCHLD is ignored, nothing is left of it to wait for."""
    with contextlib.suppress(ChildProcessError):
        if child:
            os.waitpid(child, 0)


def close_all_but(kept: Collection[int]) -> None:
    """Close what was inherited: a launcher's connection, for one, must end with the rank."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed already
                os.close(descriptor)


def silence(*descriptors: int) -> None:
    """Let descriptors lead to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
