"""The logic of the coordinator, in rank 0's agent: from all reports it decides which rank failed first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import ClassVar

from ..base.errors import assert_never
from ..base.ranks import RankIdentity
from ..base.stderr import LAUNCHER_FORWARDING_S
from ..failure import root_cause
from ..failure.root_cause import JobActivity, Report, ReportKind, RootCause, select_root_cause, truncate_report
from ..ipc.channel import Text, Unreadable
from ..systems.statuses import EXIT_KILLED
from ..where.protocol import Sample, SnapshotRequest, ThreadsReply
from . import events, protocol
from .events import CoordinatorCommand, Record
from .protocol import AgentToCoordinator, CoordinatorToAgent, Hello, UnfinishedRanks, WatchPeerProcess
from .startup_timeout import LateRanks
from .state_machine import StateMachine

PRINT_TIMEOUT_S = 0.5  # for the rank that failed first to print its reason
FINAL_PRINT_TIMEOUT_S = 1.0  # for the message that it is printed, when rank 0 is gone already
MIN_FINISHED_CHECK_S, MAX_FINISHED_CHECK_S = 5.0, 30.0  # between checks whether ranks wait for one that has finished
SELECTION_INTERVAL_S = 2e-6  # for each rank, between selections of the root cause: one takes about a fifth of that


class Peer:
    """The agent of a rank, as the coordinator knows it."""

    def __init__(self, link: int, hello: Hello) -> None:
        self.link, self.rank, self.host = link, hello.rank, hello.host
        self.namespace, self.pid = hello.namespace, hello.pid
        self.gone = False  # the rank's process has ended
        self.watched = True  # its agent lives; else the rank uses this link itself
        self.decided = False  # it failed too, has its decision, and waits for the job's end


class Peers:
    """The agents, by link and by rank; in each namespace one of them, the observer, watches all processes there.

    `hosts` has the host of each rank that was ever admitted.
    """

    def __init__(self) -> None:
        self.by_link: dict[int, Peer] = {}
        self.by_rank: dict[int, Peer] = {}
        self.hosts: dict[int, str] = {}
        self._observers: dict[str, Peer] = {}

    def admit(self, link: int, hello: Hello) -> Peer:
        """Admit an agent."""
        self.hosts[hello.rank] = hello.host
        peer = self.by_link[link] = self.by_rank[hello.rank] = Peer(link, hello)
        return peer

    def introduce(self, peer: Peer) -> tuple[Peer, WatchPeerProcess]:
        """Return the observer of a new agent's namespace, and what to send it."""
        return self._observers.setdefault(peer.namespace, peer), WatchPeerProcess(peer.rank, peer.pid)

    def unwatch(self, peer: Peer) -> Iterator[tuple[Peer, WatchPeerProcess]]:
        """Mark a rank as unwatched; if its agent was an observer, yield the messages for the next one."""
        peer.watched = False
        if self._observers[peer.namespace] is not peer:
            return
        neighbours = [other for other in self.by_rank.values() if other.namespace == peer.namespace]
        if observer := next((other for other in neighbours if other.watched), None):
            self._observers[peer.namespace] = observer
            for neighbour in neighbours:
                yield observer, WatchPeerProcess(neighbour.rank, neighbour.pid)

    def drop(self, peer: Peer) -> None:
        """Forget an agent that has left, or has ended."""
        del self.by_link[peer.link], self.by_rank[peer.rank]


class PendingSnapshot:
    """The snapshot for the verdict, and for the ranks that ask who is unfinished."""

    def __init__(self) -> None:
        self.snapshot = JobActivity()
        self._askers: list[Peer] = []

    def begin(self, asker: Peer | None = None) -> list[events.CoordinatorAction]:
        """Request a snapshot, unless one is pending; `asker` waits for the answer."""
        is_pending = self.snapshot.is_pending
        self.snapshot = self.snapshot._replace(is_pending=True)
        if asker is not None:
            self._askers.append(asker)
        return [] if is_pending else [CoordinatorCommand.TAKE_SNAPSHOT]

    def end(self, snapshot: JobActivity, unfinished: Collection[int], peers: Peers) -> list[events.CoordinatorAction]:
        """Store the snapshot, and send the askers which ranks are unfinished, and where these are."""
        self.snapshot = snapshot
        names = root_cause.describe_ranks(unfinished, peers.hosts, snapshot.places)
        askers, self._askers = self._askers, []
        return [events.ToPeer(peer.link, UnfinishedRanks(names)) for peer in askers]


class FinishedRanks:
    """The ranks whose script has finished, and how long others have waited for them."""

    def __init__(self, exit_timeout_s: float) -> None:
        self.ranks: set[int] = set()
        self._exit_timeout_s = exit_timeout_s
        self._first_s: float | None = None  # when the first one finished
        self._wait: tuple[str, float] | None = None  # the text on who waits, and since when

    def add(self, rank: int, now_s: float) -> list[events.CoordinatorAction]:
        """Add a rank; the first one starts the checks."""
        self.ranks.add(rank)
        if self._first_s is not None:
            return []
        self._first_s = now_s
        return [events.SetTimer("finished check", MIN_FINISHED_CHECK_S)]

    def check(self, now_s: float) -> list[events.CoordinatorAction]:
        """Set the timer of the next check: less often, the longer no rank waits."""
        assert self._first_s is not None
        pause_s = MIN_FINISHED_CHECK_S if self._wait else (now_s - self._first_s) / 2
        return [events.SetTimer("finished check", min(MAX_FINISHED_CHECK_S, max(MIN_FINISHED_CHECK_S, pause_s)))]

    def on_wait(self, report: Report | None, now_s: float) -> tuple[list[events.CoordinatorAction], Report | None]:
        """Print that ranks wait, as in `report`, if that is new; return the report after --exit-timeout."""
        if report is None:
            self._wait = None
        elif self._wait is None or self._wait[0] != report.cause:
            self._wait = report.cause, now_s
            limit = f"{self._exit_timeout_s:g} s (--exit-timeout)"
            return [events.PrintLine(f"mpiddp: {report.cause}; the job will end if this lasts {limit}")], None
        elif now_s - self._wait[1] >= self._exit_timeout_s:
            return [], truncate_report(report)
        return [], None


class Evidence:
    """What the root cause is selected from, besides the peers and a snapshot."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.living: set[int] = set()  # ranks that have reported themselves
        self.exits: list[Report] = []  # of ranks that raised SystemExit with an unknown status
        self.silent: set[int] = set()  # ranks that have not answered a QueryStopped
        self.end_order: list[int] = []  # in which ranks ended, as the observer of their namespace saw it
        self.interrupted: list[int] = []
        self.came_s: dict[int, float] = {}  # from the first report to that of each rank
        self.first_s = 0.0  # when the first report came
        self._known: set[tuple[int, str]] = set()  # rank and cause of each report

    def add(self, report: Report, now_s: float) -> bool:
        """Add a report, unless it is a repetition, and return whether it is the first one."""
        if not self.reports:
            self.first_s = now_s
        if (report.rank, report.cause) in self._known:
            return False
        self._known.add((report.rank, report.cause))
        self.reports.append(report)
        self.came_s.setdefault(report.rank, now_s - self.first_s)
        return len(self.reports) == 1


class SelectedFailure:
    """The decision which rank failed first."""

    def __init__(self, verdict: RootCause) -> None:
        self.verdict, self.first = verdict, verdict.first
        self.secondary_failures: list[int] = []  # ranks that failed too, but not first
        self.aborting_rank: int | None = None  # which has to end the others, unless ranks exit by themselves


class Running(Record):
    """No rank has failed."""


class Deciding(Record):
    """A rank has failed; reports on an earlier failure may follow. The root cause was last selected at `selected_s`."""

    selected_s: float = -math.inf


class Decided(Record):
    """The root cause is selected; its rank is asked to print the reason."""

    outcome: SelectedFailure


class Announced(Decided):
    """The reason is printed; all wait for that rank, whose threads and atexit functions may still run."""


class EndOrdered(Announced):
    """Every agent has been asked to end its rank."""


Phase = Running | Deciding | Decided | Announced | EndOrdered


class Coordinator(StateMachine[Phase, events.CoordinatorAction]):
    """Talks to the agents of all ranks; a link is a number for the connection to one."""

    transitions: ClassVar = {
        Running: ((Deciding,), ()), Deciding: ((Decided,), ()), Decided: ((Announced, EndOrdered), ()),
        Announced: ((EndOrdered,), ()), EndOrdered: ((), (Announced,)),
    }

    def __init__(self, watched: protocol.WatchedRank, began_s: float) -> None:
        """Coordinate a job whose rank 0 is `watched` and began at `began_s`, on the clock of handle()."""
        super().__init__(Running(), began_s)
        self._began_s, self._watched = began_s, watched
        self._own: RankIdentity | None = None
        self.peers, self._snapshot, self._late_ranks = Peers(), PendingSnapshot(), LateRanks()
        self._finished, self.evidence = FinishedRanks(watched.exit_timeout_s), Evidence()
        self._printer: int | None = None  # the rank that is printing the reason, root_cause.NOBODY once that is printed
        self._limits_printing = False  # rank 0 leaves: a reason that is not printed yet has to be printed in time

    def handle(self, event: events.CoordinatorEvent, now_s: float) -> list[events.CoordinatorAction]:
        """Return the actions for an event at `now_s`, on any monotonic clock."""
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
            case events.EndRequested(report):
                self._add_report(report)
            case events.WaitForFinishedRank(report):
                if isinstance(self.phase, Running):
                    actions, lasting = self._finished.on_wait(report, now_s)
                    self._do(*actions)
                    if lasting is not None:
                        self._add_report(lasting)
            case events.SnapshotTaken(snapshot):
                unfinished = self.peers.by_rank.keys() - self._finished.ranks
                self._do(*self._snapshot.end(snapshot, unfinished, self.peers))
            case events.OwnRankEnded(in_order):
                self._on_own_rank_ended(in_order)
            case events.Due(timer):
                self._on_due(timer)
            case _:
                assert_never(event)
        self._decide_if_clear()
        if self._limits_printing and self.has_unprinted_verdict:
            self._limits_printing = False
            self._do(events.SetTimer("unprinted", FINAL_PRINT_TIMEOUT_S))
        return self.take_actions()

    @property
    def has_unprinted_verdict(self) -> bool:
        """Whether the verdict may have to be printed here, because no agent has reported that it is printed."""
        return self._outcome is not None and self._printer is None

    @property
    def _outcome(self) -> SelectedFailure | None:
        return self.phase.outcome if isinstance(self.phase, Decided) else None

    def _on_own_rank_ended(self, in_order: bool) -> None:
        """End the job with rank 0."""
        if in_order and isinstance(self.phase, Running):
            self._send_all(protocol.JobFinished())
            return
        self._limits_printing = True
        self._decide_if_clear(last_chance=True)
        self._begin_end()
        if any(report.kind == ReportKind.UNREACHABLE for report in self.evidence.reports):
            self._do(CoordinatorCommand.CANCEL_STEP)

    def _on_due(self, timer: str) -> None:
        match timer:
            case "finished check" if isinstance(self.phase, Running):
                self._do(*self._finished.check(self._now_s))
                if self.peers.by_rank.keys() - self._finished.ranks:
                    self._do(CoordinatorCommand.CHECK_WAIT_FOR_FINISHED)
            case "late" if isinstance(self.phase, Running) and self._own is not None:
                waited_s = self._now_s - self._began_s
                self._do(*self._late_ranks.remind(waited_s, self.peers.hosts, self._own.world_size))
            case "printed":
                self._on_reason_printed()
            case "cleanup":
                self._begin_end()
            case "unprinted":
                self._print_if_unprinted()

    def _send(self, peer: Peer, message: CoordinatorToAgent) -> None:
        self._do(events.ToPeer(peer.link, message))

    def _send_all(self, message: CoordinatorToAgent) -> None:
        for peer in self.peers.by_link.values():
            self._send(peer, message)

    def _greet(self, link: int, hello: Hello) -> None:
        """Admit the agent of a rank, unless the rank has one."""
        is_member = self._own is None or 0 < hello.rank < self._own.world_size
        if is_member and hello.rank not in self.peers.by_rank:
            self._do(events.ToPeer(link, protocol.Admitted()))
            self._admit(link, hello)
        else:
            self._do(events.CloseConnection(link))

    def _admit(self, link: int, hello: Hello) -> None:
        peer = self.peers.admit(link, hello)
        self._send(*self.peers.introduce(peer))
        if isinstance(self.phase, Announced):
            ends = isinstance(self.phase, EndOrdered)
            self._send(peer, protocol.JobEnds(self.phase.outcome.first.status, abort=ends))

    def _on_agent_lost(self, peer: Peer) -> None:
        """Mark a rank as unwatched, and resend it what its agent may have received."""
        for observer, message in self.peers.unwatch(peer):
            self._send(observer, message)
        self.evidence.silent.discard(peer.rank)
        outcome = self._outcome
        if outcome is not None and peer.rank == outcome.first.rank and self._printer is None:
            self._send(peer, protocol.EndDecision(outcome.verdict, outcome.first.status, abort=True))
        if isinstance(self.phase, Announced):
            self._send_end(self.phase.outcome, peer)

    def _on_message(self, peer: Peer, message: AgentToCoordinator | Text | Unreadable) -> None:
        match message:
            case protocol.Failed(report, gone):
                peer.gone = gone
                if not gone:
                    self.evidence.living.add(report.rank)
                self._add_report(report)
            case protocol.ReasonPrinted(done):
                self._printer = root_cause.NOBODY if done else peer.rank
                if done:
                    self._on_reason_printed()
            case protocol.CleanupDone():
                if self._outcome is not None and peer.rank == self._outcome.first.rank:
                    self._begin_end()
            case protocol.StoppedStatus(stopped):
                self.evidence.silent.discard(peer.rank)
                if stopped:
                    self._add_absent(peer, "the process is stopped (SIGSTOP or a debugger)")
            case protocol.StepDaemonLost():
                self._add_absent(peer, root_cause.STEP_DAEMON_KILLED)
            case protocol.QueryUnfinished():
                self._do(*self._snapshot.begin(peer))
            case protocol.PeerProcessEnded(rank):
                self.evidence.end_order.append(rank)
            case protocol.Interrupted():
                self.evidence.interrupted.append(peer.rank)
                self._do(*self._snapshot.begin())
            case protocol.ScriptEnded(by_exit):
                self.evidence.exits += [by_exit] if by_exit else []
                self._do(*self._finished.add(peer.rank, self._now_s))
            case protocol.Stage(name):
                self._do(*self._late_ranks.set_stage(peer.rank, name))
            case protocol.Leave():
                self._drop(peer)
            case protocol.AgentLost():
                self._on_agent_lost(peer)
            case Hello() | Sample() | SnapshotRequest() | ThreadsReply() | Text() | protocol.UnaskedStop():
                pass  # nothing to decide from
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _drop(self, peer: Peer) -> None:
        self.peers.drop(peer)
        self._late_ranks.forget(peer.rank)
        self.evidence.silent.discard(peer.rank)
        self._finished.ranks.discard(peer.rank)
        self._do(events.CloseConnection(peer.link))

    def _on_lost(self, peer: Peer, error: str) -> None:
        """Report a rank if its agent has ended without a `Leave`."""
        self._drop(peer)
        if peer.rank == self._printer:  # printing the reason twice beats not printing it
            self._printer = None
        together = "its agent" if peer.pid != 1 else "its container"
        cause, status = f"ended together with {together}, for an unknown reason", EXIT_KILLED
        if not peer.watched:
            cause = "ended for an unknown reason: its agent had been killed before"
        if error:
            cause, status = f"cannot be reached: its node or its network is down ({error})", 1
        if self._outcome is None:
            self._add_absent(peer, cause, status)
        elif peer.rank == self._outcome.first.rank:
            self._print_if_unprinted()
            self._on_reason_printed()

    def _add_absent(self, peer: Peer, cause: str, status: int = 1) -> None:
        self._add_report(Report(peer.rank, peer.host, ReportKind.UNREACHABLE, cause, status))

    def _add_report(self, report: Report) -> None:
        """Process a report."""
        if isinstance(self.phase, Decided):
            self.phase.outcome.secondary_failures.append(report.rank)
            if isinstance(self.phase, Announced):
                self._decide_secondary(self.phase.outcome, report.rank)
            return
        if isinstance(self.phase, Running):
            self._enter(Deciding())
        is_first = self.evidence.add(report, self._now_s)
        if is_first and (report.kind == ReportKind.SECONDARY or report.signal == root_cause.ABORT_SIGNAL):
            self.evidence.silent.update(rank for rank, peer in self.peers.by_rank.items() if peer.watched)
            self._send_all(protocol.QueryStopped())
            self._do(*self._snapshot.begin())

    def _decide_if_clear(self, last_chance: bool = False) -> None:
        """Select the root cause as soon as it is clear; at the `last_chance` from what is known."""
        if not isinstance(self.phase, Deciding) or self._own is None:
            return
        next_s = self.phase.selected_s + SELECTION_INTERVAL_S * self._own.world_size
        if self._now_s < next_s and not last_chance:
            self._do(events.SetTimer("select", next_s - self._now_s))
            return
        self._enter(Deciding(self._now_s))
        evidence = self.evidence
        waited_s = math.inf if last_chance else self._now_s - evidence.first_s
        verdict = select_root_cause(evidence.reports, waited_s, root_cause.FailureContext(
            self.peers.hosts, evidence.silent, self._finished.ranks - {report.rank for report in evidence.reports},
            evidence.interrupted, evidence.end_order, self._watched.step is not None, self._watched.by_srun,
            evidence.came_s, self._own.world_size, self._snapshot.snapshot, evidence.exits))
        if verdict is not None:
            self._decide(verdict)
        else:
            times_s = root_cause.SAME_ERROR_WAIT_S, root_cause.SAME_CAUSE_WAIT_S, root_cause.ROOT_CAUSE_WAIT_S
            due_s = next(time_s for time_s in times_s if time_s > waited_s)
            self._do(events.SetTimer("select", due_s - waited_s))

    def _decide(self, verdict: RootCause) -> None:
        """Ask the rank that failed first to print the reason, or print it here if that rank cannot; then all end."""
        outcome = SelectedFailure(verdict)
        self._enter(Decided(outcome))
        first = self.peers.by_rank.get(outcome.first.rank)
        outcome.secondary_failures += [
            report.rank for report in self.evidence.reports if report.rank != outcome.first.rank]
        if first is None or outcome.first.kind == ReportKind.UNREACHABLE or outcome.first in self.evidence.exits:
            self._print_if_unprinted()
            self._do(events.SetTimer("printed", LAUNCHER_FORWARDING_S))
        else:
            self._send(first, protocol.EndDecision(verdict, outcome.first.status, abort=True))
            self._do(events.SetTimer("printed", PRINT_TIMEOUT_S))

    def _print_if_unprinted(self) -> None:
        """Print the reason, if the rank that failed first has not printed it and cannot any more."""
        outcome = self._outcome
        if outcome is None or self._own is None or self._printer is not None:
            return
        self._printer = root_cause.NOBODY
        after_s = self._now_s - self._began_s
        self._do(events.PrintReason(outcome.verdict, None, after_s, self._own.error_file))
        first = self.peers.by_rank.get(outcome.first.rank)
        if first is not None and outcome.first.kind != ReportKind.UNREACHABLE:  # it may still do so
            self._send(first, protocol.EndDecision(None, outcome.first.status, abort=True))

    def _decide_secondary(self, outcome: SelectedFailure, rank: int) -> None:
        """Inform a failed rank that another one failed first."""
        if (peer := self.peers.by_rank.get(rank)) is not None and not peer.decided:
            ends = isinstance(self.phase, EndOrdered)
            peer.decided = not ends
            self._send(peer, protocol.EndDecision(None, outcome.first.status, ends and self._must_abort(outcome, rank)))

    def _must_abort(self, outcome: SelectedFailure, rank: int) -> bool:
        """Return whether a rank has to end the job: each rank, or one by MPI_Abort, the first to fail if it lives."""
        assert self._own
        if self._own.exits:
            return True
        living = self.evidence.living
        if outcome.aborting_rank is None:
            first = outcome.first.rank
            others = [peer for peer in self.peers.by_rank.values() if peer.rank != first and not peer.gone]
            watched = [peer.rank for peer in others if peer.watched] or [peer.rank for peer in others]
            outcome.aborting_rank = first if first in living else min(living or watched, default=first)
        return rank == outcome.aborting_rank or (rank in living and outcome.aborting_rank not in self.peers.by_rank)

    def _on_reason_printed(self) -> None:
        """Announce that the job ends; if ranks exit by themselves, all wait for the first one, whose exit ends all."""
        outcome = self._outcome
        if outcome is None or not self._enter(Announced(outcome)):
            return
        assert self._own
        if self._own.exits and outcome.first.rank in self.evidence.living:
            self._announce_end(outcome)
            self._do(events.SetTimer("cleanup", self._own.grace_s))
        else:
            self._begin_end()

    def _begin_end(self) -> None:
        """Make every agent end its rank."""
        outcome = self._outcome
        if outcome is not None and self._enter(EndOrdered(outcome)):
            self._announce_end(outcome)

    def _announce_end(self, outcome: SelectedFailure) -> None:
        for rank in outcome.secondary_failures:
            self._decide_secondary(outcome, rank)
        for peer in self.peers.by_link.values():
            self._send_end(outcome, peer)

    def _send_end(self, outcome: SelectedFailure, peer: Peer) -> None:
        abort = isinstance(self.phase, EndOrdered) and self._must_abort(outcome, peer.rank)
        self._send(peer, protocol.JobEnds(outcome.first.status, abort, waits=peer.decided))
