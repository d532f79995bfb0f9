"""The logic of the coordinator, in rank 0's agent: from all reports it selects the root cause, and ends the job."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from typing import ClassVar

from ..base.errors import assert_never
from ..base.ranks import RankIdentity
from ..base.text import format_ranges
from ..failure import root_cause
from ..failure.postmortem import is_secondary
from ..failure.root_cause import (
    EXIT_TIMEOUT_WORDS,
    UNKNOWN_RANKS,
    JobActivity,
    Report,
    ReportKind,
    Reports,
    RootCause,
    select_root_cause,
    truncate_report,
)
from ..ipc.channel import Unreadable
from ..output.index import RankEnd
from ..systems.statuses import EXIT_STALLED
from ..where.protocol import Sample, SnapshotRequest, ThreadsReply
from . import events, protocol
from .events import CoordinatorCommand, Record
from .protocol import AgentToCoordinator, CoordinatorToAgent, Hello
from .startup_timeout import LateRanks
from .state_machine import StateMachine
from .timeouts import FINAL_EXIT_TIMEOUT_S, LATE_AGENTS_TIMEOUT_S, PRINT_TIMEOUT_S, SIGNAL_SPREAD_S

MIN_DEADLOCK_CHECK_S, MAX_DEADLOCK_CHECK_S = 5.0, 30.0  # between two checks; two in a row show a deadlock
REMIND_AFTER_S = 60.0  # from the first rank's end until those that are awaited are named
# After the first report: even without others the root cause is clear by then. The rest is for rounding.
SELECTION_TIMES_S = [time_s + 0.001 for time_s in (
    root_cause.SAME_ERROR_WAIT_S, root_cause.SAME_CAUSE_WAIT_S, root_cause.KILL_SPREAD_S, root_cause.ROOT_CAUSE_WAIT_S)]


class Peer:
    """The agent of a rank, as the coordinator knows it."""

    def __init__(self, link: int, hello: Hello) -> None:
        self.link, self.rank, self.host = link, hello.rank, hello.host
        self.namespace, self.group = hello.namespace, hello.group
        self.has_ended = False  # the rank, and what it had started


class Peers:
    """The agents, by link and by rank; `unended` is the number of those whose rank has not ended.

    `hosts` has the host of each rank that was ever admitted.
    """

    def __init__(self) -> None:
        self.by_link: dict[int, Peer] = {}
        self.by_rank: dict[int, Peer] = {}
        self.hosts: dict[int, str] = {}
        self.unended = 0
        self._by_namespace: dict[str, dict[int, Peer]] = {}

    def admit(self, link: int, hello: Hello) -> Peer:
        """Admit an agent."""
        self.hosts[hello.rank] = hello.host
        peer = self.by_link[link] = self.by_rank[hello.rank] = Peer(link, hello)
        self._by_namespace.setdefault(peer.namespace, {})[peer.rank] = peer
        self.unended += 1
        return peer

    def mark_ended(self, peer: Peer) -> None:
        """Note that a rank has ended."""
        self.unended -= not peer.has_ended
        peer.has_ended = True

    def drop(self, peer: Peer) -> None:
        """Forget an agent that has ended, and its rank with it."""
        self.mark_ended(peer)
        del self.by_link[peer.link], self.by_rank[peer.rank], self._by_namespace[peer.namespace][peer.rank]

    def find_neighbour(self, peer: Peer) -> Peer | None:
        """Return an agent in the process namespace of one that was dropped, None if there is none."""
        return next(iter(self._by_namespace[peer.namespace].values()), None)


class FinishedRanks:
    """The ranks whose script has finished."""

    def __init__(self, config: protocol.AgentConfig) -> None:
        self.ranks: set[int] = set()
        self.most_calls = 0
        self.complete = True  # none has vanished
        self.first: int | None = None
        self._config = config
        self._first_s = 0.0  # when the first one finished

    def add(self, rank: int, message: protocol.ScriptEnded, now_s: float) -> list[events.CoordinatorAction]:
        """Add a rank; the first one starts the timers."""
        self.ranks.add(rank)
        self.most_calls = max(self.most_calls, message.calls)
        self.complete &= not message.vanished
        if self.first is not None:
            return []
        self.first, self._first_s = rank, now_s
        timeout_s = self._config.exit_timeout_s
        return [events.SetTimer("remind", REMIND_AFTER_S),
                *([events.SetTimer("exit timeout", timeout_s)] if timeout_s else [])]

    def waited_s(self, now_s: float) -> float:
        """Return the seconds since the first rank finished."""
        return now_s - self._first_s


class DeadlockChecks:
    """When to check for a deadlock, and how long one has lasted."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: float | None = None  # since when there may be one: checks are made
        self._found: tuple[str, float] | None = None  # its description, and since when

    def begin(self, now_s: float, first_s: float) -> list[events.CoordinatorAction]:
        """Make checks from now on, the first one after `first_s`; a call during the checks does nothing."""
        if self._since_s is not None:
            return []
        self._since_s, self._found = now_s, None
        return [events.SetTimer("deadlock check", first_s)]

    def end(self) -> None:
        """Make no more checks."""
        self._since_s = None

    def on_due(self, now_s: float) -> list[events.CoordinatorAction]:
        """Make a check, and set the timer of the next one: less often, the longer there is no deadlock."""
        if self._since_s is None:
            return []
        pause_s = 0.0 if self._found else (now_s - self._since_s) / 2
        return [CoordinatorCommand.CHECK_DEADLOCK,
                events.SetTimer("deadlock check", min(MAX_DEADLOCK_CHECK_S, max(MIN_DEADLOCK_CHECK_S, pause_s)))]

    def on_checked(self, report: Report | None, now_s: float) -> tuple[list[events.CoordinatorAction], Report | None]:
        """Print a deadlock, as in `report`, if it is new; return the report after the timeout."""
        if report is None or self._since_s is None:
            self._found = None
        elif self._found is None or self._found[0] != report.cause:
            self._found = report.cause, now_s
            limit = f"{self._timeout_s:g} s (--exit-timeout)"
            return [events.PrintLine(f"mpiddp: {report.cause}; the job will end if this lasts {limit}")], None
        elif now_s - self._found[1] >= self._timeout_s:
            return [], truncate_report(report)
        return [], None


class Evidence:
    """What the root cause is selected from, besides the peers and a snapshot."""

    def __init__(self) -> None:
        self.reports = Reports()
        self.signals: set[str] = set()  # from outside, that agents got
        self.silent: set[int] = set()  # ranks that have not answered a QueryStopped
        self.first_s = 0.0  # when the first report came
        self._known: set[tuple[int, str]] = set()  # rank and cause of each report

    def add(self, report: Report, now_s: float) -> bool:
        """Add a report, unless it is a repetition, and return whether it is the first one."""
        if (report.rank, report.cause) in self._known:
            return False
        self._known.add((report.rank, report.cause))
        self.reports.add(report)
        if len(self.reports.all) > 1:
            return False
        self.first_s = now_s
        return True


class Running(Record):
    """No rank has failed."""


class Deciding(Record):
    """A rank has failed; reports on an earlier failure may follow."""


class Decided(Record):
    """The root cause is selected; its rank's agent is asked to print the report."""

    root_cause: RootCause


class Ending(Record):
    """The report is printed, and every agent ends its rank."""

    status: int


class Over(Record):
    """All ranks have ended, and so do the agents, with this status."""

    status: int


Phase = Running | Deciding | Decided | Ending | Over


class Coordinator(StateMachine[Phase, events.CoordinatorAction]):
    """Talks to the agents of all ranks; a link is a number for the connection to one."""

    transitions: ClassVar = {
        Running: ((Deciding, Over), ()), Deciding: ((Decided,), ()), Decided: ((Ending,), ()), Ending: ((Over,), ()),
        Over: ((), (Deciding, Ending)),
    }

    def __init__(self, config: protocol.AgentConfig, began_s: float) -> None:
        """Coordinate a job whose rank 0 has this `config` and began at `began_s`, on the clock of handle()."""
        super().__init__(Running(), began_s)
        self._began_s, self._config = began_s, config
        self._own: RankIdentity | None = None
        self.peers, self._late_ranks = Peers(), LateRanks()
        self._finished, self.evidence = FinishedRanks(config), Evidence()
        self._deadlock_checks = DeadlockChecks(config.blocked_timeout_s)
        self._activity = JobActivity()
        self._status = 0  # the largest of the ranks that have ended
        self._deputy: Peer | None = None  # which reports the loss of this process
        self._aborting: Peer | None = None  # whose rank can end the job by MPI_Abort, which cuts short others' own end
        self._failed_first = root_cause.NOBODY  # the rank that the report names
        self._ends: dict[int, RankEnd] = {}  # of the ranks that have ended
        self._completes_index = False  # of the logs: the last thing before the agents end
        self._quiet_until_s = began_s  # not to print for each rank that a SIGINT has not ended
        self._awaits_stop = False  # that nothing stops before the script's first should_stop() is printed
        self._times_out = False  # --exit-timeout is over; a snapshot is being taken
        self._awaits_agents = False  # of a job that ends: some have not joined yet
        self._must_cancel = False  # some ranks, or their slurmstepd, cannot be reached

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
            case events.StallChanged():
                self._on_stall(event)
            case events.OwnRankIdle(is_idle):
                if is_idle:
                    self._do(*self._deadlock_checks.begin(now_s, 0.0))
                elif self._finished.first is None:
                    self._deadlock_checks.end()
            case events.DeadlockChecked(report):
                if isinstance(self.phase, Running):
                    actions, lasting = self._deadlock_checks.on_checked(report, now_s)
                    self._do(*actions)
                    if lasting is not None:
                        self._add_report(lasting)
            case events.SnapshotTaken(activity):
                self._activity = activity
                if self._times_out:
                    self._time_out()
                self._report_ignored_interrupt()
            case events.IndexCompleted(error):
                self._end_agents(error)
            case events.Due(timer):
                self._on_due(timer)
            case _:
                assert_never(event)
        self._decide_if_clear()
        return self.take_actions()

    @property
    def is_complete(self) -> bool:
        """Whether the job is over, and all ranks have ended."""
        return isinstance(self.phase, Over) and not self._must_cancel

    def _on_due(self, timer: str) -> None:
        is_running = isinstance(self.phase, Running)
        match timer:
            case "deadlock check" if is_running:
                self._do(*self._deadlock_checks.on_due(self._now_s))
            case "remind" if is_running and (awaited := self._find_unfinished() or self._find_unended()):
                names = root_cause.describe_ranks(awaited, self.peers.hosts, self._activity.places)
                waited_s = self._finished.waited_s(self._now_s)
                self._do(events.PrintLine(f"mpiddp: still waiting after {waited_s:.0f} s for other ranks to finish: "
                                          f"{names}"), events.SetTimer("remind", waited_s))
            case "exit timeout" if is_running and self._find_unfinished():
                self._times_out = True
                self._take_snapshot()
            case "late" if is_running and self._own is not None:
                waited_s = self._now_s - self._began_s
                self._do(*self._late_ranks.remind(waited_s, self.peers.hosts, self._own.world_size))
            case "printed":
                self._print_here()
            case "late agents":
                self._awaits_agents = False
                self._end_agents_if_ended()
            case "end":
                self._must_cancel = True  # for ranks on nodes that cannot be reached
                self._complete_index()

    def _send(self, peer: Peer, message: CoordinatorToAgent) -> None:
        self._do(events.ToPeer(peer.link, message))

    def _send_all(self, message: CoordinatorToAgent, but: Peer | None = None) -> None:
        self._do(events.ToPeers([link for link, peer in self.peers.by_link.items() if peer is not but], message))

    def _take_snapshot(self) -> None:
        if not self._activity.is_pending:
            self._activity = self._activity._replace(is_pending=True)
            self._do(CoordinatorCommand.TAKE_SNAPSHOT)

    def _find_unfinished(self) -> Collection[int]:
        return self.peers.by_rank.keys() - self._finished.ranks

    def _find_unended(self) -> Collection[int]:
        return {rank for rank, peer in self.peers.by_rank.items() if not peer.has_ended}

    def _greet(self, link: int, hello: Hello) -> None:
        """Admit the agent of a rank, unless the rank has one."""
        is_member = hello.rank > 0 and (self._own is None or hello.rank < self._own.world_size)
        if is_member and hello.rank not in self.peers.by_rank:
            self._admit(link, hello)
        else:
            self._do(events.CloseConnection(link))

    def _admit(self, link: int, hello: Hello) -> None:
        peer = self.peers.admit(link, hello)
        self._send(peer, protocol.Admitted())
        self._appoint_deputy([peer] if peer.rank > 0 else self.peers.by_rank.values())
        match self.phase:
            case Ending(status):
                self._awaits_agents = self._awaits_agents and self._has_late_agents
                self._send(peer, protocol.JobEnds(status))
            case Over(status):
                self._send(peer, protocol.JobOver(status))

    def _appoint_deputy(self, candidates: Iterable[Peer]) -> None:
        """Choose the agent that reports the loss of this process: on another node, if there is one."""
        if self._own is None or isinstance(self.phase, (Ending, Over)):
            return
        own_host, before = self._own.host, self._deputy
        if before is None or before.host == own_host:
            others = [peer for peer in candidates if peer.rank > 0]
            chosen = next((peer for peer in others if peer.host != own_host), before or next(iter(others), None))
            if chosen is not None and chosen is not before:
                self._deputy = chosen
                self._send(chosen, protocol.Deputy(own_host))
                if before is not None:
                    self._send(before, protocol.Deputy(""))

    @property
    def _has_late_agents(self) -> bool:
        return self._own is not None and len(self.peers.hosts) < self._own.world_size

    def _on_message(self, peer: Peer, message: AgentToCoordinator | Unreadable) -> None:
        match message:
            case protocol.Failed(report):
                self._add_report(report)
            case protocol.ScriptEnded():
                self._do(*self._finished.add(peer.rank, message, self._now_s),
                         *self._deadlock_checks.begin(self._now_s, MIN_DEADLOCK_CHECK_S))
                self._release_if_finished()
            case protocol.RankEnded(status, can_abort, log_lost, last_line):
                self.peers.mark_ended(peer)
                if can_abort and (self._aborting is None or peer.rank == self._failed_first):
                    self._aborting = peer
                own_status = self.phase.status if can_abort and isinstance(self.phase, Ending) else status
                self._ends[peer.rank] = RankEnd(own_status, log_lost, last_line)
                self._status = max(self._status, status)
                self._end_agents_if_ended()
            case protocol.ReasonPrinted():
                self._end_ranks()
            case protocol.Signalled(number):
                self.evidence.signals.add(signal.Signals(number).name)
                if number == signal.SIGINT:
                    self._take_snapshot()
            case protocol.StoppedStatus(stopped):
                self.evidence.silent.discard(peer.rank)
                if stopped:
                    self._add_absent(peer, "the process is stopped (SIGSTOP or a debugger)")
            case protocol.StepDaemonLost():
                self._must_cancel = True
                self._add_absent(peer, root_cause.STEP_DAEMON_KILLED)
            case protocol.Stage(name):
                self._do(*self._late_ranks.set_stage(peer.rank, name))
            case protocol.UnaskedStop(number):
                self._on_unasked_stop(number)
            case Hello() | Sample() | SnapshotRequest() | ThreadsReply():
                pass  # nothing to decide from
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _release_if_finished(self) -> None:
        """Let the ranks leave if all scripts have finished."""
        finished = self._finished
        if self._own is not None and len(finished.ranks) == self._own.world_size and isinstance(self.phase, Running):
            self._send_all(protocol.AllFinished(finished.most_calls, finished.complete))

    def _time_out(self) -> None:
        """Report that --exit-timeout is over, on behalf of the rank that finished first."""
        self._times_out = False
        first, unfinished = self._finished.first, self._find_unfinished()
        if first is None or not unfinished or not isinstance(self.phase, Running):
            return
        names = root_cause.describe_ranks(unfinished, self.peers.hosts, self._activity.places) or UNKNOWN_RANKS
        cause = f"{EXIT_TIMEOUT_WORDS} {self._config.exit_timeout_s:g} s: {names}"
        host = self.peers.hosts.get(first, "")
        self._add_report(truncate_report(Report(first, host, ReportKind.SECONDARY, cause, 1)))

    def _on_stall(self, stall: events.StallChanged) -> None:
        """Print that the job hangs, or continues; with --stall-abort end it."""
        if isinstance(self.phase, Running):
            self._do(events.PrintLine(f"mpiddp: {stall.text}"))
            if stall.cause and self._config.stall_abort:
                host = self.peers.hosts.get(stall.rank, "")
                self._add_report(truncate_report(
                    Report(stall.rank, host, ReportKind.UNREACHABLE, stall.cause, EXIT_STALLED)))

    def _report_ignored_interrupt(self) -> None:
        """Print where the ranks are if none reacts to a SIGINT."""
        is_ignored = "SIGINT" in self.evidence.signals and isinstance(self.phase, Running)
        if is_ignored and self._activity.table and self._now_s >= self._quiet_until_s:
            self._quiet_until_s = self._now_s + SIGNAL_SPREAD_S
            self._do(events.PrintLine("mpiddp: SIGINT received, but no rank has reacted (in native code they cannot); "
                                      f"press Ctrl-C again to end the job\n{self._activity.table}"))

    def _on_unasked_stop(self, number: int) -> None:
        """Print once that nothing stops before the script's first should_stop()."""
        if not self._awaits_stop:
            self._awaits_stop = True
            self._do(events.PrintLine(
                f"mpiddp: received {signal.Signals(number).name}, but the script has not called mpiddp.should_stop() "
                "yet, and nothing stops before its first call; Ctrl-C, scancel or SIGKILL ends the job now"))

    def _on_lost(self, peer: Peer, error: str) -> None:
        """Report a rank whose agent has ended, or cannot be reached; its rank has died with it."""
        has_ended = peer.has_ended
        self.peers.drop(peer)
        self._late_ranks.forget(peer.rank)
        self.evidence.silent.discard(peer.rank)
        if isinstance(self.phase, Over):
            return
        self._must_cancel |= bool(error)
        if not error and not has_ended and (neighbour := self.peers.find_neighbour(peer)) is not None:
            self._send(neighbour, protocol.KillGroup(peer.group))
        if peer is self._deputy:
            self._deputy = None
            self._appoint_deputy(self.peers.by_rank.values())
        if peer.rank not in self.evidence.reports.ranks:
            self._add_report(root_cause.make_loss_report(peer.rank, peer.host, error))
        if isinstance(self.phase, Decided) and peer.rank == self.phase.root_cause.first.rank:
            self._print_here()
        self._end_agents_if_ended()

    def _add_absent(self, peer: Peer, cause: str) -> None:
        self._add_report(Report(peer.rank, peer.host, ReportKind.UNREACHABLE, cause, 1))

    def _add_report(self, report: Report) -> None:
        if isinstance(self.phase, Running):
            self._enter(Deciding())
        if not isinstance(self.phase, Deciding):
            return
        if not self.evidence.add(report, self._now_s):
            return
        self._do(*(events.SetTimer(f"select {after_s:g}", after_s) for after_s in SELECTION_TIMES_S))
        if is_secondary(report) or root_cause.is_node_loss(report):
            self.evidence.silent.update(self.peers.by_rank)
            self._send_all(protocol.QueryStopped())
            self._take_snapshot()

    def _decide_if_clear(self) -> None:
        """Select the root cause as soon as it is clear."""
        if not isinstance(self.phase, Deciding) or self._own is None:
            return
        evidence = self.evidence
        selected = select_root_cause(evidence.reports, self._now_s - evidence.first_s, root_cause.FailureContext(
            self.peers.hosts, evidence.silent, self._finished.ranks, evidence.signals, self._own.world_size,
            self._activity, self._config.by_srun))
        if selected is not None:
            self._decide(selected)

    def _decide(self, selected: RootCause) -> None:
        """Ask the agent of the rank that failed first to print the report; print it here if there is none."""
        self._enter(Decided(selected))
        self._failed_first = selected.first.rank
        first = self.peers.by_rank.get(selected.first.rank)
        if first is None or selected.first.kind == ReportKind.UNREACHABLE:
            self._print_here()
        else:
            self._send(first, protocol.PrintReason(selected))
            self._do(events.SetTimer("printed", PRINT_TIMEOUT_S))

    def _print_here(self) -> None:
        """Print the report, and end the ranks."""
        if isinstance(self.phase, Decided) and self._own is not None:
            self._do(events.PrintOwnReport(self.phase.root_cause, self._now_s - self._began_s, self._own.error_file))
            self._end_ranks()

    def _end_ranks(self) -> None:
        """Make every agent end its rank."""
        if isinstance(self.phase, Decided) and self._own is not None:
            status = self.phase.root_cause.first.status
            self._enter(Ending(status))
            self._send_all(protocol.JobEnds(status))
            self._do(events.SetTimer("end", self._own.grace_s + FINAL_EXIT_TIMEOUT_S))
            if self._has_late_agents:
                self._awaits_agents = True
                self._do(events.SetTimer("late agents", LATE_AGENTS_TIMEOUT_S))
            self._end_agents_if_ended()

    def _end_agents_if_ended(self) -> None:
        """End the agents if all ranks have ended: of a job in order, all that there are."""
        if self._own is None or self.peers.unended or self._awaits_agents:
            return
        is_in_order = isinstance(self.phase, Running) and len(self.peers.by_rank) == self._own.world_size
        if is_in_order or isinstance(self.phase, Ending):
            self._complete_index()

    def _complete_index(self) -> None:
        """Have the index of the logs completed, if there is one, and then end the agents."""
        path = self._own.log.ranks_file if self._own is not None else ""
        if not path:
            self._end_agents()
        elif not self._completes_index:
            self._completes_index = True
            self._do(events.CompleteIndex(path, dict(self._ends), self._failed_first))

    def _report_lost_logs(self, index: str) -> None:
        """Print which ranks' logs are incomplete, if any; `index` is the path of their index, empty for none."""
        if lost := sorted(rank for rank, end in self._ends.items() if end.log_lost >= 0):
            words = f"rank{'s' * (len(lost) > 1)} {format_ranges(lost)}"
            where = f" (first lost byte of each in {index})" if index else ""
            self._do(events.PrintLine(f"mpiddp: logs are incomplete: {words}{where}"))

    def _end_agents(self, index_error: str = "") -> None:
        """End the agents; `index_error` says why there is no complete index of the logs, if there is one."""
        if index_error:
            self._do(events.PrintLine(index_error))
        status = self.phase.status if isinstance(self.phase, Ending) else self._status
        if isinstance(self.phase, Running):
            self._do(CoordinatorCommand.NOTE_END_IN_ORDER)
            self._report_lost_logs(self._own.log.ranks_file if self._own is not None and not index_error else "")
        if self._enter(Over(status)):
            if self._must_cancel:
                self._do(CoordinatorCommand.CANCEL_STEP)
            aborting = self._aborting
            if aborting is not None and aborting.rank in self.peers.by_rank:
                self._send_all(protocol.JobOver(status, aborts=True), but=aborting)
                self._send(aborting, protocol.Abort(status))
            else:
                self._send_all(protocol.JobOver(status))
