"""The sentinels' meeting point, in the sentinel of rank 0: it hears who failed and rules who was first."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable
from functools import partial

from ..plan.member import Member
from ..plan.verdict import ABSENT, ALONE_S, CONSEQUENCE, SEARCHING_S, SETTLING_S, Report, Scene, Verdict, judge
from ..say import FORWARDING_S
from ..show.report import tell
from .entrance import Entrance
from .loop import Loop
from .wire import Message, Wire, verdict_message

CONNECTING_S = 5.0
SPEAKING_S = 0.5  # for the rank that was first to print its reason
PROBES, PROBE_S = 3, 15  # a peer of which nothing is heard for PROBE_S * (PROBES + 1) is lost (man 7 tcp)


class Peer:
    """The sentinel of a rank, as the coordinator knows it."""

    def __init__(self, wire: Wire, rank: int, host: str) -> None:
        self.wire, self.rank, self.host = wire, rank, host
        self.answered = True  # when it was last asked how its rank is
        self.left = False  # the rank has come to the end of its script
        self.gone = False


class Coordinator:
    """Hears the sentinels of all ranks, once they have shown the job's token."""

    def __init__(
        self, loop: Loop, start: float, address: str, token: str, by_node: bool, by_srun: bool,
        end_step: Callable[[], None],
    ) -> None:
        """Listen on `address`; `by_node` and `by_srun` are a Scene's."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.port = Entrance(loop, address, token, self._let_speak).port
        self._loop, self._start, self._end_step = loop, start, end_step
        self._by_node, self._by_srun = by_node, by_srun
        self._own: Member | None = None
        self._peers: dict[int, Peer] = {}
        self._hosts: dict[int, str] = {}
        self._elders: dict[str, Peer] = {}  # the sentinel that watches all ranks of a host
        self._order: list[int] = []  # in which ranks ended, as the elders saw it
        self._interrupted: list[int] = []
        self._reports: list[Report] = []
        self._came_s: dict[int, float] = {}  # after the first
        self._living_reporters: list[int] = []
        self._late: list[int] = []  # ranks that reported too, and wait for an answer
        self._waiting: set[int] = set()  # those that have it, and are to be told when the first is through
        self._since = 0.0
        self._verdict: Verdict | None = None
        self._ended = False  # all have been told that the job ends
        self._over = False  # they end it

    def own_member(self, member: Member) -> Wire:
        """Admit the rank of this same sentinel and return its end of the connection."""
        self._own = member
        ours, its = socket.socketpair()
        self._admit(Wire(ours), member.rank, member.host, member.pid)
        self._consider()
        return Wire(its)

    def dismiss(self) -> None:
        """Tell all that the job is over, in order."""
        for peer in self._peers.values():
            peer.wire.send(over=True)

    def finish(self) -> None:
        """End what has not ended, because this sentinel goes."""
        self._end_now()
        if any(one.kind == ABSENT for one in self._reports):
            self._end_step()

    def _let_speak(self, connection: socket.socket) -> None:
        """Wait for what one has to say who knows the token."""
        with contextlib.suppress(OSError):  # the next read tells
            keep_alive(connection)
        wire = Wire(connection)
        self._loop.listen(wire, partial(self._greet, wire))

    def _greet(self, wire: Wire) -> None:
        """Admit the sentinel of a rank; there is one for each, which does not come again."""
        try:
            messages = wire.receive()
        except (EOFError, OSError):
            self._loop.forget(wire)
            wire.close()
            return
        if not messages:
            return
        self._loop.forget(wire)
        hello, *others = messages
        rank = int(hello["rank"])
        if rank in self._peers or (self._own and not 0 <= rank < self._own.world_size):
            wire.close()
            return
        peer = self._admit(wire, rank, str(hello["host"]), int(hello["pid"]))
        self._note_all(peer, others)

    def _admit(self, wire: Wire, rank: int, host: str, pid: int) -> Peer:
        peer = self._peers[rank] = Peer(wire, rank, host)
        self._hosts[rank] = host
        self._loop.listen(wire, partial(self._hear, peer))
        self._elders.setdefault(host, peer).wire.send(neighbour=rank, pid=pid)
        if self._ended and self._verdict:
            wire.send(end=self._verdict.first.status, abort=self._over)
        return peer

    def _hear(self, peer: Peer) -> None:
        try:
            messages = peer.wire.receive()
        except (EOFError, OSError) as error:
            self._lose(peer, error)
            return
        self._note_all(peer, messages)

    def _note_all(self, peer: Peer, messages: list[Message]) -> None:
        for message in messages:
            self._loop.attempt(partial(self._note, peer, message))
        self._consider()

    def _note(self, peer: Peer, message: Message) -> None:
        """Note what a sentinel says."""
        if "failed" in message:
            peer.gone = message["gone"]
            self._add(Report(**message["failed"]), living=not peer.gone)
        elif "spoken" in message:
            self._end_all()
        elif "through" in message:
            if self._verdict is not None and peer.rank == self._verdict.first.rank:
                self._end_now()
        elif "stopped" in message:
            peer.answered = True
            if message["stopped"]:
                self._add(Report(peer.rank, peer.host, ABSENT, "is stopped (by SIGSTOP or a debugger)", 1))
        elif "ended" in message:
            self._order.append(message["ended"])
        elif "interrupted" in message:
            self._interrupted.append(peer.rank)
        elif "left" in message:
            peer.left = True
        elif "bye" in message:
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        self._peers.pop(peer.rank, None)
        self._loop.forget(peer.wire)
        peer.wire.close()

    def _lose(self, peer: Peer, error: Exception) -> None:
        """Take a sentinel that went without a word for a rank that is lost."""
        self._drop(peer)
        if isinstance(error, EOFError):
            cause, status = "is gone, and its sentinel with it", 137
        else:
            cause, status = f"is out of reach, its node or its network is down ({error.strerror})", 1  # type: ignore[attr-defined]
        if self._verdict is None:
            self._add(Report(peer.rank, peer.host, ABSENT, cause, status))
            self._consider()

    def _add(self, report: Report, living: bool = False) -> None:
        if living:
            self._living_reporters.append(report.rank)
        if self._verdict is not None:
            self._late.append(report.rank)
            if self._ended:
                self._answer_quietly(report.rank)
            return
        if not self._reports:
            self._since = time.monotonic()
        self._reports.append(report)
        self._came_s.setdefault(report.rank, time.monotonic() - self._since)
        if report.kind == CONSEQUENCE and len(self._reports) == 1:
            for peer in self._peers.values():
                peer.answered = False
                peer.wire.send(look=True)

    def _consider(self) -> None:
        """Rule as soon as it is clear who was first."""
        if self._verdict is not None or not self._reports or self._own is None:
            return
        waited_s = time.monotonic() - self._since
        silent = [peer.rank for peer in self._peers.values() if not peer.answered]
        reporters = {one.rank for one in self._reports}
        left = [peer.rank for peer in self._peers.values() if peer.left and peer.rank not in reporters]
        self._verdict = judge(self._reports, waited_s, Scene(
            self._hosts, silent, left, self._interrupted, self._order, self._by_node, self._by_srun, self._came_s,
            self._own.world_size))
        if self._verdict is not None:
            self._announce(self._verdict)
        else:
            due = next(time_s for time_s in (ALONE_S, SETTLING_S, SEARCHING_S) if time_s > waited_s)
            self._loop.set_timer("hearing", due - waited_s, self._consider)

    def _announce(self, verdict: Verdict) -> None:
        """Let the first speak, or speak for it; then all end."""
        assert self._own
        first = self._peers.get(verdict.first.rank)
        self._late += [report.rank for report in self._reports if report.rank != verdict.first.rank]
        if first is None or verdict.first.kind == ABSENT:
            tell(verdict, None, time.monotonic() - self._start, self._own.error_file)
            self._loop.set_timer("spoken", FORWARDING_S, self._end_all)
        else:
            first.wire.send(ruling=verdict_message(verdict), abort=True)
            self._loop.set_timer("spoken", SPEAKING_S, self._end_all)

    def _answer_quietly(self, rank: int) -> None:
        """Rule that a rank was not the first."""
        assert self._verdict
        if rank in self._peers:
            abort = self._over and self._must_abort(rank)
            self._peers[rank].wire.send(ruling=None, status=self._verdict.first.status, abort=abort)
            if not self._over:
                self._waiting.add(rank)

    def _must_abort(self, rank: int) -> bool:
        """Tell whether a rank has to end the job: each for itself, or the first by MPI_Abort, or one that lives."""
        assert self._verdict
        assert self._own
        first, living = self._verdict.first.rank, self._living_reporters
        if self._own.exits:
            return True
        if first in living:
            return rank == first
        others = living or [one for one, peer in self._peers.items() if one != first and not peer.gone]
        return rank == min(others, default=first)

    def _end_all(self) -> None:
        """Tell every sentinel that the job ends.

        Where ranks exit by themselves the first of them takes the others along: so they wait for the one
        that failed, which may have last words and atexit functions.
        """
        if self._ended or self._verdict is None:
            return
        self._ended = True
        assert self._own
        if not (self._own.exits and self._verdict.first.rank in self._living_reporters):
            self._end_now()
            return
        for rank in self._late:
            self._answer_quietly(rank)
        for peer in list(self._peers.values()):
            peer.wire.send(end=self._verdict.first.status, abort=False)
        self._loop.set_timer("through", self._own.grace_s, self._end_now)

    def _end_now(self) -> None:
        """Let every sentinel end its rank."""
        if self._over or self._verdict is None:
            return
        self._ended = self._over = True
        for rank in self._late:
            if rank not in self._waiting:
                self._answer_quietly(rank)
        for peer in list(self._peers.values()):
            peer.wire.send(end=self._verdict.first.status, abort=self._must_abort(peer.rank),
                           waits=peer.rank in self._waiting)


def dial(address: str, port: int, token: str, member: Member) -> Wire | None:
    """Connect a member's sentinel to the coordinator, and return None where that fails."""
    try:
        connection = socket.create_connection((address, port), timeout=CONNECTING_S)
    except OSError:
        return None
    keep_alive(connection)
    wire = Wire(connection)
    with contextlib.suppress(OSError):
        connection.sendall(token.encode())  # before any message: it is compared before anything is parsed
    wire.send(rank=member.rank, host=member.host, pid=member.pid)
    return wire


def keep_alive(connection: socket.socket) -> None:
    """Let the kernels ask each other from time to time whether they are there; no process wakes for it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, PROBE_S), (socket.TCP_KEEPINTVL, PROBE_S),
                          (socket.TCP_KEEPCNT, PROBES), (socket.TCP_USER_TIMEOUT, 1000 * PROBE_S * (PROBES + 1))):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
