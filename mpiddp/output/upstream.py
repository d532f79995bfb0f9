"""Sends output to the aggregator of another rank."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..base.errors import assert_never
from ..ipc.authentication import Connector, enable_keepalive
from ..ipc.channel import Codec, Unreadable
from ..ipc.connection import Connection
from ..ipc.event_loop import EventLoop
from .line_merger import MergedLines, limit_values
from .protocol import (
    Accepted,
    Bars,
    Drain,
    Drained,
    Flush,
    Flushed,
    FromAggregator,
    Lines,
    Output,
    RanksDone,
    ServedRanks,
    ToAggregator,
)
from .terminal import ProgressBar

CODEC: Codec[FromAggregator] = Codec(FromAggregator)

MAX_UNACCEPTED_BYTES = 2**16  # small, so that a crashed rank's output is sent soon


def encode_lines(lines: Iterable[MergedLines]) -> bytes:
    """Return merged lines as bytes."""
    return json.dumps([(f"{block.ranks:x}", block.stream, block.lines, limit_values(block.others))
                       for block in lines]).encode()


def decode_lines(data: bytes) -> list[MergedLines]:
    """Return the lines of encode_lines()."""
    return [MergedLines(int(ranks, 16), *fields) for ranks, *fields in json.loads(data)]


def encode_bars(bars: Iterable[ProgressBar]) -> bytes:
    """Return the states of progress bars as bytes."""
    return json.dumps(list(bars)).encode()


def decode_bars(data: bytes) -> list[ProgressBar]:
    """Return the states of encode_bars()."""
    return [ProgressBar(*fields) for fields in json.loads(data)]


class Upstream:
    """Sends output to another rank's aggregator, or to a fallback if that is not connected any more.

    `on_resume` is called when the aggregator accepts more output again, `on_drain` when it requests all output written
    so far, and `on_disconnect`, which returns the fallback, when the connection is lost or cannot be made; it gets the
    reason why it cannot.
    """

    is_remote = True

    def __init__(self, loop: EventLoop, address: tuple[str, int], token: str, ranks: int) -> None:
        """Connect to the aggregator that listens at `address`, on behalf of these ranks."""
        self._loop = loop
        self._connection: Connection[ToAggregator, FromAggregator] | None = None
        self._waiting: list[ToAggregator] = [ServedRanks(f"{ranks:x}")]  # for the connection
        self._is_closed = False
        self._after_flush: deque[Callable[[], object]] = deque()
        self.on_disconnect: Callable[[str], Any] = lambda _: None
        self.on_resume: Callable[[], object] = lambda: None
        self.on_drain: Callable[[Callable[[], object]], object] = lambda reply: reply()
        self._fallback: Any = None
        self._unaccepted_bytes = 0
        self._unaccepted: deque[tuple[int, Callable[[], object]]] = deque()  # sizes, and calls for the fallback
        Connector(loop, *address, token, "the output aggregator", self._on_connected).connect()

    def has_room(self) -> bool:
        """Return whether more output may be sent now."""
        if self._fallback is not None:
            return bool(self._fallback.has_room())
        return self._unaccepted_bytes < MAX_UNACCEPTED_BYTES

    def take(self, stream: int, data: bytes) -> None:
        """Send data of the own rank."""
        self._send_output(Output(stream, data), lambda: self._fallback.take(stream, data))

    def show(self, lines: Sequence[MergedLines]) -> None:
        """Send folded lines."""
        self._send_output(Lines(encode_lines(lines)), lambda: self._fallback.show(lines))

    def draw(self, bars: Sequence[ProgressBar]) -> None:
        """Send the states of progress bars."""
        if self._fallback is not None:
            self._fallback.draw(bars)
        else:
            self._send(Bars(encode_bars(bars)))

    def remove_ranks(self, ranks: int) -> None:
        """Report that these ranks send no more output."""
        if self._fallback is not None:
            self._fallback.remove_ranks(ranks)
        else:
            self._send(RanksDone(f"{ranks:x}"))

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all output sent so far is shown."""
        if self._fallback is not None:
            self._fallback.flush(then)
        else:
            self._after_flush.append(then)
            self._send(Flush())

    def abandon(self) -> None:
        """Disconnect, and make the calls that wait for a flush."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()
        while self._after_flush:
            self._after_flush.popleft()()

    def close(self, then: Callable[[], object]) -> None:
        """Disconnect when all is sent, and call `then`: the own rank writes no more output."""
        self._is_closed = True
        if self._fallback is not None:
            self._fallback.close(then)
        elif self._connection is None:
            then()
        else:
            self._connection.finish(then)

    def _send(self, message: ToAggregator) -> None:
        """Send a message, or keep it until the connection is made."""
        if self._connection is None:
            self._waiting.append(message)
        else:
            self._connection.send(message)

    def _send_output(self, message: Output | Lines, use_fallback: Callable[[], object]) -> None:
        """Send output, or use the fallback if there is one."""
        if self._fallback is not None:
            use_fallback()
            return
        self._unaccepted_bytes += len(message.data)
        self._unaccepted.append((len(message.data), use_fallback))
        self._send(message)

    def _on_connected(self, connection: socket.socket | None, error: str) -> None:
        """Send what waits; None if the connection could not be made."""
        if self._is_closed:
            if connection is not None:
                connection.close()
        elif connection is None:
            self._disconnect(error)
        else:
            enable_keepalive(connection, may_stall=True)
            self._connection = Connection(self._loop, connection, CODEC, self._receive, lambda _: self._disconnect(""))
            for message in self._waiting:
                self._connection.send(message)
            self._waiting = []

    def _receive(self, messages: list[FromAggregator | Unreadable]) -> None:
        for message in messages:
            match message:
                case Accepted(size):
                    self._take_accepted(size)
                    self.on_resume()
                case Drain():
                    self.on_drain(lambda: self._send(Drained()))
                case Flushed():
                    self._after_flush.popleft()()
                case Unreadable(error):
                    raise ValueError(error)
                case _:
                    assert_never(message)

    def _take_accepted(self, size: int) -> None:
        self._unaccepted_bytes -= size
        while self._unaccepted and self._unaccepted[0][0] <= size:
            size -= self._unaccepted.popleft()[0]
        if self._unaccepted:
            left, use_fallback = self._unaccepted.popleft()
            self._unaccepted.appendleft((left - size, use_fallback))

    def _disconnect(self, error: str) -> None:
        """Switch to the fallback: the connection is lost, or could not be made."""
        self._fallback = self.on_disconnect(error)
        self._waiting = []
        while self._unaccepted:
            self._unaccepted.popleft()[1]()
        while self._after_flush:
            self._fallback.flush(self._after_flush.popleft())
        self.on_resume()
