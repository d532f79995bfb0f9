"""The logic of an agent, from the start of its rank to its own end.

No I/O, no clock: `Watcher.handle()` takes an event and returns actions, which `process.py` carries out.
"""

from __future__ import annotations

import signal
from typing import ClassVar

from ..base.errors import assert_never
from ..base.ranks import RankIdentity
from ..base.text import truncate_middle
from ..failure.postmortem import describe_early_death, extract_crash_stack, is_maybe_secondary, make_death_report
from ..failure.root_cause import MAX_STACK_CHARS, STEP_DAEMON_KILLED, Report, ReportKind, RootCause, truncate_report
from ..ipc.channel import Unreadable
from ..output.protocol import ForwardConfig, ShowText
from ..systems.statuses import EXIT_CANNOT_START, EXIT_OUTPUT_LOST, wait_status_to_shell
from ..where.protocol import SampleRequest, SnapshotRequest, ThreadsRequest
from . import events, protocol
from .events import AgentCommand, Record
from .protocol import CoordinatorToAgent, RankToAgent
from .startup_timeout import StartupTimeout
from .state_machine import StateMachine
from .timeouts import (
    ABORT_TIMEOUT_S,
    CLOSED_TIMEOUT_S,
    DECISION_TIMEOUT_S,
    FLUSH_TIMEOUT_S,
    HARD_GRACE_S,
    JOB_OVER_TIMEOUT_S,
    LOST_COORDINATOR_TIMEOUT_S,
    LOST_LAUNCHER_TIMEOUT_S,
    REPORTS_SPREAD_S,
    STACK_TIMEOUT_S,
)

LAUNCHER_GONE = "its launcher has ended"
LATE_WORDS = ", while it ended after the script"  # of a rank that died after it had left the job


class Starting(Record):
    """The rank has not joined its job yet."""


class Working(Record):
    """The rank is a member of its job."""


class Failing(Record):
    """The rank's failure is reported to the coordinator, which selects the root cause."""

    report: Report


class Ending(Record):
    """The job ends with this status: the rank is asked to end, and then ended."""

    status: int


class Leaving(Record):
    """The rank has left the job in order, or has vanished with status 0; it ends with this status."""

    status: int


class Over(Record):
    """The agent ends."""


Phase = Starting | Working | Failing | Ending | Leaving | Over


class Watcher(StateMachine[Phase, events.AgentAction]):
    """Reports to the coordinator why its rank ends, and ends it when the coordinator decides so."""

    transitions: ClassVar = {
        Starting: ((Working, Ending, Over), ()),
        Working: ((Failing, Ending, Leaving, Over), ()),
        Failing: ((Ending, Over), (Leaving,)),
        Ending: ((Over,), (Failing, Leaving)),
        Leaving: ((Failing, Ending, Over), ()),
        Over: ((), (Working, Failing, Ending, Leaving)),
    }

    def __init__(self, watched: protocol.WatchedRank, began_s: float) -> None:
        """Begin to watch at `began_s`, on the clock of handle()."""
        super().__init__(Starting(), began_s)
        self.watched = watched
        self.member: RankIdentity | None = None  # once the rank has joined its job
        self.gone = False  # the rank's process
        self.startup = StartupTimeout(watched, began_s)
        self._do(*self.startup.begin_watch())
        self._wait_status = 0  # of the rank that is gone
        self._end_status: int | None = None  # of the rank, once all that it started has ended, too
        self._over_status: int | None = None  # of the job, which is over before that
        self._finishing: int | None = None  # the status of the rank, of which only output may be missing
        self._root_cause: RootCause | None = None  # to be printed once the rank has printed its traceback
        self._has_printed = False  # or prints, the root cause
        self._is_signalled = False  # from outside
        self._is_closed = False  # the rank's connection, while its process lives
        self._all_finished: protocol.AllFinished | None = None
        self._is_explained = False  # the rank has printed itself why it ends
        self._script_ended = False
        self._reported_itself = False  # the rank has reported its failure, and cleans up
        self._can_abort = False  # the rank waits for `Abort`
        self._is_aborted = False  # a rank has called MPI_Abort
        self._admitted = False  # the coordinator has answered
        self._is_alone = False  # there is no coordinator any more
        self._is_orphan = False  # the launcher has ended
        self._killed_by = 0  # the signal from outside after which the agent has killed the rank

    def handle(self, event: events.AgentEvent, now_s: float) -> list[events.AgentAction]:
        """Return the actions for an event at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        match event:
            case events.FromRank(message):
                self._on_rank_message(message)
            case events.FromCoordinator(message):
                self._on_coordinator_message(message)
            case events.RankClosed():
                self._do(events.SetTimer("closed", CLOSED_TIMEOUT_S))
            case events.RankGone():
                self._on_rank_gone(event)
            case events.DescendantsGone():
                self._finish(wait_status_to_shell(self._wait_status))
            case events.OutputFinished(is_lost, log_lost):
                self._on_output_finished(is_lost, log_lost)
            case events.Signalled(number, unasked):
                self._on_signal(number, unasked)
            case events.CoordinatorLost(error):
                self._on_coordinator_lost(error)
            case events.StepDaemonGone():
                self._on_step_daemon_gone()
            case events.LauncherGone():
                self._is_orphan = True
                self._do(events.SetTimer("launcher gone", LOST_LAUNCHER_TIMEOUT_S))
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
                self._reported_itself = True
                self._report(report)
            case protocol.StackPrinted(stack):
                self._print_report(stack)
            case protocol.ScriptEnded():
                self._end_script(message)
            case protocol.ReadyToAbort():
                self._can_abort = True
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
                self._admitted = True
                self._do(events.ToRank(protocol.RegistrationDone()))
            case protocol.PrintReason(root_cause):
                self._print(root_cause)
            case protocol.JobEnds(status):
                self._end_rank(status)
            case protocol.AllFinished():
                self._all_finished = message
                self._do(events.ToRank(message))
            case protocol.JobOver(status, aborts=True):
                self._enter(Ending(status))
                self._do(events.SetTimer("job over", ABORT_TIMEOUT_S))
                self._is_aborted = True
            case protocol.JobOver(status) if isinstance(self.phase, Ending) and self.gone and self._end_status is None:
                self._over_status = status  # what the rank has started is still being ended
            case protocol.JobOver(status):
                self._exit(status)
            case protocol.Abort(status):
                self._do(events.ToRank(message), events.SetTimer("job over", ABORT_TIMEOUT_S))
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
                    self._report(Report(self.member.rank, self.member.host, ReportKind.ERROR,
                                        f"still in {self.startup.stage}", EXIT_CANNOT_START))
            case "closed" if isinstance(self.phase, Working):
                self._is_closed = True
                self._end_script(protocol.ScriptEnded(vanished=True))
            case "decision":
                self._on_coordinator_lost(f"no answer within {DECISION_TIMEOUT_S:g} s")
            case "coordinator lost":
                self._decide_alone()
            case "launcher gone":
                self._on_launcher_gone()
            case "stack":
                self._print_report()
            case "terminate":
                self._do(AgentCommand.END_RANK)
            case "grace":
                if self._reported_itself and self.member is not None:
                    self._do(events.PrintLine(f"mpiddp: ending {self.watched.name}: its cleanup took longer than "
                                              f"{self.member.grace_s:g} s (raise --abort-grace to allow more)"))
                self._do(events.SignalRank(signal.SIGKILL))
            case "kill":
                self._do(events.SignalRank(signal.SIGKILL), events.SetTimer("unkillable", JOB_OVER_TIMEOUT_S))
            case "unkillable" if isinstance(self.phase, Starting):  # a file system does not answer
                self._exit(self._start_status)
            case "launcher":
                self._killed_by = signal.SIGTERM
                self._do(events.SignalRank(signal.SIGKILL))
                if self.watched.has_own_group and self.member is not None:
                    self._do(events.KillGroup(self.member.pid))  # with what it has started
            case "cancel":
                self._do(AgentCommand.CANCEL_STEP)
                self._exit(self._start_status)
            case "job over":
                self._exit(self.phase.status if isinstance(self.phase, Ending) else 1)

    def _end_script(self, message: protocol.ScriptEnded) -> None:
        if not self._script_ended:
            self._script_ended = True
            self._do(events.ToCoordinator(message))
        elif self._all_finished is not None:  # a signal's handler has interrupted the rank as it took the answer
            self._do(events.ToRank(self._all_finished))

    def _report(self, report: Report) -> None:
        """Report to the coordinator why the rank ends; if the job ends already, the rank gets its status."""
        if not self._enter(Failing(report)):
            if isinstance(self.phase, Ending) and not self.gone:
                self._do(events.ToRank(protocol.JobEnds(self.phase.status)))
        elif self._is_alone:
            self._decide_alone()
        else:
            self._do(events.ToCoordinator(protocol.Failed(report)), events.SetTimer("decision", DECISION_TIMEOUT_S))

    def _print(self, root_cause: RootCause) -> None:
        """Print the report of this rank, after its traceback, unless the rank has printed itself why it ends."""
        if self._has_printed:
            return
        self._has_printed = True
        if self._is_explained:
            self._on_printed()
            return
        self._root_cause = root_cause
        if self._reported_itself and not self.gone:
            self._do(events.ToRank(protocol.PrintStack()), events.SetTimer("stack", STACK_TIMEOUT_S))
        else:
            self._print_report()

    def _print_report(self, stack: str = "") -> None:
        """Print the report, if it is not printed yet; the rank has printed a traceback with its `stack`."""
        root_cause, self._root_cause = self._root_cause, None
        if root_cause is not None:
            assert self.member is not None
            after_s = self._now_s - self.startup.began_s
            self._do(events.CancelTimer("stack"), events.PrintReport(root_cause, self.member, after_s, stack))

    def _on_printed(self) -> None:
        """Tell the coordinator, which then ends the ranks; without one end this rank."""
        if self._is_alone and isinstance(self.phase, Failing):
            self._end_rank(self.phase.report.status)
        else:
            self._do(events.ToCoordinator(protocol.ReasonPrinted()))

    def _decide_alone(self) -> None:
        """End the rank without a decision of the coordinator, and print why, if it has failed by itself."""
        match self.phase:
            case Failing(report) if report.kind != ReportKind.SECONDARY:
                self._print(RootCause(report))
            case Failing() | Working():
                self._end_rank(1)

    def _end_rank(self, status: int) -> None:
        """End the rank because the job ends: it may clean up if it has failed itself, or handles SIGTERM."""
        has_left = isinstance(self.phase, Leaving)
        if not self._enter(Ending(status)):
            return
        self._end_status = self._finishing = None
        grace_s = self.member.grace_s if self.member is not None else HARD_GRACE_S
        self._do(events.CancelTimer("decision"), events.SetTimer("job over", grace_s + JOB_OVER_TIMEOUT_S))
        if self.gone:
            self._do(AgentCommand.END_DESCENDANTS)
            return
        self._do(AgentCommand.RECORD_SEGMENTS, events.ToRank(protocol.JobEnds(status)),
                 events.SetTimer("grace", grace_s))
        if not self._reported_itself and not has_left:
            self._do(AgentCommand.REQUEST_END, events.SetTimer("terminate", min(FLUSH_TIMEOUT_S, grace_s)))

    def _on_rank_gone(self, event: events.RankGone) -> None:
        """Report how the rank has ended, unless that is known; in a job that ends, end what it has started."""
        self.gone, self._wait_status = True, event.status
        self._do(*(events.CancelTimer(name) for name in ("start", "warn", "late", "closed", "terminate", "grace",
                                                         "kill", "launcher")))
        self._print_report()
        stack = truncate_middle(extract_crash_stack(event.stack.splitlines()), MAX_STACK_CHARS)
        match self.phase:
            case Starting():
                self._on_start_failed(event)
            case Working() if event.status == 0:
                self._end_script(protocol.ScriptEnded(vanished=True))
                self._enter(Leaving(0))
                self._finish(0)
            case Working():
                self._report_death(event, stack)
            case Leaving(status):
                if event.status & 0x7F:
                    self._report_death(event, stack, LATE_WORDS)
                else:
                    self._finish(status or wait_status_to_shell(event.status))
            case Failing() if self._is_alone and not self._has_printed:
                self._decide_alone()
            case Ending() if not self._can_abort:
                self._do(AgentCommand.END_DESCENDANTS)
            case Ending(status):  # by MPI_Abort
                self._exit(status)

    def _report_death(self, event: events.RankGone, stack: str, when: str = "") -> None:
        if self._is_orphan and not event.status & 0x7F:  # PMIx ends a rank that has lost its launcher
            self._on_launcher_gone()
            return
        assert self.member is not None
        status = self._killed_by if self._killed_by and event.status == signal.SIGKILL else event.status
        report = make_death_report(self.member, status, event.out_of_memory, stack)
        if self._is_closed and not report.signal:
            report = report._replace(cause=f"exited with status {report.status}; it had closed mpiddp's connection")
        self._report(truncate_report(report._replace(cause=report.cause + when)))

    def _on_start_failed(self, event: events.RankGone) -> None:
        """End with the rank, which no other rank can know yet; let the other nodes' agents print what they see."""
        cause = "" if self._is_explained else describe_early_death(
            event.status, event.out_of_memory, self._is_signalled or self.startup.timed_out)
        self._do(*self.startup.report_death(cause))
        if self.startup.failed:
            self._do(events.SetTimer("cancel", REPORTS_SPREAD_S))
        else:
            self._exit(self._start_status)

    @property
    def _start_status(self) -> int:
        """The agent's status if its rank has not joined the job."""
        is_hidden = self._is_explained and not self._wait_status  # by a program that runs ours
        if self.startup.timed_out or is_hidden:
            return EXIT_CANNOT_START
        return wait_status_to_shell(self._wait_status)

    def _finish(self, status: int) -> None:
        """Forward the rest of the output of the rank, which has ended with a status."""
        if not isinstance(self.phase, Over):
            self._finishing = status
            self._do(AgentCommand.FINISH_OUTPUT)

    def _on_output_finished(self, is_lost: bool, log_lost: bool) -> None:
        """Tell the coordinator that the rank has ended; without one, or once the job is over, this agent ends, too."""
        if self._finishing is None:
            return
        self._end_status = status = self._finishing or (EXIT_OUTPUT_LOST if is_lost else 0)
        if self._over_status is not None:
            self._exit(self._over_status)
        elif self._is_alone:
            self._exit(self.phase.status if isinstance(self.phase, Ending) else status)
        elif not isinstance(self.phase, Over):
            can_abort = self._can_abort and not self.gone
            self._do(events.ToCoordinator(protocol.RankEnded(status, can_abort, log_lost)))

    def _exit(self, status: int) -> None:
        if self._enter(Over()):
            if not self.gone:
                self._do(events.SignalRank(signal.SIGKILL))
            self._do(events.Exit(status))

    def _on_signal(self, number: int, unasked: bool) -> None:
        """Pass on a signal from outside: to the coordinator, which has to know, and to a rank that it has not reached.

        A terminal sends SIGINT to both; no other signal reaches a rank that nobody has launched.
        Shortly before the launcher kills this agent, the agent ends the rank and what that has started.
        """
        self._is_signalled = True
        if self._is_aborted and isinstance(self.phase, Ending):
            self._exit(self.phase.status)
            return
        if number == signal.SIGQUIT:
            self._do(events.ToCoordinator(SnapshotRequest()))
            return
        if self.member is not None:
            self._do(events.ToCoordinator(protocol.Signalled(number)))
            if unasked:
                self._do(events.ToCoordinator(protocol.UnaskedStop(number)))
        is_launched = self.watched.by_srun or self.watched.launcher_pid
        if not self.gone and (self.watched.has_own_group or (not is_launched and number != signal.SIGINT)):
            self._do(events.SignalRank(number))
        if number == signal.SIGTERM and self.watched.kill_delay_s:
            self._do(events.SetTimer("launcher", self.watched.kill_delay_s))

    def _on_coordinator_lost(self, error: str) -> None:
        """End the rank: nobody agrees on the job's end any more.

        First the launcher has time to do it, unless the rank has failed by itself: then that is printed.
        """
        if self._is_alone:
            return
        self._is_alone = True
        match self.phase:
            case Ending() | Leaving() if self._end_status is not None:
                if isinstance(self.phase, Leaving):
                    self._print_loss(error)
                self._finish(self._end_status)
            case Working() | Failing():
                self._print_loss(error)
                if isinstance(self.phase, Failing) and not is_maybe_secondary(self.phase.report):
                    self._decide_alone()
                elif self._admitted:
                    self._do(events.SetTimer("coordinator lost", LOST_COORDINATOR_TIMEOUT_S))
                else:
                    self._end_rank(EXIT_CANNOT_START)

    def _print_loss(self, error: str) -> None:
        """Print why there is no coordinator; once for a node if it was there."""
        assert self.member is not None
        if not self._admitted:
            self._do(events.PrintLine(f"mpiddp: the agent of {self.watched.name} has no coordinator: {error}"))
        elif self.watched.first_on_node or self.member.rank == 1:  # on rank 0's own node
            self._do(events.PrintLine(f"mpiddp: {error}; ending the ranks on {self.member.host}"))

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
            self._report(Report(self.member.rank, self.member.host, ReportKind.UNREACHABLE, LAUNCHER_GONE, 1))
