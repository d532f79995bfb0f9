"""The logic of an agent, in orders of events that few jobs have."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import ModuleType
from typing import get_args

import pytest

from mpiddp.agent import coordinator as coordinator_module
from mpiddp.agent import events
from mpiddp.agent import watcher as watcher_module
from mpiddp.agent.coordinator import Coordinator
from mpiddp.agent.events import AgentCommand
from mpiddp.agent.protocol import (
    Admitted,
    AgentConfig,
    AllFinished,
    Deputy,
    Failed,
    JobEnds,
    JobOver,
    Leave,
    LocallyHandled,
    PrintReason,
    PrintStack,
    RankEnded,
    ReasonPrinted,
    RegisterRank,
    RegistrationDone,
    ScriptEnded,
    Signalled,
    StackPrinted,
    Stage,
    StepDaemonLost,
    UnaskedStop,
)
from mpiddp.agent.startup_timeout import LATE_S, StartupTimeout
from mpiddp.agent.state_machine import StateMachine
from mpiddp.agent.timeouts import (
    ABORT_TIMEOUT_S,
    CLOSED_TIMEOUT_S,
    DECISION_TIMEOUT_S,
    DEPUTY_TIMEOUT_S,
    FLUSH_TIMEOUT_S,
    JOB_OVER_TIMEOUT_S,
    KILL_DELAY_S,
    LOST_COORDINATOR_TIMEOUT_S,
    LOST_LAUNCHER_TIMEOUT_S,
    REPORTS_SPREAD_S,
    STACK_TIMEOUT_S,
)
from mpiddp.agent.watcher import Ending, Failing, Leaving, Over, Watcher, Working
from mpiddp.failure.root_cause import KILL_SPREAD_S, Report, ReportKind, RootCause
from mpiddp.systems.launchers import describe_hang
from mpiddp.systems.statuses import EXIT_CANNOT_START
from mpiddp.where.protocol import SnapshotRequest
from tests.messages import message
from tests.test_protocol import member

CONFIG = AgentConfig("rank 1 on n0", False, None, list, False, 60.0, has_own_group=True, launcher_pid=1)
RAISED = Report(1, "n0", ReportKind.ERROR, "seven", 3)
LOST = RAISED._replace(kind=ReportKind.SECONDARY, cause="connection closed by peer")
JOINS = events.FromRank(RegisterRank(member(1), "127.0.0.1", 1, "token"))
END_OF_OUTPUT = events.OutputFinished(is_lost=False)
GRACE_S = member(1).grace_s


def join(config: AgentConfig = CONFIG) -> Watcher:
    """Return the watcher of a rank that has joined its job."""
    watcher = Watcher(config, 0.0)
    watcher.take_actions()
    watcher.handle(JOINS, 1.0)
    watcher.handle(events.FromCoordinator(Admitted()), 1.1)
    return watcher


@pytest.fixture
def watcher() -> Watcher:
    """Return the watcher of a rank that has joined its job."""
    return join()


def to_rank(actions: Sequence[events.AgentAction]) -> list[object]:
    """Return the messages to the rank among some actions."""
    return [action.message for action in actions if isinstance(action, events.ToRank)]


def to_coordinator(actions: Sequence[events.AgentAction]) -> list[object]:
    """Return the messages to the coordinator among some actions."""
    return [action.message for action in actions if isinstance(action, events.ToCoordinator)]


def printed(actions: Sequence[events.AgentAction]) -> list[object]:
    """Return the root causes that are printed, and the lines."""
    return [action.root_cause if isinstance(action, events.PrintReport) else action.text for action in actions
            if isinstance(action, (events.PrintReport, events.PrintLine))]


@pytest.mark.parametrize(("module", "machine"), [(watcher_module, Watcher), (coordinator_module, Coordinator)])
def test_every_phase_but_the_first_can_be_reached(module: ModuleType, machine: type[Watcher | Coordinator]) -> None:
    first, *others = get_args(module.Phase)
    assert list(machine.transitions) == [first, *others]
    assert {phase for allowed, _ in machine.transitions.values() for phase in allowed} == set(others)
    assert not any(set(allowed) & set(ignored) for allowed, ignored in machine.transitions.values())


@pytest.mark.parametrize("raises", [True, False])
def test_an_illegal_transition(raises: bool, watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateMachine, "raises", raises)
    watcher.handle(events.FromRank(Failed(LOST)), 1.5)
    if raises:
        with pytest.raises(AssertionError, match="illegal transition"):
            watcher.handle(JOINS, 2.0)
    else:
        assert watcher.handle(JOINS, 2.0) == [
            events.PrintLine("mpiddp: Watcher: illegal transition from Failing to Working")]
    assert watcher.phase == Failing(LOST)


# A failure


def test_a_failure_from_the_report_to_the_end(watcher: Watcher) -> None:
    """The agent of the rank that was first prints, after the rank's traceback."""
    reported = watcher.handle(events.FromRank(Failed(RAISED)), 2.0)
    assert to_coordinator(reported) == [Failed(RAISED)]
    assert events.SetTimer("decision", DECISION_TIMEOUT_S) in reported
    selected = watcher.handle(events.FromCoordinator(PrintReason(RootCause(RAISED))), 2.1)
    assert (to_rank(selected), printed(selected)) == ([PrintStack()], [])
    (_, report) = watcher.handle(events.FromRank(StackPrinted("stack")), 2.2)
    assert report == events.PrintReport(RootCause(RAISED), member(1), 2.2, "stack")
    assert to_coordinator(watcher.handle(events.Printed(), 2.2)) == [ReasonPrinted()]
    ending = watcher.handle(events.FromCoordinator(JobEnds(3)), 2.3)
    assert to_rank(ending) == [JobEnds(3)]
    assert events.SetTimer("grace", GRACE_S) in ending
    assert AgentCommand.REQUEST_END not in ending  # it cleans up
    assert AgentCommand.END_DESCENDANTS in watcher.handle(events.RankGone(3 << 8), 2.4)
    assert watcher.handle(events.DescendantsGone(), 2.5) == [AgentCommand.FINISH_OUTPUT]
    assert to_coordinator(watcher.handle(END_OF_OUTPUT, 2.5)) == [RankEnded(3)]
    assert watcher.handle(events.FromCoordinator(JobOver(3)), 2.6) == [events.Exit(3)]


def test_a_rank_that_prints_no_traceback_in_time(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(Failed(RAISED)), 2.0)
    selected = watcher.handle(events.FromCoordinator(PrintReason(RootCause(RAISED))), 2.1)
    assert events.SetTimer("report", STACK_TIMEOUT_S) in selected
    assert printed(watcher.handle(events.Due("report"), 4.1)) == [RootCause(RAISED)]
    assert printed(watcher.handle(events.FromRank(StackPrinted("late")), 4.2)) == []


@pytest.mark.parametrize("status", [signal.SIGSEGV, 7 << 8])
def test_a_rank_that_dies_is_reported_by_its_agent(status: int, watcher: Watcher) -> None:
    (failed,) = to_coordinator(watcher.handle(events.RankGone(int(status)), 2.0))
    assert isinstance(failed, Failed)
    assert failed.report.kind == ReportKind.PROCESS_EXIT
    assert failed.report.status == (139 if status == signal.SIGSEGV else 7)
    reason = RootCause(failed.report)
    assert printed(watcher.handle(events.FromCoordinator(PrintReason(reason)), 2.1)) == [reason]


def test_a_rank_that_has_printed_itself_why_it_ends(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(LocallyHandled()), 2.0)
    watcher.handle(events.FromRank(Failed(RAISED)), 2.0)
    selected = watcher.handle(events.FromCoordinator(PrintReason(RootCause(RAISED))), 2.1)
    assert selected == [events.ToCoordinator(ReasonPrinted())]


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_report_that_crosses_the_jobs_end_is_answered(ends_first: bool, watcher: Watcher) -> None:
    crossing: list[events.AgentEvent] = [events.FromCoordinator(JobEnds(7)), events.FromRank(Failed(LOST))]
    answers = [message for event in (crossing if ends_first else reversed(crossing))
               for message in to_rank(watcher.handle(event, 2.0))]
    assert answers[-1] == JobEnds(7)


def test_a_rank_that_does_not_end(watcher: Watcher) -> None:
    """It is asked, then ended as its handlers allow, then killed."""
    ending = watcher.handle(events.FromCoordinator(JobEnds(1)), 2.0)
    assert AgentCommand.REQUEST_END in ending
    assert events.SetTimer("terminate", FLUSH_TIMEOUT_S) in ending
    assert watcher.handle(events.Due("terminate"), 2.2) == [AgentCommand.END_RANK]
    assert watcher.handle(events.Due("grace"), 7.0) == [events.SignalRank(signal.SIGKILL)]


def test_a_cleanup_that_takes_too_long_is_named(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(Failed(RAISED)), 2.0)
    watcher.handle(events.FromCoordinator(JobEnds(3)), 2.1)
    line, killed = watcher.handle(events.Due("grace"), 7.1)
    assert isinstance(line, events.PrintLine)
    assert "cleanup took longer than 5 s" in line.text
    assert killed == events.SignalRank(signal.SIGKILL)


def test_the_job_is_over_while_descendants_still_end(watcher: Watcher) -> None:
    """Those of a rank that had finished before: the coordinator does not wait for them."""
    watcher.handle(events.RankGone(0), 2.0)
    watcher.handle(END_OF_OUTPUT, 2.0)
    assert AgentCommand.END_DESCENDANTS in watcher.handle(events.FromCoordinator(JobEnds(1)), 2.1)
    assert watcher.handle(events.FromCoordinator(JobOver(1)), 2.2) == []
    watcher.handle(events.DescendantsGone(), 2.3)
    assert watcher.handle(END_OF_OUTPUT, 2.4) == [events.Exit(1)]


def test_a_rank_is_killed_with_a_job_that_is_over(watcher: Watcher) -> None:
    watcher.handle(events.FromCoordinator(JobEnds(1)), 2.0)
    assert watcher.handle(events.FromCoordinator(JobOver(1)), 9.1) == [
        events.SignalRank(signal.SIGKILL), events.Exit(1)]
    assert watcher.handle(events.RankGone(signal.SIGKILL), 9.2) == []


@pytest.mark.parametrize("event", [events.Signalled(signal.SIGTERM), events.Due("job over")])
def test_the_agents_of_a_job_that_a_rank_ends_by_mpi_abort(event: events.AgentEvent, watcher: Watcher) -> None:
    """They wait for the launcher, which would else report their own end, but not for ever."""
    watcher.handle(events.FromCoordinator(JobEnds(7)), 2.0)
    watcher.handle(events.RankGone(signal.SIGKILL), 2.2)
    over = watcher.handle(events.FromCoordinator(JobOver(7, aborts=True)), 2.3)
    assert over == [events.SetTimer("job over", GRACE_S + ABORT_TIMEOUT_S)]
    watcher.handle(events.DescendantsGone(), 2.4)
    assert to_coordinator(watcher.handle(END_OF_OUTPUT, 2.5)) == [RankEnded(137)]
    assert watcher.handle(event, 2.6) == [events.Exit(7)]


# In order


def test_an_end_in_order(watcher: Watcher) -> None:
    assert to_coordinator(watcher.handle(events.FromRank(ScriptEnded(3)), 2.0)) == [ScriptEnded(3)]
    finished = AllFinished(3, complete=True)
    assert to_rank(watcher.handle(events.FromCoordinator(finished), 2.1)) == [finished]
    watcher.handle(events.FromRank(Leave(75)), 2.2)
    watcher.handle(events.RankGone(75 << 8), 2.3)
    assert to_coordinator(watcher.handle(END_OF_OUTPUT, 2.3)) == [RankEnded(75)]
    assert watcher.handle(events.FromCoordinator(JobOver(75)), 2.4) == [events.Exit(75)]


def test_a_rank_that_vanishes_counts_as_finished(watcher: Watcher) -> None:
    assert to_coordinator(watcher.handle(events.RankGone(0), 2.0)) == [ScriptEnded(vanished=True)]
    assert watcher.phase == Leaving(0)


def test_a_connection_that_closes_is_no_end_yet(watcher: Watcher) -> None:
    """The kernel closes it before the agent can learn that its rank was killed."""
    assert watcher.handle(events.RankClosed(), 2.0) == [events.SetTimer("closed", CLOSED_TIMEOUT_S)]
    dead = watcher.handle(events.RankGone(signal.SIGKILL), 2.001)
    assert events.CancelTimer("closed") in dead
    assert [type(message) for message in to_coordinator(dead)] == [Failed]


def test_a_rank_that_lives_on_without_its_connection_counts_as_finished(watcher: Watcher) -> None:
    watcher.handle(events.RankClosed(), 2.0)
    assert to_coordinator(watcher.handle(events.Due("closed"), 3.0)) == [ScriptEnded(vanished=True)]
    assert watcher.phase == Working(is_closed=True)
    (failed,) = to_coordinator(watcher.handle(events.RankGone(7 << 8), 4.0))
    assert isinstance(failed, Failed)
    assert failed.report.cause == "exited with status 7; it had closed mpiddp's connection"


def test_a_rank_that_crashes_after_it_has_left(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(Leave(0)), 2.0)
    (failed,) = to_coordinator(watcher.handle(events.RankGone(signal.SIGSEGV), 2.1))
    assert isinstance(failed, Failed)
    assert failed.report.cause.endswith(", while it ended after the script")


def test_a_rank_that_has_left_may_end_by_itself_in_a_job_that_fails(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(Leave(0)), 2.0)
    ending = watcher.handle(events.FromCoordinator(JobEnds(139)), 2.1)
    assert AgentCommand.REQUEST_END not in ending
    assert events.SetTimer("grace", GRACE_S) in ending


# Without a coordinator


def test_a_lost_coordinator_leaves_the_launcher_time(watcher: Watcher) -> None:
    assert watcher.handle(events.CoordinatorLost(""), 2.0) == [
        events.SetTimer("coordinator lost", LOST_COORDINATOR_TIMEOUT_S)]
    assert AgentCommand.REQUEST_END in watcher.handle(events.Due("coordinator lost"), 4.0)
    watcher.handle(events.RankGone(signal.SIGKILL), 4.1)
    watcher.handle(events.DescendantsGone(), 4.2)
    assert watcher.handle(END_OF_OUTPUT, 4.2) == [events.Exit(137)]


@pytest.mark.parametrize(("error", "cause", "status"), [
    ("", message("launch/agent_killed"), 137),
    ("No route to host", message("launch/node_unreachable", error="No route to host"), 1)])
@pytest.mark.parametrize("has_failed", [True, False])
def test_the_deputy_reports_a_lost_coordinator(
    error: str, cause: str, status: int, has_failed: bool, watcher: Watcher
) -> None:
    """Its own rank may have failed because of that. If others may not know it yet, their step is cancelled."""
    watcher.handle(events.FromCoordinator(Deputy("n9")), 1.5)
    if has_failed:
        watcher.handle(events.FromRank(Failed(LOST)), 1.6)
    lost = watcher.handle(events.CoordinatorLost(error), 2.0)
    assert printed(lost) == [RootCause(Report(0, "n9", ReportKind.UNREACHABLE, cause, status))]
    assert events.SetTimer("coordinator lost", LOST_COORDINATOR_TIMEOUT_S) in lost
    ending = watcher.handle(events.Printed(), 2.1)
    if not has_failed:
        assert ending == []
        ending = watcher.handle(events.Due("coordinator lost"), 4.0)
    assert to_rank(ending) == [JobEnds(status)]
    watcher.handle(events.RankGone(signal.SIGKILL), 4.1)
    watcher.handle(events.DescendantsGone(), 4.2)
    ended = watcher.handle(END_OF_OUTPUT, 4.2)
    if error:
        assert ended == []
        assert watcher.handle(events.Due("job over"), 14.0) == [
            AgentCommand.CANCEL_STEP, AgentCommand.END_LAUNCHER, events.Exit(status)]
    else:
        assert ended == [events.Exit(status)]


def test_the_deputy_waits_for_srun_to_kill_it_too() -> None:
    """If srun got a signal, it kills all agents, one by one; its own rank may fail in between, or leave."""
    watcher = join(CONFIG._replace(by_srun=True))
    watcher.handle(events.FromCoordinator(Deputy("n9")), 1.5)
    assert printed(lost := watcher.handle(events.CoordinatorLost(""), 2.0)) == []
    assert events.SetTimer("report", KILL_SPREAD_S) in lost
    assert watcher.handle(events.FromRank(Failed(LOST)), 2.1) == []
    (report,) = printed(watcher.handle(events.Due("report"), 2.5))
    assert report.first.cause == message("launch/agent_killed")
    assert to_rank(watcher.handle(events.Printed(), 2.5)) == [JobEnds(137)]


def test_the_deputy_waits_for_srun_also_if_its_own_rank_is_killed_first() -> None:
    watcher = join(CONFIG._replace(by_srun=True))
    watcher.handle(events.FromCoordinator(Deputy("n9")), 1.5)
    watcher.handle(events.CoordinatorLost(""), 2.0)
    assert printed(watcher.handle(events.RankGone(signal.SIGKILL), 2.1)) == []
    assert len(printed(watcher.handle(events.Due("report"), 2.5))) == 1
    assert AgentCommand.END_DESCENDANTS in watcher.handle(events.Printed(), 2.5)


def test_an_agent_that_is_deputy_no_more(watcher: Watcher) -> None:
    watcher.handle(events.FromCoordinator(Deputy("n9")), 1.5)
    watcher.handle(events.FromCoordinator(Deputy("")), 1.6)
    assert printed(watcher.handle(events.CoordinatorLost(""), 2.0)) == []


@pytest.mark.parametrize("first_on_node", [True, False])
def test_a_coordinator_that_cannot_be_reached_is_reported_if_the_deputy_does_not_end_the_job(
    first_on_node: bool
) -> None:
    """Once for a node, as the last act."""
    watcher = Watcher(CONFIG._replace(first_on_node=first_on_node), 0.0)
    watcher.handle(events.FromRank(RegisterRank(member(3), "127.0.0.1", 1, "token")), 1.0)
    watcher.handle(events.FromCoordinator(Admitted()), 1.1)
    assert printed(watcher.handle(events.CoordinatorLost("timed out"), 2.0)) == []
    ending = watcher.handle(events.Due("coordinator lost"), 4.0)
    assert events.SetTimer("job over", GRACE_S + JOB_OVER_TIMEOUT_S + DEPUTY_TIMEOUT_S) in ending
    watcher.handle(events.RankGone(signal.SIGKILL), 4.1)
    watcher.handle(events.DescendantsGone(), 4.2)
    assert watcher.handle(END_OF_OUTPUT, 4.2) == []
    line = events.PrintLine(message("launch/coordinator_unreachable", error="timed out", host="n0"))
    assert watcher.handle(events.Due("job over"), 34.0) == [line] * first_on_node + [events.Exit(1)]


@pytest.mark.parametrize("is_deputy", [True, False])
def test_a_coordinator_that_is_lost_while_the_rank_leaves(is_deputy: bool, watcher: Watcher) -> None:
    """MPI_Finalize may wait for rank 0 for ever."""
    watcher.handle(events.FromCoordinator(Deputy("n9" if is_deputy else "")), 1.5)
    watcher.handle(events.FromRank(Leave(0)), 1.6)
    assert len(printed(watcher.handle(events.CoordinatorLost(""), 2.0))) == is_deputy
    assert to_rank(watcher.handle(events.Due("coordinator lost"), 4.0)) == [JobEnds(137)]


@pytest.mark.parametrize("is_deputy", [True, False])
def test_a_coordinator_that_is_lost_when_the_rank_has_left(is_deputy: bool, watcher: Watcher) -> None:
    watcher.handle(events.FromCoordinator(Deputy("n9" if is_deputy else "")), 1.5)
    watcher.handle(events.FromRank(Leave(0)), 1.6)
    watcher.handle(events.RankGone(0), 1.7)
    watcher.handle(END_OF_OUTPUT, 1.8)
    lost = watcher.handle(events.CoordinatorLost(""), 2.0)
    if is_deputy:
        assert len(printed(lost)) == 1
        assert watcher.handle(events.Printed(), 2.1) == [events.Exit(137)]
    else:
        assert lost == [events.Exit(0)]


def test_a_rank_that_fails_after_the_coordinator_is_lost_is_not_reported(watcher: Watcher) -> None:
    watcher.handle(events.CoordinatorLost(""), 2.0)
    failed = watcher.handle(events.FromRank(Failed(RAISED)), 2.1)
    assert (printed(failed), to_rank(failed)) == ([], [JobEnds(137)])


@pytest.mark.parametrize(("report", "at_once"), [(RAISED, True), (LOST, False)])
@pytest.mark.parametrize("is_deputy", [True, False])
def test_without_a_coordinator_an_own_failure_is_printed_and_others_await_the_launcher(
    report: Report, at_once: bool, is_deputy: bool, watcher: Watcher
) -> None:
    watcher.handle(events.FromCoordinator(Deputy("n9" if is_deputy else "")), 1.5)
    watcher.handle(events.FromRank(Failed(report)), 2.0)
    lost = watcher.handle(events.CoordinatorLost(""), 2.0)
    assert to_rank(lost) == [PrintStack()] * at_once
    assert len(printed(lost)) == (is_deputy and not at_once)
    if at_once:
        reason = RootCause(report, f"rank 0: {message('launch/agent_killed')}")
        assert printed(watcher.handle(events.FromRank(StackPrinted("")), 2.1)) == [reason]
        assert to_rank(watcher.handle(events.Printed(), 2.1)) == [JobEnds(3)]


def test_a_coordinator_that_does_not_answer_is_lost(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(Failed(RAISED)), 2.0)
    late = watcher.handle(events.Due("decision"), 2.0 + DECISION_TIMEOUT_S)
    assert (printed(late), to_rank(late)) == ([], [PrintStack()])
    lost = message("launch/node_unreachable", error=f"no answer within {DECISION_TIMEOUT_S:g} s")
    assert printed(watcher.handle(events.FromRank(StackPrinted("")), 10.1)) == [RootCause(RAISED, f"rank 0: {lost}")]
    assert watcher.handle(events.FromCoordinator(PrintReason(RootCause(RAISED))), 10.2) == []  # it is printed
    assert to_rank(watcher.handle(events.Printed(), 10.3)) == [JobEnds(3)]
    assert watcher.handle(events.FromCoordinator(JobEnds(7)), 10.4) == []  # it ends already
    assert watcher.handle(events.CoordinatorLost("ended"), 10.5) == []


def test_a_coordinator_that_is_lost_before_it_has_admitted_a_rank_that_has_ended() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(JOINS, 1.0)
    watcher.handle(events.RankGone(0), 1.1)
    watcher.handle(END_OF_OUTPUT, 1.2)
    lost = watcher.handle(events.CoordinatorLost("timed out"), 60.0)
    assert printed(lost) == [message("launch/no_coordinator", rank=1, host="n0", error="timed out")]
    watcher.handle(events.DescendantsGone(), 60.1)
    assert watcher.handle(END_OF_OUTPUT, 60.2) == [events.Exit(EXIT_CANNOT_START)]


def test_a_coordinator_that_is_lost_after_the_report_is_printed(watcher: Watcher) -> None:
    watcher.handle(events.FromRank(Failed(RAISED)), 2.0)
    watcher.handle(events.FromCoordinator(PrintReason(RootCause(RAISED))), 2.1)
    watcher.handle(events.FromRank(StackPrinted("stack")), 2.2)
    watcher.handle(events.Printed(), 2.2)
    ending = watcher.handle(events.Due("decision"), 2.0 + DECISION_TIMEOUT_S)
    assert to_rank(ending) == [JobEnds(3)]


def test_a_coordinator_that_cannot_be_reached_from_the_start() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(JOINS, 1.0)
    lost = watcher.handle(events.CoordinatorLost("refused"), 2.0)
    assert printed(lost) == [message("launch/no_coordinator", rank=1, host="n0", error="refused")]
    assert to_rank(lost) == [JobEnds(EXIT_CANNOT_START)]


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_coordinator_that_is_lost_when_the_rank_has_ended(has_failed: bool, watcher: Watcher) -> None:
    """What the rank has started is still ended first."""
    if has_failed:
        watcher.handle(events.FromCoordinator(JobEnds(7)), 2.0)
    watcher.handle(events.RankGone(0), 2.1)
    assert printed(watcher.handle(events.CoordinatorLost("lost"), 2.2)) == []
    if has_failed:
        watcher.handle(events.DescendantsGone(), 2.3)
    assert watcher.handle(END_OF_OUTPUT, 2.3) == [events.Exit(7 if has_failed else 0)]
    assert watcher.phase == Over()


# Signals


def test_sigquit_asks_where_the_ranks_are(watcher: Watcher) -> None:
    assert watcher.handle(events.Signalled(signal.SIGQUIT), 2.0) == [events.ToCoordinator(SnapshotRequest())]


def test_a_stop_that_the_script_has_not_asked_for_yet(watcher: Watcher) -> None:
    assert to_coordinator(watcher.handle(events.Signalled(signal.SIGTERM, unasked=True), 2.0)) == [
        Signalled(signal.SIGTERM), UnaskedStop(signal.SIGTERM)]


@pytest.mark.parametrize("status", [None, 1 << 8])
def test_a_job_whose_launcher_has_ended(status: int | None, watcher: Watcher) -> None:
    """Also if PMIx has ended the rank for that."""
    assert watcher.handle(events.LauncherGone(), 2.0) == [events.SetTimer("launcher gone", LOST_LAUNCHER_TIMEOUT_S)]
    end = events.Due("launcher gone") if status is None else events.RankGone(status)
    (failed,) = to_coordinator(watcher.handle(end, 3.0))
    assert failed == Failed(Report(1, "n0", ReportKind.UNREACHABLE, watcher_module.LAUNCHER_GONE, 1))


def test_a_launcher_that_ends_while_its_job_starts() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(events.LauncherGone(), 1.0)
    assert watcher.handle(events.Due("launcher gone"), 2.0)[-1] == events.Exit(EXIT_CANNOT_START)


def test_a_slurmstepd_that_ends_while_the_rank_works(watcher: Watcher) -> None:
    assert watcher.handle(events.StepDaemonGone(), 2.0) == [events.ToCoordinator(StepDaemonLost())]


@pytest.mark.parametrize("has_own_group", [True, False])
def test_a_signal_from_outside(has_own_group: bool) -> None:
    """Under srun it reaches the rank without the agent."""
    watcher = join(CONFIG._replace(has_own_group=has_own_group))
    actions = watcher.handle(events.Signalled(signal.SIGTERM), 2.0)
    assert to_coordinator(actions) == [Signalled(signal.SIGTERM)]
    assert (events.SignalRank(signal.SIGTERM) in actions) == has_own_group


def test_a_rank_that_the_launcher_would_kill_after_its_signal() -> None:
    """The agent does it before, with what the rank has started, and names the signal."""
    watcher = join(CONFIG._replace(kill_delay_s=0.5, has_own_group=True))
    assert watcher.member
    assert events.SetTimer("launcher", 0.5) in watcher.handle(events.Signalled(signal.SIGTERM), 2.0)
    assert watcher.handle(events.Due("launcher"), 2.5) == [
        events.SignalRank(signal.SIGKILL), events.KillGroup(watcher.member.pid)]
    (failed,) = to_coordinator(watcher.handle(events.RankGone(signal.SIGKILL), 2.6))
    assert isinstance(failed, Failed)
    assert (failed.report.signal, failed.report.status) == ("SIGTERM", 143)


def test_a_grace_is_not_prolonged_by_a_signal() -> None:
    watcher = join(CONFIG._replace(kill_delay_s=0.5))
    watcher.handle(events.FromCoordinator(JobEnds(1)), 2.0)
    actions = watcher.handle(events.Signalled(signal.SIGTERM), 2.1)
    assert not any(isinstance(action, events.SetTimer) and action.name == "grace" for action in actions)
    assert watcher.phase == Ending(1)


# The start


def test_a_registration_is_done_when_the_coordinator_has_admitted_the_rank() -> None:
    watcher = Watcher(CONFIG, 0.0)
    assert to_rank(watcher.handle(JOINS, 1.0)) == []
    assert to_rank(watcher.handle(events.FromCoordinator(Admitted()), 1.1)) == [RegistrationDone()]


@pytest.mark.parametrize(("stage", "by_srun", "helps"), [
    ("MPI_Init", True, True), ("MPI_Init", False, False), ("importing torch", True, False)])
def test_a_crash_that_slurms_fences_may_have_caused(stage: str, by_srun: bool, helps: bool) -> None:
    start = StartupTimeout(CONFIG._replace(by_srun=by_srun), 0.0)
    start.begin_stage(stage)
    crash = message("launch/killed_by_signal", signal="SIGSEGV", description="Segmentation fault")
    (line,) = start.report_death(crash)
    assert isinstance(line, events.PrintLine)
    death, *advice = line.text.splitlines()
    assert death == message("launch/startup_death", rank=1, host="n0", cause=crash, stage=stage)
    assert advice == [message("launch/pmix_fence_advice")] * helps


def test_a_rank_that_dies_before_it_has_joined() -> None:
    """Nobody but its agent knows; other nodes' agents may print theirs meanwhile."""
    watcher = Watcher(CONFIG, 0.0)
    dead = watcher.handle(events.RankGone(signal.SIGSEGV), 1.0)
    assert len(printed(dead)) == 1
    assert events.SetTimer("cancel", REPORTS_SPREAD_S) in dead
    assert watcher.handle(events.Due("cancel"), 2.0) == [AgentCommand.CANCEL_STEP, events.Exit(139)]


def test_a_rank_that_is_stopped_from_outside_before_it_has_joined() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(events.Signalled(signal.SIGTERM), 1.0)
    dead = watcher.handle(events.RankGone(signal.SIGTERM), 1.1)
    assert (printed(dead), dead[-1]) == ([], events.Exit(143))


def test_a_rank_in_mpi_init_that_cannot_be_killed() -> None:
    """A file system does not answer."""
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(events.FromRank(Stage("MPI_Init")), 1.0)
    watcher.handle(events.Due("start"), 60.0)
    assert events.SetTimer("unkillable", JOB_OVER_TIMEOUT_S) in watcher.handle(events.Due("kill"), 61.0)
    assert watcher.handle(events.Due("unkillable"), 66.0)[-1] == events.Exit(EXIT_CANNOT_START)


def test_a_rank_that_has_said_why_it_cannot_start() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(events.FromRank(LocallyHandled()), 1.0)
    assert watcher.handle(events.RankGone(3 << 8), 1.1)[-1] == events.Exit(3)


def test_a_start_that_takes_too_long() -> None:
    watcher = join()
    watcher.handle(events.FromRank(Stage("process group")), 1.2)
    actions = watcher.handle(events.Due("start"), 80.0)
    assert printed(actions) == ["mpiddp: ending rank 1 on n0: still in process group 80 s after its start"]
    assert events.SetTimer("kill", KILL_DELAY_S) in actions
    (failed,) = to_coordinator(actions)
    assert isinstance(failed, Failed)
    assert failed.report.status == EXIT_CANNOT_START
    assert events.SignalRank(signal.SIGKILL) in watcher.handle(events.Due("kill"), 81.0)


def test_a_rank_tells_its_stage_only_when_it_is_late() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.handle(events.FromRank(Stage("agents meet")), 1.0)
    assert events.SetTimer("late", LATE_S) in watcher.handle(JOINS, 1.0)
    assert to_coordinator(watcher.handle(events.FromRank(Stage("process group")), 2.0)) == []
    assert watcher.handle(events.Due("late"), 11.0) == [events.ToCoordinator(Stage("process group"))]
    begun = watcher.handle(events.FromRank(Stage("")), 12.0)
    assert to_coordinator(begun) == [Stage("")]
    assert events.CancelTimer("late") in begun


def test_a_wait_in_mpi_init_is_reported_however_late_it_begins() -> None:
    rank = Watcher(CONFIG._replace(first_on_node=True), 0.0)
    begun = rank.handle(events.FromRank(Stage("MPI_Init")), 0.9 * CONFIG.timeout_s)
    assert events.SetTimer("warn", CONFIG.timeout_s / 4) in begun
    (probe,) = rank.handle(events.Due("warn"), 1.2 * CONFIG.timeout_s)
    assert isinstance(probe, events.ProbeHosts)
    assert f"has waited {CONFIG.timeout_s / 4:.0f} s in MPI_Init" in probe.line


@pytest.mark.parametrize(("environ", "is_known"), [
    ({"SLURM_STEP_ID": "0", "PMIX_VERSION": "5.0.9"}, True), ({"SLURM_STEP_ID": "0", "PMIX_VERSION": "5.0.7"}, False),
    ({"PMIX_VERSION": "5.0.9"}, False)])
def test_a_version_of_pmix_that_hangs_under_srun(environ: dict[str, str], is_known: bool) -> None:
    may_hang = describe_hang(environ)
    assert may_hang == message("launch/pmix_may_hang", version="5.0.9") * is_known
    rank = Watcher(CONFIG._replace(first_on_node=True, may_hang=may_hang), 0.0)
    rank.handle(events.FromRank(Stage("MPI_Init")), 1.0)
    (probe,) = rank.handle(events.Due("warn"), 0.5 * CONFIG.timeout_s)
    assert isinstance(probe, events.ProbeHosts)
    assert probe.line.endswith(f"; {may_hang}" if is_known else "have called it")
    assert events.CancelTimer("warn") in rank.handle(events.FromRank(Stage("roll call")), 1.3 * CONFIG.timeout_s)


def test_a_step_daemon_that_is_killed_while_the_job_starts_ends_the_rank() -> None:
    watcher = Watcher(CONFIG, 0.0)
    watcher.take_actions()
    watcher.handle(events.FromRank(Stage("MPI_Init")), 1.0)
    line, *others = watcher.handle(events.StepDaemonGone(), 2.0)
    assert line == events.PrintLine(message("launch/startup_death", rank=1, host="n0", stage="MPI_Init",
                                            cause=message("launch/step_daemon_killed")))
    assert others == [events.SignalRank(signal.SIGTERM), events.SetTimer("kill", KILL_DELAY_S)]
