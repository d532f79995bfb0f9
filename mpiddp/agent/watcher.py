"""The logic of an agent, from the start of its rank to its own end.

No I/O, no clock: `Watcher.handle()` takes an event and returns actions, which `process.py` carries out.
"""

from __future__ import annotations

import enum
import signal
from typing import ClassVar

from ..base.errors import assert_never
from ..base.ranks import RankIdentity
from ..base.text import truncate_middle
from ..failure.postmortem import (
    describe_early_death,
    extract_crash_stack,
    is_maybe_secondary,
    is_secondary,
    make_death_report,
)
from ..failure.root_cause import (
    KILL_SPREAD_S,
    MAX_STACK_CHARS,
    STEP_DAEMON_KILLED,
    Report,
    ReportKind,
    RootCause,
    make_loss_report,
    truncate_report,
)
from ..ipc.channel import Unreadable
from ..output.protocol import ForwardConfig, ShowText
from ..systems.statuses import EXIT_CANNOT_START, EXIT_OUTPUT_LOST, wait_status_to_shell
from ..where.protocol import SampleRequest, SnapshotRequest, ThreadsRequest
from . import events, protocol, timeouts
from .events import AgentCommand, Record
from .protocol import CoordinatorToAgent, RankToAgent
from .startup_timeout import StartupTimeout
from .state_machine import StateMachine

LAUNCHER_GONE = "its launcher has ended"
LATE_WORDS = ", while it ended after the script"  # of a rank that died after it had left the job


class RankState(enum.Enum):
    """The rank's process runs, cleans up after it has reported its failure, then waits for `Abort`, or has ended."""

    RUNS, CLEANS_UP, CAN_ABORT, GONE = range(4)


class Starting(Record):
    """The rank has not joined its job yet. `is_signalled`: from outside."""

    is_signalled: bool = False


class Working(Record):
    """The rank is a member of its job. `is_closed`: its connection, while its process lives."""

    is_closed: bool = False


class Failing(Record):
    """The rank's failure is reported to the coordinator, which selects the root cause."""

    report: Report


class Ending(Record):
    """The job ends with this status: the rank is asked to end, and then ended. `over`: all other ranks have ended."""

    status: int
    over: protocol.JobOver | None = None


class Leaving(Record):
    """The rank has left the job in order, or has vanished with status 0; it ends with this status."""

    status: int


class Over(Record):
    """The agent ends."""


Phase = Starting | Working | Failing | Ending | Leaving | Over


class Watcher(StateMachine[Phase, events.AgentAction]):
    """Reports to the coordinator why its rank ends, and ends it when the coordinator decides so."""

    transitions: ClassVar = {
        Starting: ((Working, Over), ()),
        Working: ((Failing, Ending, Leaving, Over), ()),
        Failing: ((Ending, Over), (Leaving,)),
        Ending: ((Over,), (Failing, Leaving)),
        Leaving: ((Failing, Ending, Over), ()),
        Over: ((), ()),
    }

    def __init__(self, config: protocol.AgentConfig, began_s: float) -> None:
        """Begin to watch at `began_s`, on the clock of handle()."""
        super().__init__(Starting(), began_s)
        self.config = config
        self.member: RankIdentity | None = None  # once the rank has joined its job
        self.startup = StartupTimeout(config, began_s)
        self._do(*self.startup.begin())
        self._rank = RankState.RUNS
        self._wait_status = 0  # of the rank that is gone
        self._rank_status: int | None = None  # of the rank, once all that it started has ended, too
        self._is_forwarded = False  # their output, too
        self._is_explained = False  # it is printed already why the rank ends
        self._has_printed = False  # or prints, the root cause
        self._root_cause: RootCause | None = None  # to be printed once the rank has printed its traceback
        self._script_ended = False
        self._all_finished: protocol.AllFinished | None = None
        self._is_admitted = False  # by the coordinator
        self._deputises_for = ""  # rank 0's host, if this agent reports the loss of the coordinator
        self._is_alone = False  # there is no coordinator any more
        self._loss: Report | None = None  # of the coordinator that had admitted this rank
        self._loss_error = ""  # why that cannot be reached: other agents may learn it later
        self._is_orphan = False  # the launcher has ended
        self._is_killed_early = False  # by this agent, before the launcher does it

    def handle(self, event: events.AgentEvent, now_s: float) -> list[events.AgentAction]:
        """Return the actions for an event at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        if isinstance(self.phase, Over):
            return []
        match event:
            case events.FromRank(message):
                self._on_rank_message(message)
            case events.FromCoordinator(message):
                self._on_coordinator_message(message)
            case events.RankClosed():
                self._do(events.SetTimer("closed", timeouts.CLOSED_TIMEOUT_S))
            case events.RankGone():
                self._on_rank_gone(event)
            case events.DescendantsGone():
                self._finish_output(wait_status_to_shell(self._wait_status))
            case events.OutputFinished():
                self._on_output_finished(event)
            case events.Signalled(number, unasked):
                self._on_signal(number, unasked)
            case events.CoordinatorLost(error):
                self._on_coordinator_lost(error)
            case events.StepDaemonGone():
                self._on_step_daemon_gone()
            case events.LauncherGone():
                self._is_orphan = True
                self._do(events.SetTimer("launcher gone", timeouts.LOST_LAUNCHER_TIMEOUT_S))
            case events.Printed():
                self._on_printed()
            case events.Due(timer):
                self._on_due(timer)
            case _:
                assert_never(event)
        return self.take_actions()

    def _on_rank_message(self, message: RankToAgent | Unreadable) -> None:
        match message:
            case protocol.Stage(name):
                self._do(*self.startup.begin_stage(name))
            case (protocol.MpiSocket() | protocol.ServeProbes() | protocol.StartCoordinator() | ForwardConfig()
                  | ShowText()):
                self._do(events.CarryOut(message))
            case protocol.RegisterRank(member):
                self.member = member
                if self._enter(Working()):
                    self._do(AgentCommand.RECORD_SEGMENTS, events.CarryOut(message), *self.startup.on_registered())
            case protocol.LocallyHandled():
                self._is_explained = True
            case protocol.Failed(report):
                self._rank = RankState.CLEANS_UP
                self._report_failure(report)
            case protocol.StackPrinted(stack):
                self._print_report(stack)
            case protocol.ScriptEnded():
                self._report_script_end(message)
            case protocol.ReadyToAbort():
                self._rank = RankState.CAN_ABORT
                self._do(events.CancelTimer("grace"), AgentCommand.END_DESCENDANTS)
            case protocol.Leave(status):
                self._enter(Leaving(status))
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _on_coordinator_message(self, message: CoordinatorToAgent | Unreadable) -> None:
        match message:
            case protocol.Admitted():
                self._is_admitted = True
                self._do(events.ToRank(protocol.RegistrationDone()))
            case protocol.Deputy(host):
                self._deputises_for = host
            case protocol.PrintReason(root_cause):
                self._print_root_cause(root_cause)
            case protocol.JobEnds(status):
                self._end_rank(status)
            case protocol.AllFinished():
                self._all_finished = message
                self._do(events.ToRank(message))
            case protocol.JobOver(status, aborts=True):
                self._enter(Ending(status, message))
                self._await_abort()
            case protocol.JobOver(status) if (isinstance(self.phase, Ending) and self._rank is RankState.GONE
                                              and not self._is_forwarded):
                self._enter(Ending(status, message))  # what the rank has started is still being ended
            case protocol.JobOver(status):
                self._exit(status)
            case protocol.Abort(status):
                self._do(events.ToRank(message))
                self._await_abort()
            case protocol.KillGroup(group):
                self._do(events.KillGroup(group))
            case protocol.QueryStopped() | SampleRequest() | ThreadsRequest():
                self._do(events.ObserveRank(message, self._script_ended))
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _on_due(self, timer: str) -> None:
        match timer:
            case "late" | "warn" | "start" if isinstance(self.phase, (Starting, Working)):
                self._do(*self.startup.on_due(timer, self._now_s))
                if self.startup.timed_out and self.member is not None:
                    self._is_explained = True
                    self._report_failure(Report(self.member.rank, self.member.host, ReportKind.ERROR,
                                        f"still in {self.startup.stage}", EXIT_CANNOT_START))
            case "closed" if isinstance(self.phase, Working):
                self._enter(Working(is_closed=True))
                self._report_script_end(protocol.ScriptEnded(vanished=True))
            case "decision":
                self._on_coordinator_lost(f"no answer within {timeouts.DECISION_TIMEOUT_S:g} s")
            case "coordinator lost":
                self._decide_alone()
            case "launcher gone":
                self._on_launcher_gone()
            case "report":
                self._print_report()
            case "terminate":
                self._do(AgentCommand.END_RANK)
            case "grace":
                if self._rank is RankState.CLEANS_UP and self.member is not None:
                    self._do(events.PrintLine(f"mpiddp: ending {self.config.name}: its cleanup took longer than "
                                              f"{self.member.grace_s:g} s (raise --abort-grace to allow more)"))
                self._do(events.SignalRank(signal.SIGKILL))
            case "kill":
                self._do(events.SignalRank(signal.SIGKILL), events.SetTimer("unkillable", timeouts.JOB_OVER_TIMEOUT_S))
            case "unkillable" if isinstance(self.phase, Starting):  # a file system does not answer
                self._exit(self._start_status)
            case "launcher":
                self._is_killed_early = True
                self._do(events.SignalRank(signal.SIGKILL))
                if self.config.has_own_group and self.member is not None:
                    self._do(events.KillGroup(self.member.pid))  # with what it has started
            case "cancel":
                self._do(AgentCommand.CANCEL_STEP)
                self._exit(self._start_status)
            case "job over" if isinstance(self.phase, Ending):
                if self._loss_error:
                    self._report_unreachable()
                self._exit(self.phase.status)

    def _await_abort(self) -> None:
        """Wait for the launcher to end this agent, because a rank calls MPI_Abort at the end of its grace at latest."""
        grace_s = self.member.grace_s if self.member is not None else 0.0
        self._do(events.SetTimer("job over", grace_s + timeouts.ABORT_TIMEOUT_S))

    def _report_script_end(self, message: protocol.ScriptEnded) -> None:
        if not self._script_ended:
            self._script_ended = True
            self._do(events.ToCoordinator(message))
        elif self._all_finished is not None:  # a signal's handler has interrupted the rank as it took the answer
            self._do(events.ToRank(self._all_finished))

    def _report_failure(self, report: Report) -> None:
        """Report to the coordinator why the rank ends; if the job ends already, the rank gets its status."""
        if not self._enter(Failing(report)):
            if isinstance(self.phase, Ending):
                self._do(events.ToRank(protocol.JobEnds(self.phase.status)))
        elif self._loss is not None:  # which may be the reason
            if self._root_cause is None:
                self._end_rank(self._loss.status)
        else:
            self._do(events.ToCoordinator(protocol.Failed(report)),
                     events.SetTimer("decision", timeouts.DECISION_TIMEOUT_S))

    def _print_root_cause(self, root_cause: RootCause) -> None:
        """Print the report of this rank, after its traceback, unless the rank has printed itself why it ends."""
        if self._has_printed:
            return
        self._has_printed = True
        if self._is_explained:
            self._on_printed()
            return
        self._root_cause = root_cause
        if self._rank is RankState.CLEANS_UP:
            self._do(events.ToRank(protocol.PrintStack()), events.SetTimer("report", timeouts.STACK_TIMEOUT_S))
        else:
            self._print_report()

    def _print_report(self, stack: str = "") -> None:
        """Print the report, if it is not printed yet; the rank has printed a traceback with its `stack`."""
        root_cause, self._root_cause = self._root_cause, None
        if root_cause is not None:
            assert self.member is not None
            after_s = self._now_s - self.startup.began_s
            self._do(events.CancelTimer("report"), events.PrintReport(root_cause, self.member, after_s, stack))

    def _on_printed(self) -> None:
        """Tell the coordinator, which then ends the ranks; without one end this rank if it has failed by itself."""
        match self.phase:
            case _ if not self._is_alone:
                self._do(events.ToCoordinator(protocol.ReasonPrinted()))
            case Failing(report) if self._has_printed:
                self._end_rank(report.status)
            case Failing() if self._loss is not None:
                self._end_rank(self._loss.status)
            case Leaving() if self._is_forwarded and self._loss is not None:
                self._exit(self._rank_status or self._loss.status)

    def _decide_alone(self) -> None:
        """End the rank without a decision of the coordinator, and print why, if it has failed by itself."""
        match self.phase:
            case Failing(report) if self._has_printed:
                self._end_rank(report.status)
            case Failing(report) if not (is_secondary(report) or self._deputises_for):
                self._print_root_cause(RootCause(report))
            case Failing() | Working() | Leaving() if self._loss is not None:
                self._end_rank(self._loss.status)

    def _end_rank(self, status: int) -> None:
        """End the rank because the job ends: it may clean up if it has failed itself, or handles SIGTERM."""
        has_left = isinstance(self.phase, Leaving)
        if not self._enter(Ending(status)):
            return
        assert self.member is not None
        self._rank_status, self._is_forwarded, grace_s = None, False, self.member.grace_s
        over_s = grace_s + timeouts.JOB_OVER_TIMEOUT_S
        if self._loss_error and not self._deputises_for:
            over_s += timeouts.DEPUTY_TIMEOUT_S
        self._do(events.CancelTimer("decision"), events.SetTimer("job over", over_s))
        if self._rank is RankState.GONE:
            self._do(AgentCommand.END_DESCENDANTS)
            return
        self._do(AgentCommand.RECORD_SEGMENTS, events.ToRank(protocol.JobEnds(status)),
                 events.SetTimer("grace", grace_s))
        if self._rank is RankState.RUNS and not has_left:
            self._do(AgentCommand.REQUEST_END, events.SetTimer("terminate", min(timeouts.FLUSH_TIMEOUT_S, grace_s)))

    def _on_rank_gone(self, event: events.RankGone) -> None:
        """Report how the rank has ended, unless that is known; in a job that ends, end what it has started."""
        can_abort = self._rank is RankState.CAN_ABORT
        self._rank, self._wait_status = RankState.GONE, event.status
        self._do(*(events.CancelTimer(name) for name in ("start", "warn", "late", "closed", "terminate", "grace",
                                                         "kill", "launcher")))
        if self._root_cause is None or self._root_cause.first is not self._loss:
            self._print_report()
        stack = truncate_middle(extract_crash_stack(event.stack.splitlines()), MAX_STACK_CHARS)
        match self.phase:
            case Starting(is_signalled):
                self._on_start_failed(event, is_signalled)
            case Working() if event.status == 0:
                self._report_script_end(protocol.ScriptEnded(vanished=True))
                self._enter(Leaving(0))
                self._finish_output(0)
            case Working():
                self._report_death(event, stack)
            case Leaving(status):
                if event.status & 0x7F:
                    self._report_death(event, stack, LATE_WORDS)
                else:
                    self._finish_output(status or wait_status_to_shell(event.status))
            case Failing() if self._is_alone and not self._has_printed:
                self._decide_alone()
            case Ending() if not can_abort:
                self._do(AgentCommand.END_DESCENDANTS)
            case Ending(status):  # by MPI_Abort
                self._exit(status)

    def _report_death(self, event: events.RankGone, stack: str, when: str = "") -> None:
        if self._is_orphan and not event.status & 0x7F:  # PMIx ends a rank that has lost its launcher
            self._on_launcher_gone()
            return
        assert self.member is not None
        status = signal.SIGTERM if self._is_killed_early and event.status == signal.SIGKILL else event.status
        report = make_death_report(self.member, status, event.out_of_memory, stack)
        if isinstance(self.phase, Working) and self.phase.is_closed and not report.signal:
            report = report._replace(cause=f"exited with status {report.status}; it had closed mpiddp's connection")
        self._report_failure(truncate_report(report._replace(cause=report.cause + when)))

    def _on_start_failed(self, event: events.RankGone, is_signalled: bool) -> None:
        """End with the rank, which no other rank can know yet; let the other nodes' agents print what they see."""
        cause = "" if self._is_explained else describe_early_death(
            event.status, event.out_of_memory, is_signalled or self.startup.timed_out)
        self._do(*self.startup.report_death(cause))
        if self.startup.failed:
            self._do(events.SetTimer("cancel", timeouts.REPORTS_SPREAD_S))
        else:
            self._exit(self._start_status)

    @property
    def _start_status(self) -> int:
        """The agent's status if its rank has not joined the job."""
        if self.startup.timed_out or (self._is_explained and not self._wait_status):  # by a program that runs ours
            return EXIT_CANNOT_START
        return wait_status_to_shell(self._wait_status)

    def _finish_output(self, status: int) -> None:
        """Forward the rest of the output of the rank, which has ended with a status."""
        self._rank_status = status
        self._do(AgentCommand.FINISH_OUTPUT)

    def _on_output_finished(self, event: events.OutputFinished) -> None:
        """Tell the coordinator that the rank has ended; without one, or once the job is over, this agent ends, too."""
        if self._rank_status is None:
            return
        self._is_forwarded = True
        self._rank_status = self._rank_status or (EXIT_OUTPUT_LOST if event.is_lost else 0)
        match self.phase:
            case Ending(status, over) if (self._is_alone and not self._loss_error) or (over and not over.aborts):
                self._exit(status)
            case Leaving() if self._is_alone and self._root_cause is None:
                self._exit(self._rank_status)
            case _ if self._is_alone:
                pass  # until "job over"
            case _:
                can_abort = self._rank is RankState.CAN_ABORT
                self._do(events.ToCoordinator(protocol.RankEnded(
                    self._rank_status, can_abort, event.log_lost, event.last_line)))

    def _exit(self, status: int) -> None:
        self._enter(Over())
        if self._loss_error and self._deputises_for:
            self._do(AgentCommand.CANCEL_STEP, AgentCommand.END_LAUNCHER)  # for nodes that cannot be reached
        if self._rank is not RankState.GONE:
            self._do(events.SignalRank(signal.SIGKILL))
        self._do(events.Exit(status))

    def _on_signal(self, number: int, unasked: bool) -> None:
        """Pass on a signal from outside: to the coordinator, which has to know, and to a rank that it has not reached.

        A terminal sends SIGINT to both; no other signal reaches a rank that nobody has launched.
        Shortly before the launcher kills this agent, the agent ends the rank and what that has started.
        """
        if isinstance(self.phase, Ending) and self.phase.over and self.phase.over.aborts:
            self._exit(self.phase.status)
            return
        if number == signal.SIGQUIT:
            self._do(events.ToCoordinator(SnapshotRequest()))
            return
        if isinstance(self.phase, Starting):
            self._enter(Starting(is_signalled=True))
        else:
            self._do(events.ToCoordinator(protocol.Signalled(number)))
            if unasked:
                self._do(events.ToCoordinator(protocol.UnaskedStop(number)))
        is_launched = self.config.by_srun or self.config.launcher_pid
        if self.config.has_own_group or (not is_launched and number != signal.SIGINT):
            self._do(events.SignalRank(number))
        if number == signal.SIGTERM and self.config.kill_delay_s:
            self._do(events.SetTimer("launcher", self.config.kill_delay_s))

    def _on_coordinator_lost(self, error: str) -> None:
        """End the rank: nobody agrees on the job's end any more.

        First the launcher has time to do it, unless the rank has failed by itself: then that is printed. If not, the
        deputy alone prints that rank 0 is lost.
        """
        if self._is_alone:
            return
        self._is_alone = True
        match self.phase:
            case Ending(status) if self._is_forwarded:
                self._exit(status)
            case Leaving() if self._is_forwarded and self._is_admitted and not self._deputises_for:
                self._exit(self._rank_status or 0)
            case Working() | Failing() | Leaving() if not self._is_admitted:
                self._do(events.PrintLine(f"mpiddp: the agent of {self.config.name} has no coordinator: "
                                          f"{error or 'it has ended'}"))
                if not self._print_own_failure():
                    self._end_rank(EXIT_CANNOT_START)
            case Working() | Failing() | Leaving():
                self._loss, self._loss_error = make_loss_report(0, self._deputises_for, error), error
                if self._print_own_failure():
                    return
                self._do(events.SetTimer("coordinator lost", timeouts.LOST_COORDINATOR_TIMEOUT_S))
                if self._deputises_for:
                    self._root_cause = RootCause(self._loss)
                    if self.config.by_srun and not error:
                        self._do(events.SetTimer("report", KILL_SPREAD_S))
                    else:
                        self._print_report()

    def _print_own_failure(self) -> bool:
        """Print the rank's report if the rank has failed by itself, and return whether it has; then end it."""
        if not isinstance(self.phase, Failing):
            return False
        if self._has_printed:
            self._end_rank(self.phase.report.status)
        elif not is_maybe_secondary(self.phase.report):
            self._print_root_cause(RootCause(self.phase.report, f"rank 0: {self._loss.cause}" if self._loss else ""))
        return self._has_printed

    def _report_unreachable(self) -> None:
        """Print, once for a node, that rank 0 cannot be reached, unless the deputy has ended the job before."""
        assert self.member is not None
        is_first = self.config.first_on_node or self.member.rank == 1  # on rank 0's own node
        if is_first and not (self._has_printed or self._deputises_for):
            self._do(events.PrintLine(f"mpiddp: rank 0 cannot be reached ({self._loss_error}); "
                                      f"ended the ranks on {self.member.host}"))

    def _on_step_daemon_gone(self) -> None:
        """Report it to the coordinator; if there is none yet, print it and end the rank: no other process does."""
        if isinstance(self.phase, Starting):
            self._do(*self.startup.end_rank(STEP_DAEMON_KILLED))
            self._is_explained = True
        else:
            self._do(events.ToCoordinator(protocol.StepDaemonLost()))

    def _on_launcher_gone(self) -> None:
        """End the job: nobody else ends it, or gets its output and status."""
        if isinstance(self.phase, Starting):
            self._exit(EXIT_CANNOT_START)
        elif isinstance(self.phase, (Working, Leaving)):
            assert self.member is not None
            self._report_failure(Report(self.member.rank, self.member.host, ReportKind.UNREACHABLE, LAUNCHER_GONE, 1))
