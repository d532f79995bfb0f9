"""Print on stderr: each line or block by one write, so that no other process prints into the middle of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

FORWARDING_S = 0.1  # time for a launcher to pass on a rank's last output: MPICH's drops what it has not read by then
STDERR = 2  # the descriptor: a script may have put something else in the place of sys.stderr


def say(text: str, descriptor: int = STDERR) -> None:
    """Flush Python's stderr, then print a line or a block by one write; print nothing if nobody reads it."""
    with contextlib.suppress(Exception):  # a script may have put any object in the place of sys.stderr
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        _write(descriptor, (text if text.endswith("\n") else f"{text}\n").encode(errors="replace"))


def write_through(write: Callable[[int, bytes], None]) -> None:
    """Let `write` write what say() prints in this process, and in those that it forks."""
    global _write
    _write = write


def warn(warnings: Sequence[str]) -> None:
    """Print warnings."""
    for warning in warnings:
        say(f"mpiddp: warning: {warning}")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data."""
    while data:
        data = data[write_some(descriptor, data):]


def write_some(descriptor: int, data: bytes) -> int:
    """Wait until the descriptor takes data, write what it takes, and return the number of bytes written.

    The descriptor may be a blocking or a non-blocking one.
    """
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            import select

            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()


_write = write_all
