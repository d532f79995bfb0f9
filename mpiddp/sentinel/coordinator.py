"""The logic of the coordinator, in rank 0's sentinel: from the reports of all it decides who failed first."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator

from ..base.errors import assert_never
from ..base.stderr import FORWARDING_S
from ..failure import root_cause
from ..failure.rank import Member
from ..failure.root_cause import (
    ABSENT,
    CONSEQUENCE,
    GIVING_UP,
    NO_STEP_DAEMON,
    Report,
    Scene,
    Seen,
    Verdict,
    brief,
    judge,
    named,
)
from ..ipc.codec import Text, Unreadable
from ..where.protocol import Sample, SnapshotRequest, ThreadsReply
from . import events, protocol
from .protocol import CoordinatorToSentinel, Hello, SentinelToCoordinator, UnfinishedRanks, WatchPeerProcess
from .startup_timeout import LateRanks
from .state_machine import StateMachine

PRINT_TIMEOUT_S = 0.5  # for the rank that failed first to print its reason
FINAL_PRINT_TIMEOUT_S = 1.0  # for the message that it is printed, when rank 0 is gone already
MIN_FINISHED_CHECK_S, MAX_FINISHED_CHECK_S = 5.0, 30.0  # between checks whether ranks wait for one that has finished
SELECTION_INTERVAL_S = 2e-6  # for each rank, between selections of the root cause: one takes about a fifth of that


class Peer:
    """The sentinel of a rank, as the coordinator knows it."""

    def __init__(self, link: int, hello: Hello) -> None:
        self.link, self.rank, self.host = link, hello.rank, hello.host
        self.namespace, self.pid = hello.namespace, hello.pid
        self.gone = False  # the rank
        self.watched = True  # its sentinel lives; else the rank uses this link itself
        self.decided = False  # it failed too, and has its decision: it waits for the job's end


class Peers:
    """The sentinels, by link and by rank; and one of each namespace, its observer, which watches all processes there.

    `hosts` has the host of each rank that was ever there.
    """

    def __init__(self) -> None:
        self.by_link: dict[int, Peer] = {}
        self.by_rank: dict[int, Peer] = {}
        self.hosts: dict[int, str] = {}
        self._observers: dict[str, Peer] = {}

    def admit(self, link: int, hello: Hello) -> Peer:
        """Admit a sentinel."""
        self.hosts[hello.rank] = hello.host
        peer = self.by_link[link] = self.by_rank[hello.rank] = Peer(link, hello)
        return peer

    def introduce(self, peer: Peer) -> tuple[Peer, WatchPeerProcess]:
        """Return the observer of a new one's namespace, and what to send it."""
        return self._observers.setdefault(peer.namespace, peer), WatchPeerProcess(peer.rank, peer.pid)

    def unwatch(self, peer: Peer) -> Iterator[tuple[Peer, WatchPeerProcess]]:
        """Note that a sentinel was killed, and its rank lives; yield what to send the next observer, if it was one."""
        peer.watched = False
        if self._observers[peer.namespace] is not peer:
            return
        neighbours = [other for other in self.by_rank.values() if other.namespace == peer.namespace]
        if observer := next((other for other in neighbours if other.watched), None):
            self._observers[peer.namespace] = observer
            for neighbour in neighbours:
                yield observer, WatchPeerProcess(neighbour.rank, neighbour.pid)

    def drop(self, peer: Peer) -> None:
        """Forget a sentinel that has left, or is gone."""
        del self.by_link[peer.link], self.by_rank[peer.rank]


class PendingSnapshot:
    """The snapshot for the verdict, and for the ranks that ask who is unfinished."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._askers: list[Peer] = []

    def begin(self, asker: Peer | None = None) -> list[events.CoordinatorAction]:
        """Begin, unless it has begun; `asker` waits for the answer."""
        is_pending = self.seen.looking
        self.seen = self.seen._replace(looking=True)
        if asker is not None:
            self._askers.append(asker)
        return [] if is_pending else [events.TakeSnapshot()]

    def end(self, seen: Seen, unfinished: Collection[int], peers: Peers) -> list[events.CoordinatorAction]:
        """Take the snapshot, and send those who have asked which ranks are unfinished, and where these are."""
        self.seen = seen
        names = named(unfinished, peers.hosts, seen.places)
        askers, self._askers = self._askers, []
        return [events.ToPeer(peer.link, UnfinishedRanks(names)) for peer in askers]


class State(enum.Enum):
    """The state of the coordinator."""

    RUNNING = "no rank has failed"
    DECIDING = "a rank has failed; reports may come on what happened before"
    DECIDED = "it is decided which rank failed first; that rank is asked to print the reason"
    REASON_PRINTED = "the reason is printed; all wait for that rank, whose threads and atexit functions may still run"
    ENDING = "every rank has been told to end"


S = State
TRANSITIONS: dict[State, tuple[State, ...]] = {
    S.RUNNING: (S.DECIDING,), S.DECIDING: (S.DECIDED,), S.DECIDED: (S.REASON_PRINTED, S.ENDING),
    S.REASON_PRINTED: (S.ENDING,), S.ENDING: (),
}
IGNORED: dict[State, tuple[State, ...]] = {S.ENDING: (S.REASON_PRINTED,)}


class Coordinator(StateMachine[State, events.CoordinatorAction]):
    """Talks to the sentinels of all ranks; a link is a number for the connection to one."""

    transitions = TRANSITIONS
    ignored = IGNORED

    def __init__(self, watched: protocol.WatchedRank, began_s: float) -> None:
        """Coordinate a job whose rank 0 is `watched` and began at `began_s`, on the clock of handle()."""
        super().__init__(State.RUNNING, began_s)
        self._began_s, self._watched = began_s, watched
        self._own: Member | None = None
        self.peers, self._snapshot, self._late_ranks = Peers(), PendingSnapshot(), LateRanks()
        self._silent: set[int] = set()  # ranks that were asked how they are, and have not answered
        self._finished: set[int] = set()  # ranks whose script has finished
        self._first_finished_s: float | None = None  # when the first one of them did
        self._wait: tuple[str, float] | None = None  # who waits for such a rank, in words, and since when
        self._exits: list[Report] = []  # of those that raised SystemExit with an unknown status
        self._end_order: list[int] = []  # in which ranks ended, as the observer of their namespace saw it
        self._interrupted: list[int] = []
        self.reports: list[Report] = []
        self._known: set[tuple[int, str]] = set()  # rank and cause of each report
        self._came_s: dict[int, float] = {}  # after the first report
        self._living: set[int] = set()  # ranks that have reported themselves
        self._secondary_failures: list[int] = []  # ranks that failed too, but not first
        self._first_report_s = 0.0
        self._selected_s = -1e9  # when the root cause was selected last
        self._verdict: Verdict | None = None
        self._is_printed = False  # the verdict, or it is just being printed
        self._printing_rank: int | None = None  # whose sentinel is about to print it
        self._is_leaving = self._waits_for_print = False  # rank 0 goes; others may have to report that it is printed
        self._aborting_rank: int | None = None  # the rank that has to end the others, if not each ends by itself

    def handle(self, event: events.CoordinatorEvent, now_s: float) -> list[events.CoordinatorAction]:
        """Return what to do about an event that has come at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        match event:
            case events.PeerGreeted(link, hello):
                self._greet(link, hello)
            case events.OwnRankJoined(link, member):
                self._own = member
                self._admit(link, Hello(member.rank, member.host, member.pid, member.namespace))
            case events.FromPeer(link, message):
                if peer := self.peers.by_link.get(link):
                    self._on_message(peer, message)
            case events.PeerLost(link, error):
                if peer := self.peers.by_link.get(link):
                    self._on_lost(peer, error)
            case events.StallDetected(report):
                self._add_report(report)
            case events.WaitForFinishedRank(report) if self.state is S.RUNNING:
                self._on_wait_for_finished(report)
            case events.Due("finished check"):
                self._check_wait_for_finished()
            case events.SnapshotTaken(seen):
                self._do(*self._snapshot.end(seen, self.peers.by_rank.keys() - self._finished, self.peers))
            case events.OwnRankLeft() if self.state is S.RUNNING:
                self._send_all(protocol.JobFinished())
            case events.OwnRankLeft() | events.OwnRankGone():
                self._is_leaving = True
                self._decide_if_clear(last_chance=True)
                self._begin_end()
                if any(report.kind == ABSENT for report in self.reports):
                    self._do(events.CancelStep())
            case events.Due("told"):
                self._on_reason_printed()
            case events.Due("cleanup"):
                self._begin_end()
            case events.Due("unprinted"):
                self._print_if_unprinted()
            case events.Due("late") if self.state is S.RUNNING and self._own is not None:
                self._do(*self._late_ranks.remind(now_s - self._began_s, self.peers.hosts, self._own.world_size))
        self._decide_if_clear()
        if self._is_leaving and self.has_unprinted_verdict and not self._waits_for_print:
            self._waits_for_print = True
            self._do(events.SetTimer("unprinted", FINAL_PRINT_TIMEOUT_S))
        return self.take_actions()

    @property
    def has_unprinted_verdict(self) -> bool:
        """Whether a verdict may have to be printed here, because nobody has reported so far that it is."""
        return self._verdict is not None and not self._is_printed

    def _send(self, peer: Peer, message: CoordinatorToSentinel) -> None:
        self._do(events.ToPeer(peer.link, message))

    def _send_all(self, message: CoordinatorToSentinel) -> None:
        for peer in self.peers.by_link.values():
            self._send(peer, message)

    def _greet(self, link: int, hello: Hello) -> None:
        """Admit the sentinel of a rank, unless the rank has one."""
        is_member = self._own is None or 0 < hello.rank < self._own.world_size
        if is_member and hello.rank not in self.peers.by_rank:
            self._do(events.ToPeer(link, protocol.Admitted()))
            self._admit(link, hello)
        else:
            self._do(events.CloseConnection(link))

    def _admit(self, link: int, hello: Hello) -> None:
        peer = self.peers.admit(link, hello)
        self._send(*self.peers.introduce(peer))
        if self._verdict is not None and self.state in (S.REASON_PRINTED, S.ENDING):
            self._send(peer, protocol.JobEnds(self._verdict.first.status, abort=self.state is S.ENDING))

    def _on_sentinel_lost(self, peer: Peer) -> None:
        """Note that a rank has no sentinel, and send it again what that may have received."""
        for observer, message in self.peers.unwatch(peer):
            self._send(observer, message)
        self._silent.discard(peer.rank)
        if self._verdict is None:
            return
        first = self._verdict.first
        if peer.rank == first.rank and not self._is_printed:
            self._send(peer, protocol.Decision(self._verdict, first.status, abort=True))
        if self.state in (S.REASON_PRINTED, S.ENDING):
            abort = self.state is S.ENDING and self._must_abort(peer.rank)
            self._send(peer, protocol.JobEnds(first.status, abort, waits=peer.decided))

    def _on_message(self, peer: Peer, message: SentinelToCoordinator | Text | Unreadable) -> None:
        match message:
            case protocol.Failed(report, gone):
                peer.gone = gone
                self._add_report(report, living=not gone)
            case protocol.ReasonPrinted(done):
                self._is_printed, self._printing_rank = True, None if done else peer.rank
                if done:
                    self._on_reason_printed()
            case protocol.CleanupDone():
                if self._verdict is not None and peer.rank == self._verdict.first.rank:
                    self._begin_end()
            case protocol.StoppedStatus(stopped):
                self._silent.discard(peer.rank)
                if stopped:
                    self._add_absent(peer, "is stopped (by SIGSTOP or a debugger)")
            case protocol.StepDaemonLost():
                self._add_absent(peer, NO_STEP_DAEMON)
            case protocol.QueryUnfinished():
                self._do(*self._snapshot.begin(peer))
            case protocol.PeerProcessEnded(rank):
                self._end_order.append(rank)
            case protocol.Interrupted():
                self._interrupted.append(peer.rank)
                self._do(*self._snapshot.begin())
            case protocol.ScriptEnded(by_exit):
                self._finished.add(peer.rank)
                self._exits += [by_exit] if by_exit else []
                if self._first_finished_s is None:
                    self._first_finished_s = self._now_s
                    self._do(events.SetTimer("finished check", MIN_FINISHED_CHECK_S))
            case protocol.Stage(name):
                self._do(*self._late_ranks.set_stage(peer.rank, name))
            case protocol.Leave():
                self._drop(peer)
            case protocol.SentinelLost():
                self._on_sentinel_lost(peer)
            case Hello() | Sample() | SnapshotRequest() | ThreadsReply() | Text():
                pass  # nothing to decide from
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _check_wait_for_finished(self) -> None:
        """Check whether ranks wait for one that has finished; less often, the longer none does."""
        if self.state is not S.RUNNING:
            return
        assert self._first_finished_s is not None
        pause_s = MIN_FINISHED_CHECK_S if self._wait else (self._now_s - self._first_finished_s) / 2
        self._do(events.SetTimer("finished check", min(MAX_FINISHED_CHECK_S, max(MIN_FINISHED_CHECK_S, pause_s))))
        if self.peers.by_rank.keys() - self._finished:
            self._do(events.CheckWaitForFinished())

    def _on_wait_for_finished(self, report: Report | None) -> None:
        """Print that ranks wait for one that has finished; end the job when that has lasted."""
        if report is None:
            self._wait = None
        elif self._wait is None or self._wait[0] != report.cause:
            self._wait = report.cause, self._now_s
            limit = f"{self._watched.exit_timeout_s:g} s (--exit-timeout)"
            self._do(events.PrintLine(f"mpiddp: {report.cause}; the job ends if that lasts for {limit}"))
        elif self._now_s - self._wait[1] >= self._watched.exit_timeout_s:
            self._add_report(brief(report))

    def _drop(self, peer: Peer) -> None:
        self.peers.drop(peer)
        self._late_ranks.forget(peer.rank)
        self._silent.discard(peer.rank)
        self._finished.discard(peer.rank)
        self._do(events.CloseConnection(peer.link))

    def _on_lost(self, peer: Peer, error: str) -> None:
        """Report the rank of a sentinel that is gone without a `Leave`."""
        self._drop(peer)
        if peer.rank == self._printing_rank:  # printing the reason twice beats not printing it
            self._is_printed = False
        with_it = "its sentinel" if peer.pid != 1 else "all else in its container"
        cause, status = f"is gone, and {with_it} with it", 137
        if not peer.watched:
            cause = "is gone; its sentinel was killed before, so nobody saw how it ended"
        if error:
            cause, status = f"is out of reach, its node or its network is down ({error})", 1
        if self._verdict is None:
            self._add_absent(peer, cause, status)
        elif peer.rank == self._verdict.first.rank:
            self._print_if_unprinted()
            self._on_reason_printed()

    def _add_absent(self, peer: Peer, cause: str, status: int = 1) -> None:
        self._add_report(Report(peer.rank, peer.host, ABSENT, cause, status))

    def _add_report(self, report: Report, living: bool = False) -> None:
        """Take a report; `living` tells that the rank itself waits for a decision."""
        if living:
            self._living.add(report.rank)
        if self._verdict is not None:
            self._secondary_failures.append(report.rank)
            if self.state in (S.REASON_PRINTED, S.ENDING):
                self._decide_secondary(report.rank)
            return
        if self._enter(S.DECIDING):
            self._first_report_s = self._now_s
        if (report.rank, report.cause) in self._known:  # sent again
            return
        self._known.add((report.rank, report.cause))
        self.reports.append(report)
        self._came_s.setdefault(report.rank, self._now_s - self._first_report_s)
        if len(self.reports) == 1 and (report.kind == CONSEQUENCE or report.signal == GIVING_UP):
            self._silent.update(rank for rank, peer in self.peers.by_rank.items() if peer.watched)
            self._send_all(protocol.QueryStopped())
            self._do(*self._snapshot.begin())

    def _decide_if_clear(self, last_chance: bool = False) -> None:
        """Decide as soon as it is clear which rank failed first; from what is known, at the last chance."""
        if self.state is not S.DECIDING or self._own is None:
            return
        next_s = self._selected_s + SELECTION_INTERVAL_S * self._own.world_size
        if self._now_s < next_s and not last_chance:
            self._do(events.SetTimer("select", next_s - self._now_s))
            return
        self._selected_s = self._now_s
        waited_s = math.inf if last_chance else self._now_s - self._first_report_s
        verdict = judge(self.reports, waited_s, Scene(
            self.peers.hosts, self._silent, self._finished - {report.rank for report in self.reports},
            self._interrupted, self._end_order, self._watched.step is not None, self._watched.by_srun, self._came_s,
            self._own.world_size, self._snapshot.seen, self._exits))
        if verdict is not None:
            self._decide(verdict)
        else:
            times_s = root_cause.ALONE_S, root_cause.SETTLING_S, root_cause.SEARCHING_S
            due_s = next(time_s for time_s in times_s if time_s > waited_s)
            self._do(events.SetTimer("select", due_s - waited_s))

    def _decide(self, verdict: Verdict) -> None:
        """Let the rank that failed first print the reason, or print it if that rank cannot; then all end."""
        self._enter(S.DECIDED)
        self._verdict = verdict
        first = self.peers.by_rank.get(verdict.first.rank)
        self._secondary_failures += [report.rank for report in self.reports if report.rank != verdict.first.rank]
        if first is None or verdict.first.kind == ABSENT or verdict.first in self._exits:
            self._print_if_unprinted()
            self._do(events.SetTimer("told", FORWARDING_S))
        else:
            self._send(first, protocol.Decision(verdict, verdict.first.status, abort=True))
            self._do(events.SetTimer("told", PRINT_TIMEOUT_S))

    def _print_if_unprinted(self) -> None:
        """Print the reason, if the rank that failed first cannot any more, and has not."""
        if self._verdict is not None and self._own is not None and not self._is_printed:
            self._is_printed = True
            after_s = self._now_s - self._began_s
            self._do(events.PrintReason(self._verdict, None, after_s, self._own.error_file))
            first = self.peers.by_rank.get(self._verdict.first.rank)
            if first is not None and self._verdict.first.kind != ABSENT:  # it has been asked to, and may do so yet
                self._send(first, protocol.Decision(None, self._verdict.first.status, abort=True))

    def _decide_secondary(self, rank: int) -> None:
        """Send a rank that another one failed first."""
        assert self._verdict
        if (peer := self.peers.by_rank.get(rank)) is not None and not peer.decided:
            ends = self.state is S.ENDING
            peer.decided = not ends
            self._send(peer, protocol.Decision(None, self._verdict.first.status, ends and self._must_abort(rank)))

    def _must_abort(self, rank: int) -> bool:
        """Tell whether a rank has to end the job: each has, or one by MPI_Abort, the first to fail if it lives."""
        assert self._verdict
        assert self._own
        if self._own.exits:
            return True
        if self._aborting_rank is None:
            first = self._verdict.first.rank
            others = [peer for peer in self.peers.by_rank.values() if peer.rank != first and not peer.gone]
            watched = [peer.rank for peer in others if peer.watched] or [peer.rank for peer in others]
            self._aborting_rank = first if first in self._living else min(self._living or watched, default=first)
        return rank == self._aborting_rank or (rank in self._living and self._aborting_rank not in self.peers.by_rank)

    def _on_reason_printed(self) -> None:
        """Send all that the job ends; if ranks exit by themselves, all wait for the first, as its exit ends all."""
        if self._verdict is None or not self._enter(S.REASON_PRINTED):
            return
        assert self._own
        if not (self._own.exits and self._verdict.first.rank in self._living):
            self._begin_end()
            return
        for rank in self._secondary_failures:
            self._decide_secondary(rank)
        self._send_all(protocol.JobEnds(self._verdict.first.status, abort=False))
        self._do(events.SetTimer("cleanup", self._own.grace_s))

    def _begin_end(self) -> None:
        """Let every sentinel end its rank."""
        if self._verdict is None or not self._enter(S.ENDING):
            return
        for rank in self._secondary_failures:
            self._decide_secondary(rank)
        for peer in self.peers.by_link.values():
            abort = self._must_abort(peer.rank)
            self._send(peer, protocol.JobEnds(self._verdict.first.status, abort, waits=peer.decided))
