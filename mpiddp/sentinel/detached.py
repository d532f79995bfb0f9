"""Processes of ours beside a rank: forked before MPI and torch are there, and out of the script's sight."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection

FROM_TERMINALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def fork_detached(main: Callable[[], None], kept: Collection[int]) -> int:
    """Run `main` in a process that has nothing of this one but stdin, stdout, stderr and the `kept` descriptors.

    It is in a session of its own, deaf to what is sent to the rank, and no child of the rank's: a
    script that waits for its children does not find it. Returns a child that ends as soon as it has
    forked that process, for the caller to reap().
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if os.fork() == 0:
            os.setsid()
            os.chdir("/")
            signal.set_wakeup_fd(-1)
            for number in FROM_TERMINALS:
                signal.signal(number, signal.SIG_IGN)
            close_all_but(kept)
            main()
        status = 0
    finally:
        os._exit(status)


def reap(child: int) -> None:
    """Wait for a child that ends by itself; where SIGCHLD is ignored, which a process inherits, it leaves nothing."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def close_all_but(kept: Collection[int]) -> None:
    """Close what was inherited, a launcher's connection among it: it must end with the rank."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # that by which the folder was read is closed already
                os.close(descriptor)


def silence(*descriptors: int) -> None:
    """Let descriptors lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
