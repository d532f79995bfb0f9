"""What joins a rank and a process beside it, and how another sentinel is started where the first was killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from posix import posix_spawn  # os.posix_spawn may be a debugger's own
from typing import NamedTuple

from .messages import END_SIGNAL, Watched

PROGRAM = "import sys; sys.path += sys.argv[2:]; from mpiddp.sentinel.again import main; main(sys.argv[1])"
F_SETSIG = 10  # (asm-generic/fcntl.h): which signal tells of a descriptor
STARTING_S = 10.0  # for a sentinel's process to begin


class Ends(NamedTuple):
    """One side's ends: of a connection, and of a pipe that is open while the other side lives; it stays empty."""

    wire: socket.socket
    life: int

    def close(self) -> None:
        """Close both."""
        self.wire.close()
        os.close(self.life)


def open_ends() -> tuple[Ends, Ends]:
    """Return the ends of a rank, and those of a process beside it."""
    wire, its_wire = socket.socketpair()
    life, its_life = os.pipe()
    return Ends(wire, life), Ends(its_wire, its_life)


def miss(life: int) -> None:
    """Let END_SIGNAL come when the other side is gone: the kernel closes its end of `life` then."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, F_SETSIG, END_SIGNAL)
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)


def miss_no_more(life: int) -> None:
    """Let no END_SIGNAL come, also where a child that was forked past Python has `life` still."""
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_NONBLOCK)


def has_ended(life: int) -> bool:
    """Tell whether the other side is gone; `life` does not block."""
    try:
        return not os.read(life, 1)
    except OSError:  # nothing can be read; or the script has closed it
        return False


def spawn_sentinel(its: Ends, signals: int, stderr: int, watched: Watched, began_s: float) -> None:
    """Start a sentinel of this process, as a program of its own; raise OSError if that fails.

    A fork of a process with threads and much memory may do harm. `signals` is the descriptor from which it reads the
    numbers of signals, `stderr` where it prints, `began_s` when the watch began. It imports nothing from the current
    folder, which is the script's.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        raise OSError("there is no Python to run")
    numbers = its.wire.fileno(), signals, its.life
    first = max(numbers) + 1  # out of the way of all of them
    moved = [(os.POSIX_SPAWN_DUP2, one, first + at) for at, one in enumerate(numbers)]
    if stderr != 2:
        moved.append((os.POSIX_SPAWN_DUP2, stderr, 2))
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    packages = [one for one in sys.path if one.endswith(("site-packages", "dist-packages"))]
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    known = {name: value for name, value in watched._asdict().items() if name != "hosts"}
    given = json.dumps([first, os.getpid(), known, began_s])
    command = [sys.executable, "-I", "-c", PROGRAM, given, *packages, root]
    child = posix_spawn(sys.executable, command, environ, file_actions=moved, setsigmask=())
    deadline = time.monotonic() + STARTING_S
    ended = status = 0
    with contextlib.suppress(ChildProcessError):  # the script ignores SIGCHLD
        while not ended and time.monotonic() < deadline:
            time.sleep(0.005)
            ended, status = os.waitpid(child, os.WNOHANG)
    if status:
        raise OSError(f"{sys.executable} ended with wait status {status}")


def file_of(descriptor: int) -> tuple[int, int]:
    """Return what tells an open file from others."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
