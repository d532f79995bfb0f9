"""The logic of an agent, from the start of its rank to the rank's end.

No I/O, no clock: `Watcher.handle()` takes an event and returns actions, which `process.py` carries out.
"""

from __future__ import annotations

from typing import ClassVar

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
from .events import Record, WatcherCommand
from .protocol import FINAL_EXIT_TIMEOUT_S, LAUNCHER_KILL_TIMEOUT_S, CoordinatorToAgent, RankToAgent
from .startup_timeout import HARD_GRACE_S, REPORTS_SPREAD_S, StartupTimeout
from .state_machine import StateMachine

DECISION_TIMEOUT_S = 2.5  # for the coordinator
LEAVE_TIMEOUT_S = 60.0  # for a rank whose script has finished, if rank 0 may have left the job in order
TERMINATION_DELAY_S = 1.0  # from the request to flush until SIGTERM
NO_COORDINATOR_WARNING_S = 10.0  # until a rank without one is reported: rank 0 of a short job may have finished already


class Starting(Record):
    """The rank has not joined its job yet."""


class Working(Record):
    """The rank is a member of its job."""


class SelfHandled(Record):
    """The rank prints itself why it ends, or the job has finished."""


class AwaitingDecision(Record):
    """The rank's failure is reported to the coordinator, which decides."""

    report: Report


class AwaitingLauncher(Record):
    """Rank 0 has ended (`closed`) or is unreachable, so the launcher may end the job. This rank may have failed too."""

    closed: bool
    report: Report | None


class Ending(Record):
    """The rank ends, or has to. If it fails, it follows `decision`; `is_sent`: it has got that."""

    decision: protocol.EndDecision
    is_sent: bool


class Over(Record):
    """The rank has left its job, or has ended; at most its descendants are still to be ended."""


Phase = Starting | Working | SelfHandled | AwaitingDecision | AwaitingLauncher | Ending | Over


class Watcher(StateMachine[Phase, events.WatcherAction]):
    """Reports to the coordinator why its rank ends, and ends it when the coordinator decides so.

    Without a coordinator it assumes that its rank failed first, unless that has lost another rank, or its launcher may
    have ended it.
    """

    transitions: ClassVar = {
        Starting: ((Working, SelfHandled, AwaitingDecision, Ending, Over), ()),
        Working: ((SelfHandled, AwaitingDecision, AwaitingLauncher, Ending, Over), ()),
        SelfHandled: ((AwaitingDecision, Ending, Over), (Working, AwaitingLauncher)),
        AwaitingDecision: ((AwaitingLauncher, Ending), (SelfHandled, Over)),
        AwaitingLauncher: ((Ending, Over), (SelfHandled,)),
        Ending: ((Over,), (SelfHandled, AwaitingLauncher)),
        Over: ((), (Working, SelfHandled, AwaitingDecision, AwaitingLauncher, Ending)),
    }

    def __init__(self, watched: protocol.WatchedRank, began_s: float) -> None:
        """Begin to watch at `began_s`, on the clock of handle()."""
        super().__init__(Starting(), began_s)
        self.watched = watched
        self.member: RankIdentity | None = None  # once the rank has joined its job
        self.gone = False  # the rank's process
        self.startup = StartupTimeout(watched, began_s)
        self._do(*self.startup.begin_watch())
        self._stack_lines: list[str] = []  # that faulthandler printed
        self._script_ended = False
        self._rank_reported = False  # the rank reported its failure itself
        self._admitted = False  # the coordinator has answered
        self._no_coordinator = False  # there is none, or none any more
        self._connect_error = ""  # why it could not be reached, until that is printed
        self._job_finished = False  # in order

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
                self._on_no_coordinator(error)
            case events.StepDaemonGone():
                self._on_step_daemon_gone()
            case events.Observed(observation):
                self._do(events.ToCoordinator(observation))
            case events.Due(timer):
                self._on_due(timer)
            case _:
                assert_never(event)
        return self.take_actions()

    def _on_rank_message(self, message: RankToAgent | Text | Unreadable) -> None:
        match message:
            case protocol.Stage(name):
                self._do(*self.startup.begin_stage(name))
            case protocol.ChildStarted(pid):
                self._do(events.RecordChild(pid))
            case StackPipe() | QuerySocket() | RelaySocket() | protocol.ServeProbes() | protocol.StartCoordinator():
                self._do(events.CarryOut(message))
            case protocol.RegisterRank(member):
                self.member = member
                self._enter(Working())
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
                self._enter(SelfHandled())
            case protocol.Leave():
                if self._enter(Over()):
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
        if isinstance(self.phase, Ending):
            self._enter(Ending(self.phase.decision._replace(verdict=None), self.phase.is_sent))
        self._do(events.ToCoordinator(protocol.ReasonPrinted(message.done)))

    def _on_coordinator_message(self, message: CoordinatorToAgent | Text | Unreadable) -> None:
        match message:
            case protocol.EndDecision():
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
                if isinstance(self.phase, Working):
                    self._enter(SelfHandled())
            case protocol.Admitted():
                self._admitted = True
                self._do(events.ToRank(protocol.RegistrationDone()))
            case Text():
                pass
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _on_due(self, timer: str) -> None:
        match timer:
            case "late" | "warn" | "start":
                self._do(*self.startup.on_due(timer, self._now_s))
                if self.startup.failed:
                    self._enter(SelfHandled())
            case "decision":
                if self.member and self.member.rank != 0 and not (self._admitted or self._no_coordinator):
                    self._connect_error = f"no answer within {DECISION_TIMEOUT_S} s"
                self._decide_alone()
            case "no coordinator":
                if isinstance(self.phase, Working):
                    self._print_connect_error()
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
                self._do(WatcherCommand.CANCEL_STEP, WatcherCommand.CLEAN_UP)

    @property
    def _undecided(self) -> Report | None:
        """The rank's report, if there is no decision yet."""
        return self.phase.report if isinstance(self.phase, (AwaitingDecision, AwaitingLauncher)) else None

    def _report(self, report: Report) -> None:
        """Report to the coordinator why the rank ends, unless there is a decision already."""
        if not self.gone:
            self._do(WatcherCommand.RECORD_DESCENDANTS)
        match self.phase:
            case Ending(decision):
                self._take_decision(decision)
                return
            case AwaitingLauncher(closed):
                self._enter(AwaitingLauncher(closed, report))
            case _:
                self._enter(AwaitingDecision(report))
        if not self._no_coordinator:
            self._do(events.SetTimer("decision", DECISION_TIMEOUT_S),
                     events.ToCoordinator(protocol.Failed(report, self.gone)))
        elif self.gone or report.kind != ReportKind.SECONDARY:
            self._decide_alone()
        elif isinstance(self.phase, AwaitingDecision):  # the rank that failed first has asked the launcher to end all
            self._do(events.SetTimer("decision", LAUNCHER_KILL_TIMEOUT_S))

    def _decide_alone(self) -> None:
        """Decide on a report without the coordinator; pass on a decision that the rank waits for."""
        if (report := self._undecided) is not None:
            is_secondary = self.gone and self._no_coordinator and is_maybe_secondary(report)
            verdict = None if is_secondary else RootCause(report)
            if verdict:
                self._print_connect_error()
            self._take_decision(protocol.EndDecision(verdict, report.status, abort=True))
        elif isinstance(self.phase, Ending) and self._rank_reported and not self.phase.is_sent:
            self._take_decision(self.phase.decision)

    def _on_no_coordinator(self, error: str) -> None:
        self._no_coordinator, self._connect_error = True, error
        self._do(events.ToRank(protocol.RegistrationDone()))
        if error and isinstance(self.phase, Working):
            self._do(events.SetTimer("no coordinator", NO_COORDINATOR_WARNING_S))

    def _print_connect_error(self) -> None:
        """Print once why the agent has no coordinator; several ranks may then be reported as the first to fail."""
        if self._connect_error:
            self._do(events.PrintLine(
                f"mpiddp: the agent of {self.watched.name} has no coordinator: {self._connect_error}"))
            self._connect_error = ""

    def _take_decision(self, decision: protocol.EndDecision) -> None:
        """Pass a decision on to the rank; if that has ended, do what the rank would have to do."""
        self._do(events.CancelTimer("decision"))
        self._begin_end(decision, is_sent=True)
        if self.gone:
            self._clean_up()
        else:
            self._do(events.ToRank(decision))

    def _begin_end(self, decision: protocol.EndDecision, is_sent: bool) -> None:
        """Begin the rank's grace, after which it is killed, unless it has begun or the rank's start has failed."""
        if self._enter(Ending(decision, is_sent)) and not (self.gone or self.startup.failed):
            self._do(events.SetTimer("kill", self._grace_s() + FINAL_EXIT_TIMEOUT_S))

    def _end_rank(self, end: protocol.JobEnds) -> None:
        """End the rank because the job ends: ask it to end by itself, if it can, and kill it when its grace is over."""
        decision, is_sent, waits = protocol.EndDecision(None, end.status, end.abort), False, end.waits
        match self.phase:
            case Over():
                return
            case AwaitingDecision() if self.gone:  # its report and this message have crossed
                self._take_decision(decision)
                return
            case Ending(earlier, is_sent=True):
                decision, is_sent, waits = earlier, True, waits or not earlier.abort
        self._begin_end(decision, is_sent)
        self._do(WatcherCommand.RECORD_DESCENDANTS)
        if end.abort and (waits or not self._rank_reported):
            self._do(events.ToRank(protocol.EndRank(end.status)), WatcherCommand.SIGNAL_END)
        if not self._rank_reported:
            self._do(WatcherCommand.REQUEST_FLUSH,
                     events.SetTimer("terminate", min(TERMINATION_DELAY_S, self._grace_s())))

    def _on_coordinator_lost(self) -> None:
        """Decide alone from now on, also on a report that the coordinator has not answered."""
        self._no_coordinator = True
        report = self._undecided
        if self._job_finished or self.gone or report is None or report.kind == ReportKind.ERROR:
            self._decide_alone()

    def _on_rank_0_lost(self, closed: bool) -> None:
        """Give the launcher time to end the rank, if rank 0 has ended in the middle of the job."""
        self._on_coordinator_lost()
        if not self._job_finished and self._enter(AwaitingLauncher(closed, self._undecided)):
            self._do(events.SetTimer("rank 0 lost", LEAVE_TIMEOUT_S if self._script_ended else LAUNCHER_KILL_TIMEOUT_S))

    def _end_without_coordinator(self) -> None:
        """End the rank: rank 0 and its agent have ended, and the launcher has not ended this rank."""
        if isinstance(self.phase, AwaitingLauncher):
            assert self.member
            self._print_rank_0_lost(self.phase.closed, f"; ending the ranks on {self.member.host}")
            self._end_rank(protocol.JobEnds(1, abort=True))
            self._decide_alone()

    def _print_rank_0_lost(self, closed: bool, consequence: str = "") -> None:
        """Print once per node that rank 0 is lost; on rank 0's own node rank 1's agent prints it."""
        assert self.member
        loss = "has ended unexpectedly" if closed else f"cannot be reached from {self.member.host}"
        if self.watched.first_on_node or self.member.rank == 1:
            self._do(events.PrintLine(f"mpiddp: rank 0 {loss}{consequence}"))

    def _on_rank_gone(self, event: events.RankGone) -> None:
        """Report on a rank that has ended, unless it has done so, and end its descendants."""
        self.gone = True
        timers = ("start", "warn", "late", "no coordinator", "terminate", "kill")
        self._do(*(events.CancelTimer(name) for name in timers))
        stack = extract_crash_stack(self._stack_lines)
        self._do(events.SendCrashStack(truncate_middle(stack, MAX_STACK_CHARS)))
        match self.phase:
            case Working():
                assert self.member
                self._report(truncate_report(make_death_report(self.member, event.status, event.out_of_memory, stack)))
                return
            case AwaitingDecision():
                if self._no_coordinator:
                    self._decide_alone()
                return
            case Starting():
                self._do(*self.startup.report_death(describe_early_death(event.status, event.out_of_memory)))
            case AwaitingLauncher(closed) if not self._script_ended:
                self._print_rank_0_lost(closed)
        self._clean_up()

    def _on_step_daemon_gone(self) -> None:
        """Report it to the coordinator; if there is none yet, print it and end the rank: no other process does."""
        if isinstance(self.phase, Starting):
            self._do(*self.startup.end_rank(STEP_DAEMON_KILLED))
            self._enter(SelfHandled())
        else:
            self._do(events.ToCoordinator(protocol.StepDaemonLost()))

    def _clean_up(self) -> None:
        """Print the reason if it is not printed yet; then end the rank's descendants, and this process."""
        verdict = self.phase.decision.verdict if isinstance(self.phase, Ending) else None
        if not self._enter(Over()):
            return
        if verdict is not None:
            error_file = self.member.error_file if self.member else ""
            after_s = self._now_s - self.startup.began_s
            self._do(events.ToCoordinator(protocol.ReasonPrinted(done=False)),
                     events.SetTimer("printed", LAUNCHER_FORWARDING_S),
                     events.PrintReason(verdict, self.member, after_s, error_file))
        else:
            self._finish()

    def _finish(self) -> None:
        """Release the ranks that wait for this one."""
        self._do(events.ToCoordinator(protocol.CleanupDone()), WatcherCommand.END_OTHERS,
                 events.SetTimer("cancel", REPORTS_SPREAD_S) if self.startup.failed else WatcherCommand.CLEAN_UP)

    def _grace_s(self) -> float:
        return self.member.grace_s if self.member else HARD_GRACE_S
