"""How relays talk over a connection: a kind, a length, and so many bytes."""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from collections.abc import Iterable, Iterator

from .merger import MergedLines, extremes

HEAD = struct.Struct(">BI")
READ_BYTES = 2**16
WINDOW_BYTES = 2**16  # on the way: what a rank has said that crashes can be handed on soon


class Kind(enum.IntEnum):
    """What a frame holds."""

    STDOUT = 1  # bytes of a rank, none where the stream pauses
    STDERR = 2
    RANKS = 3  # those that a connection is for
    LINES = 4  # of several ranks, folded
    BAR = 5  # the state of a progress bar
    GONE = 6  # ranks that say nothing any more
    SETTLE = 7  # show all that was said before this
    SETTLED = 8
    DRAIN = 9  # hand on all that there is
    DRAINED = 10
    TAKEN = 11  # how many bytes of output have been taken


OUTPUT = (Kind.STDOUT, Kind.STDERR, Kind.LINES)


class Link:
    """A connection to another relay."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._begun = b""
        self.ranks = 0  # those that it is for
        self.untold = 0  # bytes of output that have come from there, which it has not been told

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, kind: Kind, data: bytes = b"") -> bool:
        """Send a frame, wait until the other end takes it, and tell whether it is there."""
        try:
            self._socket.sendall(HEAD.pack(kind, len(data)) + data)
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[tuple[Kind, bytes]]:
        """Yield the frames of one read; raise EOFError when the other end is gone."""
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        data, at = self._begun + data, 0
        while len(data) >= at + HEAD.size:
            kind, length = HEAD.unpack_from(data, at)
            if len(data) < at + HEAD.size + length:
                break
            at += HEAD.size + length
            yield Kind(kind), data[at - length:at]
        self._begun = data[at:]

    def close(self) -> None:
        """Close it."""
        with contextlib.suppress(OSError):
            self._socket.close()


def of_ranks(ranks: int) -> bytes:
    """Return ranks, the bits of a number, as bytes: Python limits the digits of numbers that are no hexadecimal."""
    return f"{ranks:x}".encode()


def ranks_of(data: bytes) -> int:
    """Return the ranks of of_ranks()."""
    return int(data, 16)


def of_lines(lines: Iterable[MergedLines]) -> bytes:
    """Return merged lines as bytes."""
    return json.dumps([(f"{one.ranks:x}", one.stream, one.lines, extremes(one.others)) for one in lines]).encode()


def lines_of(data: bytes) -> list[MergedLines]:
    """Return the lines of of_lines()."""
    return [MergedLines(int(ranks, 16), *others) for ranks, *others in json.loads(data)]
