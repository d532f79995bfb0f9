"""The protocol: messages as frames, bytes that are none, a slow reader, lost connections."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiddp.agent.protocol import (
    Failed,
    JobEnds,
    PrintReason,
    RankEnded,
    ReasonPrinted,
    RegisterRank,
    ScriptEnded,
    Stage,
)
from mpiddp.base.ranks import RankIdentity
from mpiddp.failure.root_cause import Report, ReportKind, RootCause
from mpiddp.ipc.channel import HEADER, MAX_FRAME_BYTES, Channel, Codec, FrameReader, Unreadable, encode
from mpiddp.output.protocol import Output

Sent = Stage | RegisterRank | Failed | ReasonPrinted | JobEnds | PrintReason | RankEnded | ScriptEnded | Output
CODEC: Codec[Sent] = Codec(Sent)
TOKEN = "0123456789abcdef" * 2
BRACKETS = b'{"a":' + b"[" * 1440
WAIT_S = 10


def member(rank: int, world_size: int = 2) -> RankIdentity:
    """Return a member of a job on one node."""
    return RankIdentity(rank, world_size, rank, "n0", "cpu", os.getpid(), "run", 5.0, namespace="0")


def report(rank: int) -> Report:
    """Return a report on a rank that raised."""
    return Report(rank, "n0", ReportKind.ERROR, "seven", 1)


SOME_MESSAGES: list[Sent] = [
    Stage("MPI_Init"), RegisterRank(member(1), "::1", 77, TOKEN), Failed(report(1)), ReasonPrinted(), JobEnds(75),
    PrintReason(RootCause(report(1), "others", True)), ScriptEnded(3, vanished=True), Output(1, b"\0\xff\n"),
    Output(2, b""), Stage("\udcff\n"),
]
NONSENSE = {
    "no fields": b'{"Failed": 7}', "lacks a field": b'{"RankEnded": {}}',
    "one field too many": b'{"ReasonPrinted": {"x": 1}}',
    "no number": b'{"RankEnded": {"status": "1"}}', "no truth": b'{"ScriptEnded": {"calls": 1, "vanished": 1}}',
    "another report": b'{"Failed": {"report": {"no": "report"}}}', "a list": b'{"RankEnded": [3]}',
    "no root cause": b'{"PrintReason": {"root_cause": []}}',
    "bytes in JSON": b'{"Output": {"stream": 1, "data": [1]}, "x": 1}', "nothing": b"", "text": b"Fatal Python error",
    "half an object": b"{", "no name": b"{}", "a list alone": b"[]", "a number": b"7",
    "two messages": b'{"RankEnded": {"status": 1}, "ReasonPrinted": {}}', "an unknown name": b'{"a": 1}',
    "no UTF-8": b"\xff{", "no UTF-8 in a name": b'{"\xff": 1}',
    "many digits": b'{"status": ' + b"9" * 5000 + b"}", "many brackets": BRACKETS,
}


def frame(text: bytes, payload: bytes = b"") -> bytes:
    """Return a frame of any JSON and payload."""
    return HEADER.pack(len(text), len(payload)) + text + payload


def read(data: bytes) -> list[Sent | Unreadable]:
    """Return the messages of a stream's bytes."""
    return FrameReader(CODEC).feed(data)


@pytest.mark.parametrize("message", SOME_MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_as_it_was_sent(message: Sent) -> None:
    (found,) = read(encode(message))
    assert (type(found), found) == (type(message), message)


def test_a_message_for_a_script_that_has_unloaded_our_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("mpiddp")]:
        monkeypatch.delitem(sys.modules, name)
    reason = PrintReason(RootCause(report(1)))
    assert read(encode(reason)) == [reason]


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE)
def test_a_frame_that_is_no_message_damages_no_other(text: bytes) -> None:
    unreadable, last = read(frame(text) + encode(RankEnded(1)))
    assert isinstance(unreadable, Unreadable)
    assert last == RankEnded(1)


def test_frames_cut_at_every_byte() -> None:
    stream = b"".join(map(encode, SOME_MESSAGES))
    for at in range(len(stream) + 1):
        reader = FrameReader(CODEC)
        assert [*reader.feed(stream[:at]), *reader.feed(stream[at:])] == SOME_MESSAGES
    reader = FrameReader(CODEC)
    assert [message for byte in stream for message in reader.feed(bytes([byte]))] == SOME_MESSAGES


@given(st.lists(st.one_of(st.builds(Stage, st.text()), st.builds(Output, st.integers(1, 2), st.binary())), max_size=9),
       st.lists(st.integers(0, 300)))
def test_any_messages_in_any_pieces(messages: list[Sent], cuts: list[int]) -> None:
    stream, reader = b"".join(map(encode, messages)), FrameReader(CODEC)
    found: list[Sent | Unreadable] = []
    for start, end in itertools.pairwise([0, *sorted(cuts), max([len(stream), *cuts])]):
        found += reader.feed(stream[start:end])
    assert found == messages


@given(st.binary())
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    with contextlib.suppress(OSError):
        assert all(isinstance(message, Unreadable) for message in read(data))


@contextlib.contextmanager
def channels() -> Iterator[tuple[Channel[Sent, Sent], Channel[Sent, Sent]]]:
    ours, its = (Channel[Sent, Sent](end, CODEC) for end in socket.socketpair())
    try:
        yield ours, its
    finally:
        ours.close()
        its.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", BRACKETS, HEADER.pack(MAX_FRAME_BYTES, 1)],
                         ids=["HTTP", "brackets", "too long"])
def test_what_is_too_long_ends_the_connection(data: bytes) -> None:
    with channels() as (ours, its):
        its._socket.sendall(data)
        with pytest.raises(OSError, match="more than the"):
            ours.receive(WAIT_S)
        assert not its.send(Output(1, bytes(MAX_FRAME_BYTES)))


def test_a_frame_without_its_end_is_no_message() -> None:
    with channels() as (ours, its):
        its._socket.sendall(encode(RankEnded(1))[:-1])
        its.close()
        with pytest.raises(EOFError):
            ours.receive(WAIT_S)


def test_time_limits_of_receiving() -> None:
    with channels() as (ours, its):
        assert ours.receive(0) == []
        with pytest.raises(TimeoutError):
            ours.receive(0.01)
        its.send(RankEnded(1))
        assert ours.receive(0) == [RankEnded(1)]
        ours.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            ours.receive(WAIT_S)
        assert not ours.send(RankEnded(1))


@pytest.mark.parametrize("with_descriptor", [False, True], ids=["plain", "with a descriptor"])
def test_a_message_that_is_not_taken_in_time_damages_no_other(
    monkeypatch: pytest.MonkeyPatch, with_descriptor: bool
) -> None:
    """The other end reads nothing until a message has been sent in part."""
    monkeypatch.setattr("mpiddp.ipc.channel.SEND_TIMEOUT_S", 0.05)
    long = Stage("x" * 500_000)  # of which a socket takes a part
    found: list[Sent | Unreadable] = []
    with channels() as (ours, its):
        assert not ours.send(long, its.fileno() if with_descriptor else -1)
        assert not ours.send(Stage("lost"))
        while not ours.send(Stage("last")):
            take_all(its, found)
        take_all(its, found)
    assert found == [long, Stage("last")]


def take_all(channel: Channel[Sent, Sent], found: list[Sent | Unreadable]) -> None:
    """Add the messages that have come to `found`."""
    with contextlib.suppress(TimeoutError):
        while True:
            found.extend(channel.receive(0.05))


def test_descriptors_come_in_the_order_of_their_messages() -> None:
    """Among messages without one; what was not taken is closed with the channel."""
    with channels() as (ours, its), contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(40)]
        for end in itertools.chain(*pipes):
            stack.callback(os.close, end)
        found: list[Sent | Unreadable] = []
        for number, (reading, _) in enumerate(pipes):
            assert ours.send(Stage(str(number)))
            assert ours.send(RankEnded(number), reading)
        take_all(its, found)
        assert len(found) == 2 * len(pipes)
        for reading, _ in pipes[:30]:
            taken = its.take_descriptor()
            assert os.path.samestat(os.fstat(taken), os.fstat(reading))
            os.close(taken)
        left = list(its._descriptors)
        assert len(left) == 10
        its.close()
        for descriptor in left:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        assert its.take_descriptor() == -1


def test_ten_thousand_messages_to_a_reader_that_waits() -> None:
    """What is unsent grows to megabytes meanwhile; each byte is copied a few times, not once for each message."""
    messages: list[Sent] = [Output(1, b"%d " % number + b"x" * 500) for number in range(10_000)]
    found: list[Sent | Unreadable] = []
    with channels() as (ours, its):
        before_s = time.process_time()
        assert not [message for message in messages if ours.enqueue(message)][500:]
        while len(found) < len(messages):
            found += its.receive(WAIT_S)
            ours.flush()
        assert time.process_time() - before_s < 5  # 0.2 s; with a copy of the rest for each message, a minute
        assert ours.flush()
    assert found == messages


def test_an_end_that_does_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop learns of it as of any other loss, and the other end gets no part of a message."""
    monkeypatch.setattr("mpiddp.ipc.channel.MAX_UNSENT_BYTES", 2**20)
    with channels() as (ours, its):
        for _ in range(30):
            ours.enqueue(Output(1, bytes(2**16)))
        assert ours.flush()
        assert select.select([ours], [], [], WAIT_S)[0]
        with pytest.raises(OSError, match="it reads too slowly"):
            ours.receive(0)
        found: list[Sent | Unreadable] = []
        with pytest.raises(EOFError):
            while True:
                found += its.receive(WAIT_S)
        assert set(found) <= {Output(1, bytes(2**16))}


def test_threads_and_a_signals_handler_send_whole_messages() -> None:
    """The handler interrupts the main thread, which waits for the reader."""
    number, each = 4, 300
    found: list[Sent | Unreadable] = []
    with channels() as (ours, its), ThreadPoolExecutor(number + 1) as pool:
        former = signal.signal(signal.SIGALRM, lambda *_: ours.send(Stage("signal")))

        def send_all(stream: int) -> bool:
            return all(ours.send(Output(stream, bytes(5000))) for _ in range(each))

        def read_all() -> None:
            while found.count(Stage("end")) < 1:
                found.extend(its.receive(WAIT_S))

        reading = pool.submit(read_all)
        sending = [pool.submit(send_all, stream) for stream in range(number)]
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            assert send_all(number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
        assert all(one.result(WAIT_S) for one in sending)
        ours.send(Stage("end"))
        reading.result(WAIT_S)
    assert Stage("signal") in found
    assert not [one for one in found if isinstance(one, Unreadable)]
    assert sum(isinstance(one, Output) for one in found) == (number + 1) * each


def test_several_threads_receive() -> None:
    """Each message reaches one of them, also one that takes many reads."""
    total = 200
    found: list[Sent | Unreadable] = []
    with channels() as (ours, its), ThreadPoolExecutor(3) as pool:
        def read_all() -> None:
            while len(found) < total:
                with contextlib.suppress(TimeoutError):
                    found.extend(its.receive(0.05))

        reading = [pool.submit(read_all) for _ in range(3)]
        for number in range(total):
            assert ours.send(Output(number, bytes(100_000)))
        for one in reading:
            one.result(WAIT_S)
    assert sorted(one.stream for one in found if isinstance(one, Output)) == list(range(total))


def test_without_waiting_all_that_has_come_is_returned() -> None:
    """Also a message that takes many reads."""
    with channels() as (ours, its):
        assert ours.send(Output(1, bytes(150_000)))
        assert its.receive(0) == [Output(1, bytes(150_000))]
        its._socket.sendall(encode(RankEnded(1))[:-1])
        assert ours.receive(0) == []


def test_a_peer_that_a_send_cannot_reach_has_not_closed_the_connection() -> None:
    """The kernel reports the reason once, to whoever comes first; what is read then looks like the other end's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with socket.socket() as refused:
        refused.setblocking(False)
        refused.connect_ex(("127.0.0.1", port))
        assert select.select([refused], [], [], 10)[0]
        channel: Channel[Sent, Sent] = Channel(refused, CODEC)
        assert channel.enqueue(Stage("MPI_Init"))
        with pytest.raises(ConnectionRefusedError):
            channel.receive(0)
