"""The connection that takes output to rank 0's node: its frames, and its sender."""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..ipc.event_loop import EventLoop
from ..ipc.listener import ClientHandshake, enable_keepalive
from .line_merger import MergedLines, extremes
from .terminal import Bar

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


CONNECTING_S = 5.0
GREETING_S = 60.0  # for the other relay's proof: its node may be busy


class Upstream:
    """Hands output on to another relay. It calls `on_full` when that takes no more, and `on_room` when it does again.

    When the other one wants all that there is, `on_drain` is called; when it is gone, `on_lost`, and all goes to what
    that returns.
    """

    is_far = True

    def __init__(self, loop: EventLoop, address: tuple[str, int], token: str, ranks: int) -> None:
        """Connect to the relay that listens there, for these ranks; raise OSError where that is not possible."""
        self._loop = loop
        self._connection = socket.create_connection(address, timeout=CONNECTING_S)
        enable_keepalive(self._connection)
        self._link, self._challenge = Link(self._connection), ClientHandshake(token)
        self._connection.sendall(self._challenge.nonce)
        self._unsent: list[tuple[Kind, bytes]] | None = [(Kind.RANKS, of_ranks(ranks))]  # until the other end is known
        self._after: list[Callable[[], object]] = []
        self.on_lost: Callable[[], Any] = lambda: None
        self.on_full: Callable[[], object] = lambda: None
        self.on_room: Callable[[], object] = lambda: None
        self.on_drain: Callable[[Callable[[], object]], object] = lambda reply: reply()
        self._instead: Any = None
        self._on_way = 0  # bytes that are not taken yet
        self._sent: deque[tuple[int, Callable[[], object]]] = deque()  # with their sizes, and how they are shown here
        loop.watch(self._link.fileno(), self._greet)
        loop.set_timer("greeting", GREETING_S, self._lose)

    def has_room(self) -> bool:
        """Tell whether more may be handed on now."""
        return self._instead is not None or self._on_way < WINDOW_BYTES

    @property
    def lost(self) -> bool:
        """Tell whether stdout lost something: of the other end it is not known."""
        return self._instead is not None and self._instead.lost

    def take(self, stream: int, data: bytes) -> None:
        """Hand on data of the own rank."""
        self._hand_on(Kind(stream), data, lambda: self._instead.take(stream, data))

    def show(self, lines: Sequence[MergedLines]) -> None:
        """Hand on folded lines."""
        self._hand_on(Kind.LINES, of_lines(lines), lambda: self._instead.show(lines))

    def draw(self, bars: Sequence[Bar]) -> None:
        """Hand on the states of progress bars."""
        if not self._send(Kind.BAR, json.dumps(bars).encode()):
            self._instead.draw(bars)

    def gone(self, ranks: int) -> None:
        """Tell that ranks say nothing any more."""
        if not self._send(Kind.GONE, of_ranks(ranks)):
            self._instead.gone(ranks)

    def settle(self, then: Callable[[], object]) -> None:
        """Let all be shown that was said before; call `then` when it is."""
        self._after.append(then)
        if not self._send(Kind.SETTLE, b""):
            self._settle_here()

    def abandon(self) -> None:
        """Hand on nothing any more; what was to be done when all is shown is done now."""
        self._loop.cancel_timers("greeting")
        if self._instead is None:
            self._loop.unwatch(self._link.fileno())
            self._link.close()
        after, self._after = self._after, []
        for then in after:
            then()

    def close(self, then: Callable[[], object]) -> None:
        """End, since the own rank has nothing more to say."""
        if self._instead is None:
            self._loop.unwatch(self._link.fileno())
            self._link.close()
        then()

    def _send(self, kind: Kind, data: bytes) -> bool:
        """Send a frame, and tell whether the other end is there to take it."""
        if self._unsent is not None:
            self._unsent.append((kind, data))
        elif self._instead is None and not self._link.send(kind, data):
            self._lose()
        return self._instead is None

    def _hand_on(self, kind: Kind, data: bytes, show_here: Callable[[], object]) -> None:
        """Send output, or show it here if the other end is not there."""
        if self._instead is not None:
            show_here()
            return
        self._on_way += len(data)
        self._sent.append((len(data), show_here))
        if self._send(kind, data) and not self.has_room():
            self.on_full()

    def _note_taken(self, size: int) -> None:
        self._on_way -= size
        while self._sent and self._sent[0][0] <= size:
            size -= self._sent.popleft()[0]
        if self._sent:
            left, show_here = self._sent.popleft()
            self._sent.appendleft((left - size, show_here))

    def _greet(self) -> None:
        """Take the other end's proof that it knows the token, and send ours, and what has waited for that."""
        try:
            shown = self._challenge.feed(self._connection.recv(self._challenge.missing_bytes))
            if shown:
                self._connection.sendall(shown)
        except (EOFError, OSError):
            self._lose()
            return
        if shown:
            self._loop.cancel_timers("greeting")
            self._loop.unwatch(self._link.fileno())
            self._loop.watch(self._link.fileno(), self._hear)
            unsent, self._unsent = self._unsent or [], None
            for kind, data in unsent:
                self._send(kind, data)

    def _hear(self) -> None:
        try:
            for kind, data in self._link.receive():
                if kind is Kind.TAKEN:
                    self._note_taken(int(data))
                    self.on_room()
                elif kind is Kind.DRAIN:
                    self.on_drain(lambda: self._link.send(Kind.DRAINED))
                elif kind is Kind.SETTLED and self._after:
                    self._after.pop(0)()
        except EOFError:
            self._lose()

    def _lose(self) -> None:
        """Note that the other relay is gone, or does not prove to be one."""
        if self._instead is None:
            self._loop.cancel_timers("greeting")
            self._unsent = None
            self._loop.unwatch(self._link.fileno())
            self._link.close()
            self._instead = self.on_lost()
            while self._sent:
                self._sent.popleft()[1]()
            self._settle_here()
            self.on_room()

    def _settle_here(self) -> None:
        after, self._after = self._after, []
        for then in after:
            self._instead.settle(then)
