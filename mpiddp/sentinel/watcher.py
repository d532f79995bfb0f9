"""The logic of a sentinel, from the start of its rank to the rank's end.

No I/O, no clock: `Watcher.handle()` takes an event and returns actions, which `process.py` carries out.
"""

from __future__ import annotations

import enum

from ..base.errors import assert_never
from ..base.ranks import RankIdentity
from ..base.stderr import LAUNCHER_FORWARDING_S
from ..base.text import truncate_middle
from ..failure.postmortem import describe_early_death, extract_crash_stack, is_maybe_secondary, make_death_report
from ..failure.root_cause import MAX_STACK_CHARS, STEP_DAEMON_KILLED, Report, ReportKind, RootCause, truncate_report
from ..ipc.channel import Text, Unreadable
from ..output.protocol import RelaySocket
from ..where.protocol import QuerySocket, SampleRequest, StackPipe, ThreadsRequest
from . import events, protocol
from .events import WatcherCommand
from .protocol import FINAL_EXIT_TIMEOUT_S, LAUNCHER_KILL_TIMEOUT_S, CoordinatorToSentinel, RankToSentinel
from .startup_timeout import HARD_GRACE_S, REPORTS_SPREAD_S, StartupTimeout
from .state_machine import StateMachine

DECISION_TIMEOUT_S = 2.5  # for the coordinator
LEAVE_TIMEOUT_S = 60.0  # for a rank whose script has finished, if rank 0 may have left the job in order
TERMINATION_DELAY_S = 1.0  # from the request to flush until SIGTERM


class State(enum.Enum):
    """The state of a watcher."""

    STARTING = "the rank has not joined its job yet"
    WORKING = "the rank is a member of its job"
    REPORTED = "the rank's failure is reported; the coordinator's decision is awaited"
    RANK_0_LOST = "rank 0 and the coordinator have ended: the launcher may end the job"
    ENDING = "the rank ends, or has to, for a known reason"
    SELF_HANDLED = "the rank prints itself why it ends, or the job has finished"
    CLEANING = "the rank has ended; its descendants are ended"
    OVER = "nothing is left to do"


S = State
TRANSITIONS: dict[State, tuple[State, ...]] = {
    S.STARTING: (S.WORKING, S.REPORTED, S.ENDING, S.SELF_HANDLED, S.CLEANING, S.OVER),
    S.WORKING: (S.REPORTED, S.ENDING, S.RANK_0_LOST, S.SELF_HANDLED, S.OVER),
    S.REPORTED: (S.ENDING, S.RANK_0_LOST),
    S.RANK_0_LOST: (S.ENDING, S.CLEANING, S.OVER),
    S.ENDING: (S.CLEANING, S.OVER),
    S.SELF_HANDLED: (S.REPORTED, S.ENDING, S.CLEANING, S.OVER),
    S.CLEANING: (S.OVER,),
    S.OVER: (),
}
IGNORED: dict[State, tuple[State, ...]] = {  # events that come late, or are overruled
    S.REPORTED: (S.SELF_HANDLED, S.OVER),
    S.RANK_0_LOST: (S.REPORTED, S.SELF_HANDLED),
    S.SELF_HANDLED: (S.WORKING, S.RANK_0_LOST),
    S.ENDING: (S.RANK_0_LOST, S.SELF_HANDLED),
    S.CLEANING: (S.WORKING, S.REPORTED, S.RANK_0_LOST, S.ENDING, S.SELF_HANDLED),
    S.OVER: (S.WORKING, S.REPORTED, S.RANK_0_LOST, S.ENDING, S.SELF_HANDLED, S.CLEANING),
}


class Watcher(StateMachine[State, events.WatcherAction]):
    """Reports to the coordinator why its rank ends, and ends it when the coordinator decides so.

    Without a coordinator it assumes that its rank failed first, unless that has lost another rank, or its launcher may
    have ended it.
    """

    transitions = TRANSITIONS
    ignored = IGNORED

    def __init__(self, watched: protocol.WatchedRank, began_s: float) -> None:
        """Begin to watch at `began_s`, on the clock of handle()."""
        super().__init__(State.STARTING, began_s)
        self.watched = watched
        self.member: RankIdentity | None = None  # once the rank has joined its job
        self.gone = False  # the rank's process
        self.startup = StartupTimeout(watched, began_s)
        self._do(*self.startup.begin_watch())
        self._stack_lines: list[str] = []  # that faulthandler printed
        self._rank_reported = False  # the rank reported its failure itself
        self._decision: protocol.Decision | None = None  # what the rank has to do if it fails, once known
        self._undecided: Report | None = None  # a report without a decision
        self._no_coordinator = False  # there is none, or none any more
        self._rank_0_closed = False  # rank 0's node has closed the connection, so it can be reached
        self._job_finished = False  # in order
        self._waiting_for_job_end = False  # the rank waits, by its decision
        self._kill_scheduled = False  # the rank's grace has begun
        self._script_ended = False

    def handle(self, event: events.WatcherEvent, now_s: float) -> list[events.WatcherAction]:
        """Return the actions for an event at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        match event:
            case events.FromRank(message):
                self._on_rank_message(message)
            case events.FromCoordinator(message):
                self._on_coordinator_message(message)
            case events.RankGone():
                self._on_rank_gone(event)
            case events.CoordinatorLost():
                self._on_coordinator_lost()
            case events.Rank0Lost(closed):
                self._on_rank_0_lost(closed)
            case events.NoCoordinator(error):
                self._no_coordinator = True
                if error:
                    self._print(f"the sentinel of {self.watched.name} has no coordinator: {error}")
            case events.StepDaemonGone():
                self._on_step_daemon_gone()
            case events.Observed(observation):
                self._do(events.ToCoordinator(observation))
            case events.Due(timer):
                self._on_due(timer)
            case _:
                assert_never(event)
        return self.take_actions()

    def _print(self, text: str) -> None:
        self._do(events.PrintLine(f"mpiddp: {text}"))

    def _on_rank_message(self, message: RankToSentinel | Text | Unreadable) -> None:
        match message:
            case protocol.Stage(name):
                self._do(*self.startup.begin_stage(name))
            case protocol.ChildStarted(pid):
                self._do(events.RecordChild(pid))
            case StackPipe() | QuerySocket() | RelaySocket() | protocol.ServeProbes() | protocol.StartCoordinator():
                self._do(events.CarryOut(message))
            case protocol.RegisterRank(member):
                self.member = member
                self._enter(S.WORKING)
                self._do(events.CarryOut(message), *self.startup.on_registered())
            case protocol.Failed(report):
                self._rank_reported = True
                self._report(report)
            case protocol.ReasonPrinted():
                self._on_reason_printed(message)
            case protocol.ScriptEnded():
                self._script_ended = True
                self._do(events.ToCoordinator(message))
            case protocol.CleanupDone() | protocol.QueryUnfinished():
                self._do(events.ToCoordinator(message))
            case protocol.LocallyHandled():
                self._enter(S.SELF_HANDLED)
            case protocol.Leave():
                if self.state is not S.CLEANING and self._enter(S.OVER):  # else the rank is gone already
                    self._do(WatcherCommand.LEAVE_JOB)
            case Text(line):
                self._stack_lines.append(line)
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _on_reason_printed(self, message: protocol.ReasonPrinted) -> None:
        """Write the record of this message, and pass the message on without it."""
        if message.record and self.member is not None:
            self._do(events.WriteRecord(self.member.error_file, message.record))
        if self._decision is not None:
            self._decision = self._decision._replace(verdict=None)
        self._do(events.ToCoordinator(protocol.ReasonPrinted(message.done)))

    def _on_coordinator_message(self, message: CoordinatorToSentinel | Text | Unreadable) -> None:
        match message:
            case protocol.Decision():
                self._take_decision(message)
            case protocol.JobEnds():
                self._end_rank(message)
            case protocol.UnfinishedRanks():
                self._do(events.ToRank(message))
            case protocol.QueryStopped() | SampleRequest() | ThreadsRequest():
                self._do(events.ObserveRank(message, self._script_ended))
            case protocol.WatchPeerProcess(rank, pid):
                self._do(events.WatchProcess(rank, pid))
            case protocol.JobFinished():
                self._job_finished = True
                if self.state is S.WORKING:
                    self._enter(S.SELF_HANDLED)
            case protocol.Admitted() | Text():
                pass
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _on_due(self, timer: str) -> None:
        match timer:
            case "late":
                self._do(*self.startup.on_due(timer, self._now_s))
            case "warn" | "start":
                self._do(*self.startup.on_due(timer, self._now_s))
                if self.startup.failed:
                    self._kill_scheduled = self._enter(S.SELF_HANDLED)
            case "decision":
                self._decide_alone()
            case "rank 0 lost":
                self._end_without_coordinator()
            case "terminate":
                self._do(WatcherCommand.REQUEST_TERMINATION)
            case "kill":
                self._do(WatcherCommand.KILL)
            case "printed":
                self._do(events.ToCoordinator(protocol.ReasonPrinted()))
                self._finish()
            case "cancel":
                self._do(WatcherCommand.CANCEL_STEP)
                self._end_watch()

    def _report(self, report: Report) -> None:
        """Report to the coordinator why the rank ends, unless there is a decision already."""
        if not self.gone:
            self._do(WatcherCommand.RECORD_DESCENDANTS)
        if self._decision is not None:
            self._take_decision(self._decision)
            return
        self._undecided = report
        self._enter(S.REPORTED)
        if not self._no_coordinator:
            self._do(events.SetTimer("decision", DECISION_TIMEOUT_S),
                     events.ToCoordinator(protocol.Failed(report, self.gone)))
        elif self.gone or report.kind != ReportKind.SECONDARY:
            self._decide_alone()
        elif self.state is not S.RANK_0_LOST:  # the rank that failed first has asked the launcher to end the job
            self._do(events.SetTimer("decision", LAUNCHER_KILL_TIMEOUT_S))

    def _decide_alone(self) -> None:
        """Decide on a report without the coordinator."""
        if self._undecided is not None:
            is_secondary = self.gone and self._no_coordinator and is_maybe_secondary(self._undecided)
            verdict = None if is_secondary else RootCause(self._undecided)
            self._take_decision(self._decision or protocol.Decision(verdict, self._undecided.status, True))

    def _print_rank_0_lost(self, consequence: str = "") -> None:
        """Print once per node that rank 0 is lost; on rank 0's own node rank 1's sentinel prints it."""
        assert self.member
        state = "has ended unexpectedly" if self._rank_0_closed else f"cannot be reached from {self.member.host}"
        if self.watched.first_on_node or self.member.rank == 1:
            self._print(f"rank 0 {state}{consequence}")

    def _take_decision(self, decision: protocol.Decision) -> None:
        """Pass a decision on to the rank; if that has ended, do what the rank would have to do."""
        self._do(events.CancelTimer("decision"))
        self._decision, self._undecided, self._waiting_for_job_end = decision, None, not decision.abort
        self._enter(S.ENDING)
        if self.gone:
            self._clean_up()
        else:
            self._do(events.ToRank(decision))
            self._kill_in_time()

    def _end_rank(self, end: protocol.JobEnds) -> None:
        """End the rank because the job ends: ask it to end by itself, if it can, and kill it when its grace is over."""
        if self.state in (S.CLEANING, S.OVER):
            return
        self._enter(S.ENDING)
        if self._decision is None or self._decision.verdict is None:
            self._decision = protocol.Decision(None, end.status, end.abort)
        if self.gone:  # its report and this message have crossed
            self._take_decision(self._decision)
            return
        self._do(WatcherCommand.RECORD_DESCENDANTS)
        if end.abort and (end.waits or self._waiting_for_job_end or not self._rank_reported):
            self._do(events.ToRank(protocol.EndRank(end.status)), WatcherCommand.SIGNAL_END)
        if not self._rank_reported:
            self._do(WatcherCommand.REQUEST_FLUSH,
                     events.SetTimer("terminate", min(TERMINATION_DELAY_S, self._grace_s())))
        self._kill_in_time()

    def _on_coordinator_lost(self) -> None:
        """Decide alone from now on, also on a report that the coordinator has not answered."""
        self._no_coordinator = True
        is_own = self._undecided is not None and self._undecided.kind == ReportKind.ERROR
        if self._job_finished or self._decision is not None or self.gone or is_own:
            self._decide_alone()

    def _on_rank_0_lost(self, closed: bool) -> None:
        """Give the launcher time to end the rank, if rank 0 has ended in the middle of the job."""
        self._on_coordinator_lost()
        if self._job_finished or not self._enter(S.RANK_0_LOST):
            return
        self._rank_0_closed = closed
        self._do(events.SetTimer("rank 0 lost", LEAVE_TIMEOUT_S if self._script_ended else LAUNCHER_KILL_TIMEOUT_S))

    def _end_without_coordinator(self) -> None:
        """End the rank: rank 0 and its sentinel have ended, and the launcher has not ended this rank."""
        assert self.member
        if self.gone or self.state is not S.RANK_0_LOST:
            return
        self._print_rank_0_lost(f"; ending the ranks on {self.member.host}")
        self._end_rank(protocol.JobEnds(1, abort=True))
        self._decide_alone()

    def _on_rank_gone(self, event: events.RankGone) -> None:
        """Report on a rank that has ended, unless it has done so, and end its descendants."""
        self.gone = True
        self._do(*(events.CancelTimer(name) for name in ("start", "warn", "late", "terminate", "kill")))
        stack = extract_crash_stack(self._stack_lines)
        self._do(events.SendCrashStack(truncate_middle(stack, MAX_STACK_CHARS)))
        if self.state is S.STARTING:
            self._do(*self.startup.report_death(describe_early_death(event.status, event.out_of_memory)))
        if self.state is S.RANK_0_LOST and not self._script_ended:
            self._print_rank_0_lost()
        if self.state is S.WORKING and self.member is not None:
            self._report(truncate_report(make_death_report(self.member, event.status, event.out_of_memory, stack)))
        elif self.state is not S.REPORTED:
            self._clean_up()
        elif self._no_coordinator:
            self._decide_alone()

    def _on_step_daemon_gone(self) -> None:
        """Report it to the coordinator; if there is none yet, print it and end the rank: no other process does."""
        if self.state is not S.STARTING:
            self._do(events.ToCoordinator(protocol.StepDaemonLost()))
            return
        self._do(*self.startup.end_rank(STEP_DAEMON_KILLED))
        self._kill_scheduled = self._enter(S.SELF_HANDLED)

    def _clean_up(self) -> None:
        """Print the reason if it is not printed yet; then end the rank's descendants, and this process."""
        if not self._enter(S.CLEANING):
            return
        if self._decision is not None and self._decision.verdict is not None:
            error_file = self.member.error_file if self.member else ""
            after_s = self._now_s - self.startup.began_s
            self._do(events.ToCoordinator(protocol.ReasonPrinted(done=False)),
                     events.SetTimer("printed", LAUNCHER_FORWARDING_S),
                     events.PrintReason(self._decision.verdict, self.member, after_s, error_file))
        else:
            self._finish()

    def _finish(self) -> None:
        """Release the ranks that wait for this one."""
        self._do(events.ToCoordinator(protocol.CleanupDone()), WatcherCommand.END_OTHERS)
        if self.startup.failed:
            self._do(events.SetTimer("cancel", REPORTS_SPREAD_S))
        else:
            self._end_watch()

    def _end_watch(self) -> None:
        self._enter(S.OVER)
        self._do(WatcherCommand.CLEAN_UP)

    def _grace_s(self) -> float:
        return self.member.grace_s if self.member else HARD_GRACE_S

    def _kill_in_time(self) -> None:
        """Schedule the kill of the rank for the end of its grace, which begins now, unless it is scheduled."""
        if not self._kill_scheduled:
            self._kill_scheduled = True
            self._do(events.SetTimer("kill", self._grace_s() + FINAL_EXIT_TIMEOUT_S))
