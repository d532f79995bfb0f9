"""Output on its way to an aggregator: in order, one that accepts nothing, one that is lost or never there."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpiddp.ipc import authentication
from mpiddp.ipc.channel import listen
from mpiddp.ipc.event_loop import EventLoop
from mpiddp.output.aggregator import Aggregator
from mpiddp.output.line_merger import MergedLines
from mpiddp.output.protocol import AggregationConfig
from mpiddp.output.terminal import ProgressBar
from mpiddp.output.upstream import MAX_UNACCEPTED_BYTES, Upstream
from tests.support import DEADLINE_S, free_port
from tests.test_protocol import TOKEN

LINE = b"x" * 99 + b"\n"


class Sink:
    """Stores what would be shown."""

    is_remote = False

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.taken = b""
        self.bars: list[ProgressBar] = []
        self.room = True

    def has_room(self) -> bool:
        return self.room

    def show(self, lines: Sequence[MergedLines]) -> None:
        for block in lines:
            self.lines += block.lines

    def take(self, _: int, data: bytes) -> None:
        self.taken += data

    def draw(self, bars: Sequence[ProgressBar]) -> None:
        self.bars += bars

    def remove_ranks(self, ranks: int) -> None:
        pass

    def abandon(self) -> None:
        pass

    def flush(self, then: Callable[[], object]) -> None:
        then()

    close = flush


class Pair:
    """Rank 1's way to the aggregator of rank 0, in one event loop."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.loop = EventLoop(self.errors.append)
        self.sink, self.fallback = Sink(), Sink()
        self.reasons: list[str] = []
        self.resumed = False
        listener = listen("127.0.0.1", 0)
        self.address = ("127.0.0.1", listener.getsockname()[1])
        folding = AggregationConfig(0, "3", "", 0, TOKEN, 0.0, False, True)
        self.aggregator = Aggregator(self.loop, folding, listener.detach(), self.sink, lambda: None)  # type: ignore[arg-type]
        self.upstream = self.connect(self.address)

    def connect(self, address: tuple[str, int]) -> Upstream:
        upstream = Upstream(self.loop, address, TOKEN, 0b10)

        def replace(error: str) -> Sink:
            self.reasons.append(error)
            return self.fallback

        def resume() -> None:
            self.resumed = True

        upstream.on_disconnect = replace
        upstream.on_resume = resume
        return upstream

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run the loop until something is the case."""
        deadline = time.monotonic() + DEADLINE_S

        def check() -> None:
            if is_done() or time.monotonic() > deadline:
                self.loop.stop()
            else:
                self.loop.set_timer("check", 0.01, check)

        self.loop.stopped = False
        check()
        self.loop.run()
        assert is_done()
        assert self.errors == []


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.upstream.abandon()
    one.aggregator.abandon()


def test_all_output_arrives_in_order_before_a_flush_or_a_close_is_answered(pair: Pair) -> None:
    """Also what was written before the connection was made."""
    ends: list[str] = []
    number = 0

    def write(end: int) -> None:
        nonlocal number
        while number < end and pair.upstream.has_room():
            pair.upstream.take(1, b"line %d\n" % number)
            number += 1

    write(10)
    pair.upstream.on_resume = lambda: write(10_000)
    pair.run_until(lambda: number == 10_000)
    pair.upstream.draw([ProgressBar(1, 1, "7%")])
    pair.upstream.flush(lambda: ends.append("flushed"))
    pair.run_until(lambda: bool(ends))
    assert pair.sink.lines == [f"line {number}" for number in range(10_000)]
    pair.upstream.take(1, b"last")
    pair.upstream.close(lambda: ends.append("closed"))
    pair.run_until(lambda: pair.sink.lines[-1] == "last")
    assert ends == ["flushed", "closed"]
    assert pair.reasons == []


def test_an_aggregator_without_room_pauses_its_source(pair: Pair) -> None:
    pair.sink.room = False
    written = 0
    while pair.upstream.has_room():
        pair.upstream.take(1, LINE)
        written += 1
    assert MAX_UNACCEPTED_BYTES <= written * len(LINE) < MAX_UNACCEPTED_BYTES + len(LINE)
    pair.run_until(lambda: len(pair.sink.lines) == written)
    assert not pair.upstream.has_room()
    assert not pair.resumed
    pair.sink.room = True
    pair.aggregator.resume_all()
    pair.run_until(lambda: pair.resumed)
    assert pair.upstream.has_room()


def test_what_a_lost_aggregator_has_not_accepted_goes_to_the_fallback(pair: Pair) -> None:
    ends: list[str] = []
    pair.upstream.take(1, b"accepted\n")
    pair.run_until(lambda: pair.sink.lines == ["accepted"] and not pair.upstream._unaccepted)
    pair.sink.room = False
    pair.upstream.take(1, b"unaccepted\n")
    pair.run_until(lambda: len(pair.sink.lines) == 2)
    pair.upstream.flush(lambda: ends.append("flushed"))
    for source in pair.aggregator._sources.values():
        source.connection.close()
    pair.run_until(lambda: bool(pair.reasons))
    pair.upstream.take(1, b"late\n")
    pair.upstream.close(lambda: ends.append("closed"))
    assert pair.fallback.taken == b"unaccepted\nlate\n"
    assert (ends, pair.reasons) == (["flushed", "closed"], [""])


def test_an_aggregator_that_cannot_be_reached(pair: Pair) -> None:
    ends: list[str] = []
    port = free_port()
    alone = pair.connect(("127.0.0.1", port))
    alone.take(1, b"kept\n")
    alone.flush(lambda: ends.append("flushed"))
    pair.run_until(lambda: bool(pair.reasons))
    assert pair.reasons == [f"cannot connect to the output aggregator at 127.0.0.1:{port}: Connection refused"]
    assert pair.fallback.taken == b"kept\n"
    assert ends == ["flushed"]


@pytest.mark.light
def test_an_aggregator_that_reads_nothing_for_a_while_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its terminal may be stopped with Ctrl-S, for longer than a node is given to answer: 2 s here."""
    monkeypatch.setattr(authentication, "KEEPALIVE_INTERVAL_S", 1)
    monkeypatch.setattr(authentication, "KEEPALIVE_PROBES", 1)
    size = 2**24  # more than the kernels hold
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        with sender, receiver:
            for connection in (sender, receiver):
                authentication.enable_keepalive(connection, may_stall=True)
            receiver.settimeout(DEADLINE_S)
            sending = pool.submit(sender.sendall, bytes(size))
            time.sleep(4)
            assert not sending.done()
            while size > 0:
                data = receiver.recv(2**20)
                assert data
                size -= len(data)
            sending.result(DEADLINE_S)
