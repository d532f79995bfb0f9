"""What mpiddp says, on stderr: each line or block in one piece, so that no other process's comes into it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

FORWARDING_S = 0.1  # for a launcher to pass on our last words: MPICH's drops what it has not read yet
STDERR = 2  # also where a script has put something else in the place of sys.stderr


def say(text: str, descriptor: int = STDERR) -> None:
    """Print a line or a block by one write, after what Python's stderr holds; where nobody reads, nowhere."""
    with contextlib.suppress(Exception):  # a script may have put anything there
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        write_all(descriptor, (text if text.endswith("\n") else f"{text}\n").encode(errors="replace"))


def warn(warnings: Sequence[str]) -> None:
    """Print warnings."""
    for warning in warnings:
        say(f"mpiddp: warning: {warning}")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data."""
    while data:
        data = data[write_some(descriptor, data):]


def write_some(descriptor: int, data: bytes) -> int:
    """Write as soon as the descriptor takes something, also where it does not block, and return how many bytes."""
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            import select

            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()
