"""Print on stderr, and answers on stdout: each line or block by one write, so that no other process cuts into it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from ..systems.statuses import EXIT_OUTPUT_LOST

LAUNCHER_FORWARDING_S = 0.1  # a launcher needs it to forward a rank's last output; MPICH's drops what it has not read
STDOUT, STDERR = 1, 2  # the descriptors: a script may have replaced sys.stderr


def write_line(text: str, descriptor: int = STDERR) -> None:
    """Flush Python's stderr, then print a line or a block by one write; ignore a broken pipe and the like."""
    with contextlib.suppress(Exception):  # a script may have replaced sys.stderr by any object
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        _write(descriptor, (text if text.endswith("\n") else f"{text}\n").encode(errors="replace"))


def set_writer(write: Callable[[int, bytes], None]) -> None:
    """Make write_line() use `write`, in this process and in those that it forks."""
    global _write
    _write = write


def print_answer(text: str, is_patch: bool = False) -> int:
    """Print a command's answer on stdout by one write; return 0, or EXIT_OUTPUT_LOST.

    A character that stdout's encoding lacks becomes "?"; a patch is UTF-8 with the file's own bytes. If writing fails,
    the reason is printed, unless the pipe is broken, and stdout is redirected to /dev/null, so that Python's flush at
    exit does not fail again.
    """
    out = sys.stdout
    try:
        if out is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        encoding, errors = ("utf-8", "surrogateescape") if is_patch else (out.encoding or "utf-8", "replace")
        data = (text if text.endswith("\n") else f"{text}\n").encode(encoding, errors)
        out.flush()
        if (descriptor := descriptor_of(out)) >= 0:
            write_all(descriptor, data)  # waits for a non-blocking descriptor, where Python would drop data
        else:
            out.write(data.decode(encoding, errors))
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
    """Return the descriptor of a file, -1 if it has none."""
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
    """Wait until a descriptor, blocking or not, takes data; write what it takes; return the number of bytes."""
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            import select

            writable = select.poll()
            writable.register(descriptor, select.POLLOUT)
            writable.poll()


_write = write_all
