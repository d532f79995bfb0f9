"""Sends output to the relay of another rank: the frames of the connection, and its sending end."""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..ipc.authentication import ClientHandshake, enable_keepalive
from ..ipc.event_loop import EventLoop
from .line_merger import MergedLines, limit_values
from .terminal import ProgressBar

HEADER = struct.Struct(">BI")
READ_BYTES = 2**16
MAX_UNACKED_BYTES = 2**16  # small, so that a crashed rank's output is sent soon


class MessageKind(enum.IntEnum):
    """What a frame between two relays holds."""

    STDOUT = 1  # bytes of a rank; empty if the stream pauses
    STDERR = 2
    RANKS = 3  # the ranks that the connection serves
    LINES = 4  # of several ranks, folded
    BAR = 5  # the state of a progress bar
    RANKS_DONE = 6  # ranks that send no more output
    FLUSH = 7  # show all output sent before this
    FLUSHED = 8
    DRAIN = 9  # send all output written so far
    DRAINED = 10
    ACK = 11  # the number of bytes of output accepted


class FrameConnection:
    """A connection to another relay."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._begun = b""
        self.ranks = 0  # that the connection serves
        self.unacked_bytes = 0  # of received output

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, kind: MessageKind, data: bytes = b"") -> bool:
        """Send a frame, blocking if need be; return False if the connection is lost."""
        try:
            self._socket.sendall(HEADER.pack(kind, len(data)) + data)
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[tuple[MessageKind, bytes]]:
        """Yield the frames of one read; raise EOFError if the connection is closed or lost."""
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        data, start = self._begun + data, 0
        while len(data) >= start + HEADER.size:
            kind, length = HEADER.unpack_from(data, start)
            if len(data) < start + HEADER.size + length:
                break
            start += HEADER.size + length
            yield MessageKind(kind), data[start - length:start]
        self._begun = data[start:]

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


def encode_ranks(ranks: int) -> bytes:
    """Return ranks, the bits of an integer, as bytes: hexadecimal, as Python limits the digits of decimal integers."""
    return f"{ranks:x}".encode()


def decode_ranks(data: bytes) -> int:
    """Return the ranks of encode_ranks()."""
    return int(data, 16)


def encode_lines(lines: Iterable[MergedLines]) -> bytes:
    """Return merged lines as bytes."""
    return json.dumps([(f"{block.ranks:x}", block.stream, block.lines, limit_values(block.others))
                       for block in lines]).encode()


def decode_lines(data: bytes) -> list[MergedLines]:
    """Return the lines of encode_lines()."""
    return [MergedLines(int(ranks, 16), *fields) for ranks, *fields in json.loads(data)]


CONNECT_TIMEOUT_S = 5.0
AUTHENTICATION_TIMEOUT_S = 60.0  # the other relay's node may be busy


class Upstream:
    """Sends output to another relay, or to a fallback once the connection is lost.

    `on_pause` is called when the other relay accepts no more output, `on_resume` when it does again, `on_drain` when it
    requests all output written so far, and `on_disconnect` when the connection is lost: that returns the fallback.
    """

    is_remote = True

    def __init__(self, loop: EventLoop, address: tuple[str, int], token: str, ranks: int) -> None:
        """Connect to the relay that listens at `address`, on behalf of these ranks; raise OSError."""
        self._loop = loop
        self._socket = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
        enable_keepalive(self._socket, may_stall=True)
        self._connection, self._challenge = FrameConnection(self._socket), ClientHandshake(token)
        self._socket.sendall(self._challenge.nonce)
        self._unsent: list[tuple[MessageKind, bytes]] | None = [
            (MessageKind.RANKS, encode_ranks(ranks))]  # None once the other end is authenticated
        self._after_flush: list[Callable[[], object]] = []
        self.on_disconnect: Callable[[], Any] = lambda: None
        self.on_pause: Callable[[], object] = lambda: None
        self.on_resume: Callable[[], object] = lambda: None
        self.on_drain: Callable[[Callable[[], object]], object] = lambda reply: reply()
        self._fallback: Any = None
        self._unacked_bytes = 0
        self._unacked: deque[tuple[int, Callable[[], object]]] = deque()  # sizes, and calls for the fallback
        loop.watch(self._connection.fileno(), self._authenticate)
        loop.set_timer("authentication", AUTHENTICATION_TIMEOUT_S, self._disconnect)

    def has_room(self) -> bool:
        """Return whether more output may be sent now."""
        return self._fallback is not None or self._unacked_bytes < MAX_UNACKED_BYTES

    @property
    def has_lost_output(self) -> bool:
        """Whether output to stdout was lost in this process; the other end's losses are unknown."""
        return self._fallback is not None and self._fallback.has_lost_output

    def take(self, stream: int, data: bytes) -> None:
        """Send data of the own rank."""
        self._send_output(MessageKind(stream), data, lambda: self._fallback.take(stream, data))

    def show(self, lines: Sequence[MergedLines]) -> None:
        """Send folded lines."""
        self._send_output(MessageKind.LINES, encode_lines(lines), lambda: self._fallback.show(lines))

    def draw(self, bars: Sequence[ProgressBar]) -> None:
        """Send the states of progress bars."""
        if not self._send(MessageKind.BAR, json.dumps(bars).encode()):
            self._fallback.draw(bars)

    def remove_ranks(self, ranks: int) -> None:
        """Report that these ranks send no more output."""
        if not self._send(MessageKind.RANKS_DONE, encode_ranks(ranks)):
            self._fallback.remove_ranks(ranks)

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all output sent so far is shown."""
        self._after_flush.append(then)
        if not self._send(MessageKind.FLUSH, b""):
            self._flush_fallback()

    def abandon(self) -> None:
        """Disconnect, and make the calls that wait for a flush."""
        self._loop.cancel_timers("authentication")
        self.close(lambda: None)
        after, self._after_flush = self._after_flush, []
        for then in after:
            then()

    def close(self, then: Callable[[], object]) -> None:
        """Disconnect and call `then`: the own rank writes no more output."""
        if self._fallback is None:
            self._loop.unwatch(self._connection.fileno())
            self._connection.close()
        then()

    def _send(self, kind: MessageKind, data: bytes) -> bool:
        """Send a frame, or keep it until the other end is authenticated; return False if the connection is lost."""
        if self._unsent is not None:
            self._unsent.append((kind, data))
        elif self._fallback is None and not self._connection.send(kind, data):
            self._disconnect()
        return self._fallback is None

    def _send_output(self, kind: MessageKind, data: bytes, use_fallback: Callable[[], object]) -> None:
        """Send output, or use the fallback if there is one."""
        if self._fallback is not None:
            use_fallback()
            return
        self._unacked_bytes += len(data)
        self._unacked.append((len(data), use_fallback))
        if self._send(kind, data) and not self.has_room():
            self.on_pause()

    def _take_ack(self, size: int) -> None:
        self._unacked_bytes -= size
        while self._unacked and self._unacked[0][0] <= size:
            size -= self._unacked.popleft()[0]
        if self._unacked:
            left, use_fallback = self._unacked.popleft()
            self._unacked.appendleft((left - size, use_fallback))

    def _authenticate(self) -> None:
        """Check the other end's proof that it knows the token; then send ours, and the waiting frames."""
        try:
            proof = self._challenge.feed(self._socket.recv(self._challenge.missing_bytes))
            if proof:
                self._socket.sendall(proof)
        except (EOFError, OSError):
            self._disconnect()
            return
        if proof:
            self._loop.cancel_timers("authentication")
            self._loop.unwatch(self._connection.fileno())
            self._loop.watch(self._connection.fileno(), self._receive)
            unsent, self._unsent = self._unsent or [], None
            for kind, data in unsent:
                self._send(kind, data)

    def _receive(self) -> None:
        try:
            for kind, data in self._connection.receive():
                if kind is MessageKind.ACK:
                    self._take_ack(int(data))
                    self.on_resume()
                elif kind is MessageKind.DRAIN:
                    self.on_drain(lambda: self._connection.send(MessageKind.DRAINED))
                elif kind is MessageKind.FLUSHED and self._after_flush:
                    self._after_flush.pop(0)()
        except EOFError:
            self._disconnect()

    def _disconnect(self) -> None:
        """Switch to the fallback: the connection is lost, or its other end not authenticated."""
        if self._fallback is None:
            self._loop.cancel_timers("authentication")
            self._unsent = None
            self._loop.unwatch(self._connection.fileno())
            self._connection.close()
            self._fallback = self.on_disconnect()
            while self._unacked:
                self._unacked.popleft()[1]()
            self._flush_fallback()
            self.on_resume()

    def _flush_fallback(self) -> None:
        after, self._after_flush = self._after_flush, []
        for then in after:
            self._fallback.flush(then)
