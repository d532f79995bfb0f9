"""Print on stderr, and answers on stdout: each line or block by one write, so that no other prints into the middle."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from .errors import EXIT_OUTPUT_LOST

LAUNCHER_FORWARDING_S = 0.1  # a launcher needs it to forward a rank's last output; MPICH's drops what it has not read
STDERR = 2  # the descriptor: a script may have put something else in the place of sys.stderr


def write_line(text: str, descriptor: int = STDERR) -> None:
    """Flush Python's stderr, then print a line or a block by one write; print nothing if nobody reads it."""
    with contextlib.suppress(Exception):  # a script may have put any object in the place of sys.stderr
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        _write(descriptor, (text if text.endswith("\n") else f"{text}\n").encode(errors="replace"))


def set_writer(write: Callable[[int, bytes], None]) -> None:
    """Let `write` write what write_line() prints in this process, and in those that it forks."""
    global _write
    _write = write


def print_answer(text: str) -> int:
    """Print what a command was asked for, on stdout by one write; return 0, or the exit status for lost output.

    What stdout's encoding lacks becomes "?". Why it cannot be written is said, unless nobody reads on. What is left is
    dropped, so that Python's end does not fail by it once more.
    """
    out = sys.stdout
    try:
        if out is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding = out.encoding or "utf-8"
        data = (text if text.endswith("\n") else f"{text}\n").encode(encoding, errors="replace")
        out.flush()
        if (descriptor := descriptor_of(out)) >= 0:
            write_all(descriptor, data)  # which waits where it does not block: Python would drop what it does not take
        else:
            out.write(data.decode(encoding))
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            write_line(f"mpiddp: cannot write stdout: {error.strerror}")
        if out is not None:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
                out.flush()
        return EXIT_OUTPUT_LOST
    return 0


def descriptor_of(file: TextIO) -> int:
    """Return the descriptor of a file, -1 where it has none."""
    try:
        return file.fileno()
    except OSError:
        return -1


def warn(warnings: Sequence[str]) -> None:
    """Print warnings."""
    for warning in warnings:
        write_line(f"mpiddp: warning: {warning}")


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
