"""The messages of ranks and agents as lines: what comes back of them, and of lines that are none."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest

from mpiddp.agent.protocol import (
    EndDecision,
    EndRank,
    Failed,
    JobEnds,
    ReasonPrinted,
    RegisterRank,
    Stage,
)
from mpiddp.base.ranks import RankIdentity
from mpiddp.failure.root_cause import Report, ReportKind, RootCause
from mpiddp.ipc.channel import Channel, Codec, Text, Unreadable, encode
from mpiddp.output.protocol import Forwarded

Sent = Stage | RegisterRank | Failed | ReasonPrinted | JobEnds | EndDecision | EndRank | Forwarded
CODEC: Codec[Sent] = Codec(Sent)
TOKEN = "0123456789abcdef" * 2
BRACKETS = b'{"a":' + b"[" * 1440 + b"\n"
WAIT_S = 10


def member(rank: int, world_size: int = 2) -> RankIdentity:
    """Return a member of a job on one node."""
    return RankIdentity(rank, world_size, rank, "n0", "cpu", os.getpid(), "run", 5.0, namespace="0")


def report(rank: int) -> Report:
    """Return a report on a rank that raised."""
    return Report(rank, "n0", ReportKind.ERROR, "seven", 1)


SOME_MESSAGES: list[Sent] = [
    Stage("MPI_Init"), RegisterRank(member(1), "::1", 77, TOKEN), Failed(report(1), gone=True), ReasonPrinted(),
    JobEnds(75, True, True), EndDecision(None, 1, False), EndDecision(RootCause(report(1), "others", True), 1, True),
    Forwarded(False), Stage("\udcff\n"),
]
NONSENSE = {
    "no fields": b'{"Failed": 7}', "lacks a field": b'{"EndRank": {}}',
    "one field too many": b'{"ReasonPrinted": {"x": 1}}',
    "no number": b'{"EndRank": {"status": "1"}}', "no truth": b'{"Failed": {"report": null, "gone": 1}}',
    "another report": b'{"Failed": {"report": {"no": "report"}, "gone": false}}', "a list": b'{"EndRank": [3]}',
    "no verdict": b'{"EndDecision": {"verdict": [], "status": 1, "abort": true}}',
}
STRANGE_LINES = [
    b"", b"Fatal Python error: Aborted", b"{", b"{}", b"[]", b'{"EndRank": {"status": 1}, "ReasonPrinted": {}}',
    b'{"a": 1}', b"\xff{", b'{"end": 1, "abort": true}', b'{"status": ' + b"9" * 5000 + b"}", BRACKETS.strip(),
    b'{"\xff": 1}',
]


@pytest.mark.parametrize("message", SOME_MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_as_it_was_sent(message: Sent) -> None:
    found = CODEC.decode(encode(message))
    assert (type(found), found) == (type(message), message)
    assert b"\n" not in encode(message)


def test_a_decision_for_a_script_that_has_unloaded_our_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("mpiddp")]:
        monkeypatch.delitem(sys.modules, name)
    decision = EndDecision(RootCause(report(1)), 1, abort=True)
    assert CODEC.decode(encode(decision)) == decision


@pytest.mark.parametrize("line", NONSENSE.values(), ids=NONSENSE)
def test_a_message_whose_fields_are_wrong(line: bytes) -> None:
    assert isinstance(CODEC.decode(line), Unreadable)


@pytest.mark.parametrize("line", STRANGE_LINES, ids=range(len(STRANGE_LINES)))
def test_a_line_that_is_no_message(line: bytes) -> None:
    """One of an older form among them."""
    assert CODEC.decode(line) == Text(line.decode(errors="replace"))


def test_messages_in_pieces() -> None:
    ours, its = socket.socketpair()
    wire: Channel[Sent, Sent] = Channel(ours, CODEC)
    lines = b"".join(encode(message) + b"\n" for message in SOME_MESSAGES)
    found: list[Sent | Text | Unreadable] = []
    for at in range(0, len(lines), 7):
        its.sendall(lines[at: at + 7])
        found += wire.receive(WAIT_S)
    assert found == SOME_MESSAGES
    its.sendall(encode(EndRank(1)))
    its.close()
    assert wire.receive(WAIT_S) == []
    with pytest.raises(EOFError):  # a line without its end is no message
        wire.receive(WAIT_S)
    wire.close()


@pytest.mark.parametrize("with_descriptor", [False, True], ids=["plain", "with a descriptor"])
def test_a_message_that_is_not_taken_in_time_damages_no_other(
    monkeypatch: pytest.MonkeyPatch, with_descriptor: bool
) -> None:
    """The other end reads nothing until a message has been sent in part."""
    monkeypatch.setattr("mpiddp.ipc.channel.SEND_TIMEOUT_S", 0.05)
    ours, its = socket.socketpair()
    wire: Channel[Sent, Sent] = Channel(ours, CODEC)
    other: Channel[Sent, Sent] = Channel(its, CODEC)
    long = Stage("x" * 500_000)  # of which a socket takes a part
    descriptor = its.fileno() if with_descriptor else -1
    found: list[Sent | Text | Unreadable] = []

    def take() -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                found.extend(other.receive(0.05))

    assert not wire.send(long, descriptor)
    assert not wire.send(Stage("lost"))
    while not wire.send(Stage("last")):
        take()
    take()
    assert found == [long, Stage("last")]
    wire.close()
    other.close()
