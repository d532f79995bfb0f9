"""The coordinator of the job's sentinels, in that of rank 0: it takes their reports and rules who failed first."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from functools import partial

from ..plan.member import Member
from ..plan.verdict import ABSENT, ALONE_S, CONSEQUENCE, SEARCHING_S, SETTLING_S, Report, Scene, Verdict, judge
from ..say import FORWARDING_S
from ..show.report import tell
from .entrance import Entrance, keep_alive
from .leftovers import cancel
from .loop import Loop
from .messages import (
    Bye,
    Condition,
    Ended,
    Failed,
    Hello,
    Interrupted,
    JobEnds,
    Look,
    Message,
    Neighbour,
    Over,
    Ruling,
    ScriptEnded,
    Through,
    Told,
    Unreadable,
    Watched,
)
from .wire import Wire

TELLING_S = 0.5  # for the rank that was first to print its reason


class Peer:
    """The sentinel of a rank, as the coordinator knows it."""

    def __init__(self, wire: Wire, rank: int, host: str) -> None:
        self.wire, self.rank, self.host = wire, rank, host
        self.answered = True  # when it was last asked how its rank is
        self.script_ended = False
        self.gone = False  # the rank


class Coordinator:
    """Talks to the sentinels of all ranks, once they have shown the job's token."""

    def __init__(self, loop: Loop, start: float, address: str, token: str, watched: Watched) -> None:
        """Listen on `address`; `start` is the start of rank 0, which is `watched`, on time.monotonic()'s clock."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.port = Entrance(loop, address, token, self._await_hello).port
        self._loop, self._start, self._watched = loop, start, watched
        self._own: Member | None = None
        self._peers: dict[int, Peer] = {}  # by rank, like the next
        self._hosts: dict[int, str] = {}
        self._first_on_host: dict[str, Peer] = {}  # whose sentinel watches all ranks of the host
        self._order: list[int] = []  # in which ranks ended, as those sentinels saw it
        self._interrupted: list[int] = []
        self._reports: list[Report] = []
        self._came_s: dict[int, float] = {}  # after the first
        self._living_reporters: list[int] = []
        self._later_reporters: list[int] = []  # ranks that failed too, and wait for a ruling
        self._waiting: set[int] = set()  # those of them that have it, and wait for the job's end
        self._first_report_at = 0.0
        self._verdict: Verdict | None = None
        self._end_announced = False  # all have been told that the job ends
        self._end_begun = False  # all have been told to end their ranks

    def own_member(self, member: Member) -> Wire:
        """Admit this process's own rank, and return the sentinel's end of its connection."""
        self._own = member
        ours, its = socket.socketpair()
        self._admit(Wire(ours), Hello(member.rank, member.host, member.pid))
        self._rule_if_clear()
        return Wire(its)

    def tell_over(self) -> None:
        """Tell all that the job is over, in order."""
        for peer in self._peers.values():
            peer.wire.send(Over())

    def finish(self) -> None:
        """Let all other sentinels end their ranks, because this one ends."""
        self._begin_end()
        if any(one.kind == ABSENT for one in self._reports):
            cancel(self._watched.step)

    def _await_hello(self, connection: socket.socket) -> None:
        """Wait for one that has shown the token to say which rank it watches."""
        with contextlib.suppress(OSError):  # the next read tells
            keep_alive(connection)
        wire = Wire(connection)
        self._loop.listen(wire, partial(self._read_hello, wire))

    def _read_hello(self, wire: Wire) -> None:
        """Admit the sentinel of a rank; each rank has one, which connects once."""
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
        if not isinstance(hello, Hello):
            wire.close()
            raise ValueError(f"{type(hello).__name__} in the place of a hello")
        if hello.rank in self._peers or (self._own and not 0 <= hello.rank < self._own.world_size):
            wire.close()
            return
        self._on_messages(self._admit(wire, hello), others)

    def _admit(self, wire: Wire, hello: Hello) -> Peer:
        peer = self._peers[hello.rank] = Peer(wire, hello.rank, hello.host)
        self._hosts[hello.rank] = hello.host
        self._loop.listen(wire, partial(self._read, peer))
        self._first_on_host.setdefault(hello.host, peer).wire.send(Neighbour(hello.rank, hello.pid))
        if self._end_announced and self._verdict:
            wire.send(JobEnds(self._verdict.first.status, abort=self._end_begun))
        return peer

    def _read(self, peer: Peer) -> None:
        try:
            messages = peer.wire.receive()
        except (EOFError, OSError) as error:
            self._on_lost(peer, error)
            return
        self._on_messages(peer, messages)

    def _on_messages(self, peer: Peer, messages: list[Message]) -> None:
        for message in messages:
            self._loop.attempt(partial(self._on_message, peer, message))
        self._rule_if_clear()

    def _on_message(self, peer: Peer, message: Message) -> None:
        """Note what a sentinel tells."""
        match message:
            case Failed(report, gone):
                peer.gone = gone
                self._add_report(report, living=not gone)
            case Told():
                self._announce_end()
            case Through():
                if self._verdict is not None and peer.rank == self._verdict.first.rank:
                    self._begin_end()
            case Condition(stopped):
                peer.answered = True
                if stopped:
                    self._add_report(
                        Report(peer.rank, peer.host, ABSENT, "is stopped (by SIGSTOP or a debugger)", 1))
            case Ended(rank):
                self._order.append(rank)
            case Interrupted():
                self._interrupted.append(peer.rank)
            case ScriptEnded():
                peer.script_ended = True
            case Bye():
                self._drop(peer)
            case Unreadable(error):
                raise ValueError(error)

    def _drop(self, peer: Peer) -> None:
        self._peers.pop(peer.rank, None)
        self._loop.forget(peer.wire)
        peer.wire.close()

    def _on_lost(self, peer: Peer, error: Exception) -> None:
        """Report the rank of a sentinel that is gone without a `Bye`."""
        self._drop(peer)
        if isinstance(error, EOFError):
            cause, status = "is gone, and its sentinel with it", 137
        else:
            cause, status = f"is out of reach, its node or its network is down ({error.strerror})", 1  # type: ignore[attr-defined]
        if self._verdict is None:
            self._add_report(Report(peer.rank, peer.host, ABSENT, cause, status))
            self._rule_if_clear()

    def _add_report(self, report: Report, living: bool = False) -> None:
        """Take a report; `living` tells that the rank itself waits for a ruling."""
        if living:
            self._living_reporters.append(report.rank)
        if self._verdict is not None:
            self._later_reporters.append(report.rank)
            if self._end_announced:
                self._rule_not_first(report.rank)
            return
        if not self._reports:
            self._first_report_at = time.monotonic()
        self._reports.append(report)
        self._came_s.setdefault(report.rank, time.monotonic() - self._first_report_at)
        if report.kind == CONSEQUENCE and len(self._reports) == 1:
            for peer in self._peers.values():
                peer.answered = False
                peer.wire.send(Look())

    def _rule_if_clear(self) -> None:
        """Rule as soon as it is clear who was first."""
        if self._verdict is not None or not self._reports or self._own is None:
            return
        waited_s = time.monotonic() - self._first_report_at
        silent = [peer.rank for peer in self._peers.values() if not peer.answered]
        reporters = {one.rank for one in self._reports}
        left = [peer.rank for peer in self._peers.values() if peer.script_ended and peer.rank not in reporters]
        self._verdict = judge(self._reports, waited_s, Scene(
            self._hosts, silent, left, self._interrupted, self._order, self._watched.step is not None,
            self._watched.by_srun, self._came_s, self._own.world_size))
        if self._verdict is not None:
            self._rule(self._verdict, self._own)
        else:
            due = next(time_s for time_s in (ALONE_S, SETTLING_S, SEARCHING_S) if time_s > waited_s)
            self._loop.set_timer("rule", due - waited_s, self._rule_if_clear)

    def _rule(self, verdict: Verdict, own: Member) -> None:
        """Let the rank that failed first print the reason, or print it if that rank cannot; then all end."""
        first = self._peers.get(verdict.first.rank)
        self._later_reporters += [report.rank for report in self._reports if report.rank != verdict.first.rank]
        if first is None or verdict.first.kind == ABSENT:
            tell(verdict, None, time.monotonic() - self._start, own.error_file)
            self._loop.set_timer("told", FORWARDING_S, self._announce_end)
        else:
            first.wire.send(Ruling(verdict, verdict.first.status, abort=True))
            self._loop.set_timer("told", TELLING_S, self._announce_end)

    def _rule_not_first(self, rank: int) -> None:
        """Rule that another rank failed first."""
        assert self._verdict
        if rank in self._peers:
            abort = self._end_begun and self._must_abort(rank)
            self._peers[rank].wire.send(Ruling(None, self._verdict.first.status, abort))
            if not self._end_begun:
                self._waiting.add(rank)

    def _must_abort(self, rank: int) -> bool:
        """Tell whether a rank has to end the job.

        Each rank has to if ranks exit by themselves. If not, one calls MPI_Abort: the first that failed, or
        another one if that is gone.
        """
        assert self._verdict
        assert self._own
        first, living = self._verdict.first.rank, self._living_reporters
        if self._own.exits:
            return True
        if first in living:
            return rank == first
        others = living or [one for one, peer in self._peers.items() if one != first and not peer.gone]
        return rank == min(others, default=first)

    def _announce_end(self) -> None:
        """Tell every sentinel that the job ends.

        If ranks exit by themselves, the launcher ends the others when one has. So all wait for the one that
        failed, whose threads and atexit functions may still run.
        """
        if self._end_announced or self._verdict is None:
            return
        self._end_announced = True
        assert self._own
        if not (self._own.exits and self._verdict.first.rank in self._living_reporters):
            self._begin_end()
            return
        for rank in self._later_reporters:
            self._rule_not_first(rank)
        for peer in list(self._peers.values()):
            peer.wire.send(JobEnds(self._verdict.first.status, abort=False))
        self._loop.set_timer("through", self._own.grace_s, self._begin_end)

    def _begin_end(self) -> None:
        """Let every sentinel end its rank."""
        if self._end_begun or self._verdict is None:
            return
        self._end_announced = self._end_begun = True
        for rank in self._later_reporters:
            if rank not in self._waiting:
                self._rule_not_first(rank)
        for peer in list(self._peers.values()):
            peer.wire.send(JobEnds(self._verdict.first.status, self._must_abort(peer.rank),
                                   waits=peer.rank in self._waiting))
