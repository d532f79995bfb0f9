"""The logic of an agent and of the coordinator, in orders of events that few jobs have."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import ModuleType
from typing import get_args

import pytest

from mpiddp.agent import coordinator as coordinator_module
from mpiddp.agent import events
from mpiddp.agent import watcher as watcher_module
from mpiddp.agent.coordinator import FINAL_PRINT_TIMEOUT_S, Coordinator
from mpiddp.agent.protocol import (
    LAUNCHER_KILL_TIMEOUT_S,
    AgentLost,
    EndDecision,
    EndRank,
    Failed,
    Hello,
    JobEnds,
    JobFinished,
    Leave,
    ReasonPrinted,
    RegisterRank,
    ScriptEnded,
    Stage,
    WatchedRank,
    WatchPeerProcess,
)
from mpiddp.agent.startup_timeout import LATE_S, LATE_SPREAD_S, StartupTimeout
from mpiddp.agent.state_machine import StateMachine
from mpiddp.agent.watcher import LEAVE_TIMEOUT_S, AwaitingDecision, Watcher, Working
from mpiddp.failure.root_cause import Report, ReportKind, RootCause
from tests.messages import message
from tests.test_protocol import member, report

WATCHED = WatchedRank("rank 1 on n0", False, None, list, False, 60.0)
LOST = Report(1, "n0", ReportKind.SECONDARY, "connection closed by peer", 3)


@pytest.fixture
def watcher() -> Watcher:
    """Return the watcher of a rank that has joined its job."""
    found = Watcher(WATCHED, 0.0)
    found.handle(events.FromRank(RegisterRank(member(1), "127.0.0.1", 1, "token")), 1.0)
    return found


def to_rank(actions: Sequence[events.WatcherAction]) -> list[object]:
    """Return the messages to the rank among some actions."""
    return [action.message for action in actions if isinstance(action, events.ToRank)]


@pytest.mark.parametrize(("module", "machine"), [(watcher_module, Watcher), (coordinator_module, Coordinator)])
def test_every_phase_but_the_first_can_be_reached(module: ModuleType, machine: type[StateMachine]) -> None:
    first, *others = get_args(module.Phase)
    assert list(machine.transitions) == [first, *others]
    assert {phase for allowed, _ in machine.transitions.values() for phase in allowed} == set(others)
    assert not any(set(allowed) & set(ignored) for allowed, ignored in machine.transitions.values())


@pytest.mark.parametrize("raises", [True, False])
def test_an_illegal_transition(raises: bool, watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateMachine, "raises", raises)
    again = events.FromRank(RegisterRank(member(1), "127.0.0.1", 1, "token"))
    watcher.handle(events.FromRank(Failed(LOST)), 1.5)
    if raises:
        with pytest.raises(AssertionError, match="illegal transition"):
            watcher.handle(again, 2.0)
    else:
        line = events.PrintLine("mpiddp: Watcher: illegal transition from AwaitingDecision to Working")
        assert watcher.handle(again, 2.0)[0] == line
    assert watcher.phase == AwaitingDecision(LOST)


@pytest.mark.parametrize("over_first", [True, False])
def test_a_report_that_crosses_the_end_of_the_job_is_not_lost(watcher: Watcher, over_first: bool) -> None:
    crossing = [events.FromCoordinator(JobFinished()), events.FromRank(Failed(LOST))]
    for event in crossing if over_first else reversed(crossing):
        assert to_rank(watcher.handle(event, 2.0)) == []
    assert to_rank(watcher.handle(events.Rank0Lost(True), 2.1)) == [EndDecision(RootCause(LOST), 3, True)]


@pytest.mark.parametrize(("script_ended", "wait_s"), [(False, LAUNCHER_KILL_TIMEOUT_S), (True, LEAVE_TIMEOUT_S)])
def test_a_rank_that_may_be_leaving_in_order_has_longer(watcher: Watcher, script_ended: bool, wait_s: float) -> None:
    """Rank 0's agent was killed, and could not say that the job is over."""
    if script_ended:
        watcher.handle(events.FromRank(ScriptEnded()), 1.1)
    assert watcher.handle(events.Rank0Lost(True), 2.0) == [events.SetTimer("rank 0 lost", wait_s)]
    assert events.WatcherCommand.LEAVE_JOB in watcher.handle(events.FromRank(Leave()), 2.0 + wait_s - 0.1)


def test_a_rank_that_is_cleaned_up_after_does_not_leave(watcher: Watcher) -> None:
    """Its last message is read after its end is seen."""
    watcher.handle(events.FromCoordinator(JobEnds(1, abort=False)), 2.0)
    watcher.handle(events.FromRank(ScriptEnded()), 2.1)
    assert events.WatcherCommand.CLEAN_UP in watcher.handle(events.RankGone(0), 2.15)
    assert watcher.handle(events.FromRank(Leave()), 2.2) == []


@pytest.mark.parametrize(("kind", "waits"), [(ReportKind.ERROR, False), (ReportKind.SECONDARY, True)])
def test_without_a_coordinator_each_rank_that_fails_reports_and_others_wait_for_the_launcher(
    kind: str, waits: bool, watcher: Watcher
) -> None:
    assert watcher.handle(events.CoordinatorLost(), 2.0) == []
    assert watcher.phase == Working()
    failed = LOST._replace(kind=kind)
    decision = EndDecision(RootCause(failed), 3, True)
    actions = watcher.handle(events.FromRank(Failed(failed)), 3.0)
    assert to_rank(actions) == ([] if waits else [decision])
    assert (events.SetTimer("decision", LAUNCHER_KILL_TIMEOUT_S) in actions) == waits
    if waits:
        assert to_rank(watcher.handle(events.Due("decision"), 5.0)) == [decision]


@pytest.mark.parametrize(("number", "told"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
def test_without_a_coordinator_a_crash_is_reported_and_what_a_launcher_may_have_done_is_not(
    number: int, told: bool, watcher: Watcher
) -> None:
    watcher.handle(events.CoordinatorLost(), 2.0)
    actions = watcher.handle(events.RankGone(int(number)), 3.0)
    assert any(isinstance(action, events.PrintReason) for action in actions) == told


def test_a_rank_whose_report_crosses_the_jobs_end_is_told_to_end(watcher: Watcher) -> None:
    watcher.handle(events.FromCoordinator(JobEnds(7, abort=False)), 2.0)
    assert to_rank(watcher.handle(events.FromRank(Failed(LOST)), 2.1)) == [EndDecision(None, 7, False)]
    assert to_rank(watcher.handle(events.FromCoordinator(JobEnds(7, abort=True)), 2.2)) == [EndRank(7)]


@pytest.mark.parametrize(("stage", "by_srun", "helps"), [
    ("MPI_Init", True, True), ("MPI_Init", False, False), ("importing torch", True, False)])
def test_a_crash_that_slurms_fences_may_have_caused(stage: str, by_srun: bool, helps: bool) -> None:
    start = StartupTimeout(WATCHED._replace(by_srun=by_srun), 0.0)
    start.begin_stage(stage)
    crash = message("launch/killed_by_signal", signal="SIGSEGV", description="Segmentation fault")
    (printed,) = start.report_death(crash)
    assert isinstance(printed, events.PrintLine)
    death, *advice = printed.text.splitlines()
    assert death == message("launch/startup_death", rank=1, host="n0", cause=crash, stage=stage)
    assert advice == [message("launch/pmix_fence_advice")] * helps


def test_a_rank_tells_its_stage_only_when_it_is_late() -> None:
    watcher = Watcher(WATCHED, 0.0)
    watcher.handle(events.FromRank(Stage("agents meet")), 1.0)
    joined = watcher.handle(events.FromRank(RegisterRank(member(1), "127.0.0.1", 1, "token")), 1.0)
    assert events.SetTimer("late", LATE_S) in joined
    assert events.ToCoordinator(Stage("process group")) not in watcher.handle(
        events.FromRank(Stage("process group")), 2.0)
    assert watcher.handle(events.Due("late"), 11.0) == [events.ToCoordinator(Stage("process group"))]
    begun = watcher.handle(events.FromRank(Stage("")), 12.0)
    assert events.ToCoordinator(Stage("")) in begun
    assert events.CancelTimer("late") in begun


def test_late_ranks_are_named_until_the_script_begins() -> None:
    coordinator = Coordinator(WATCHED._replace(name="rank 0 on n0"), 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0, world_size=9)), 1.0)
    for rank in range(1, 8):
        coordinator.handle(events.PeerGreeted(rank, Hello(rank, f"n{rank}", 77, "1")), 1.0)
    assert coordinator.handle(events.FromPeer(0, Stage("process group")), 11.0) == [
        events.SetTimer("late", LATE_SPREAD_S)]
    for rank in (1, 2, 3, 7):
        stage = "agents meet" if rank == 7 else "process group"
        assert coordinator.handle(events.FromPeer(rank, Stage(stage)), 11.0) == []
    assert coordinator.handle(events.Due("late"), 12.0) == [
        events.PrintLine(message(
            "launch/script_awaits_ranks", seconds=12,
            ranks="ranks 0-3 (process group); rank 7 on n7 (agents meet); rank 8 (not joined)")),
        events.SetTimer("late", 2 * LATE_S)]
    for rank in (1, 2, 3, 7):
        coordinator.handle(events.FromPeer(rank, Stage("")), 20.0)
    coordinator.handle(events.PeerGreeted(8, Hello(8, "n8", 77, "1")), 20.0)
    assert coordinator.handle(events.Due("late"), 32.0) == [
        events.PrintLine(message("launch/script_awaits_ranks", seconds=32, ranks="rank 0 on n0 (process group)")),
        events.SetTimer("late", 4 * LATE_S)]
    coordinator.handle(events.FromPeer(0, Stage("")), 33.0)
    assert coordinator.handle(events.Due("late"), 72.0) == []


def test_a_reason_that_nobody_tells_is_told_by_the_coordinator() -> None:
    """The rank that failed first has its decision, and its node is lost before it prints it."""
    coordinator = Coordinator(WATCHED._replace(name="rank 0 on n0"), 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0)), 1.0)
    coordinator.handle(events.PeerGreeted(1, Hello(1, "n1", 77, "1")), 1.0)
    coordinator.handle(events.FromPeer(1, Failed(report(1))), 2.0)
    ruled = coordinator.handle(events.Due("select"), 2.1)
    assert events.ToPeer(1, EndDecision(RootCause(report(1)), 1, True)) in ruled
    gone = coordinator.handle(events.OwnRankEnded(in_order=False), 3.0)
    assert events.SetTimer("unprinted", FINAL_PRINT_TIMEOUT_S) in gone
    assert coordinator.has_unprinted_verdict
    told = coordinator.handle(events.Due("unprinted"), 4.0)
    assert [action.verdict.first for action in told if isinstance(action, events.PrintReason)] == [report(1)]
    assert not coordinator.has_unprinted_verdict


def test_a_reason_whose_teller_is_lost_is_told_by_the_coordinator() -> None:
    """An agent that was about to print it may not have."""
    coordinator = Coordinator(WATCHED, 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0)), 1.0)
    coordinator.handle(events.PeerGreeted(1, Hello(1, "n1", 77, "1")), 1.0)
    coordinator.handle(events.FromPeer(1, Failed(report(1), gone=True)), 2.0)
    coordinator.handle(events.Due("select"), 2.1)
    coordinator.handle(events.FromPeer(1, ReasonPrinted(done=False)), 2.2)
    lost = coordinator.handle(events.PeerLost(1), 2.25)
    assert [action.verdict.first for action in lost if isinstance(action, events.PrintReason)] == [report(1)]


@pytest.mark.parametrize("done", [True, False])
def test_a_reason_that_was_told_is_not_told_again(done: bool) -> None:
    """Nor one that is just being told by another, whose word comes yet: only then do the others not end yet."""
    coordinator = Coordinator(WATCHED, 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0)), 1.0)
    coordinator.handle(events.PeerGreeted(1, Hello(1, "n1", 77, "1")), 1.0)
    coordinator.handle(events.FromPeer(1, Failed(report(1))), 2.0)
    coordinator.handle(events.Due("select"), 2.1)
    answer = coordinator.handle(events.FromPeer(1, ReasonPrinted(done)), 2.2)
    assert any(isinstance(action, events.ToPeer) and isinstance(action.message, JobEnds) for action in answer) == done
    for event in (events.OwnRankEnded(in_order=False), events.Due("unprinted"), *[events.PeerLost(1)] * done):
        assert not any(isinstance(action, events.PrintReason) for action in coordinator.handle(event, 3.0))


def test_a_rank_whose_agent_is_killed_hears_again_what_that_may_have_heard() -> None:
    """And another agent of its node watches the processes there, in the place of the one that did."""
    coordinator = Coordinator(WATCHED, 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0, world_size=4)), 1.0)
    for rank in (1, 2, 3):
        coordinator.handle(events.PeerGreeted(rank, Hello(rank, "n1", 70 + rank, "1")), 1.0)
    assert coordinator.handle(events.FromPeer(1, AgentLost()), 2.0) == [
        events.ToPeer(2, WatchPeerProcess(rank, 70 + rank)) for rank in (1, 2, 3)]
    assert coordinator.handle(events.FromPeer(3, AgentLost()), 2.0) == []
    coordinator.handle(events.FromPeer(3, Failed(report(3))), 3.0)
    decision = events.ToPeer(3, EndDecision(RootCause(report(3)), 1, True))
    assert decision in coordinator.handle(events.Due("select"), 3.2)
    assert coordinator.handle(events.FromPeer(3, AgentLost()), 3.3) == [decision]
    coordinator.handle(events.FromPeer(3, ReasonPrinted()), 3.4)
    assert coordinator.handle(events.FromPeer(1, AgentLost()), 3.5) == [events.ToPeer(1, JobEnds(1, False))]


def test_an_unwatched_rank_that_is_gone_is_named() -> None:
    coordinator = Coordinator(WATCHED, 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0)), 1.0)
    coordinator.handle(events.PeerGreeted(1, Hello(1, "n1", 77, "1")), 1.0)
    coordinator.handle(events.FromPeer(1, AgentLost()), 2.0)
    coordinator.handle(events.PeerLost(1), 3.0)
    (report,) = coordinator.evidence.reports
    assert (report.rank, report.cause) == (1, message("launch/ended_without_agent"))


@pytest.mark.parametrize(("pid", "error", "cause", "status"), [
    (77, "", message("launch/ended_with_agent", companion="agent"), 137),
    (1, "", message("launch/ended_with_agent", companion="container"), 137),
    (77, "No route to host", message("launch/node_unreachable", error="No route to host"), 1)])
def test_a_rank_that_is_gone_with_its_agent_is_named(pid: int, error: str, cause: str, status: int) -> None:
    coordinator = Coordinator(WATCHED, 0.0)
    coordinator.handle(events.OwnRankJoined(0, member(0)), 1.0)
    coordinator.handle(events.PeerGreeted(1, Hello(1, "n1", pid, "1")), 1.0)
    coordinator.handle(events.PeerLost(1, error), 3.0)
    assert coordinator.evidence.reports == [Report(1, "n1", ReportKind.UNREACHABLE, cause, status)]


@pytest.mark.parametrize("closed", [True, False])
def test_ranks_that_a_launcher_does_not_end_after_rank_0_are_ended(watcher: Watcher, closed: bool) -> None:
    watcher.handle(events.Rank0Lost(closed), 2.0)
    name = "launch/rank_0_ended" if closed else "launch/rank_0_unreachable"
    printed, *_ = watcher.handle(events.Due("rank 0 lost"), 4.0)
    assert printed == events.PrintLine(message(name, host="n0"))


def test_a_wait_in_mpi_init_is_reported_however_late_it_begins() -> None:
    rank = Watcher(WATCHED._replace(first_on_node=True), 0.0)
    begun = rank.handle(events.FromRank(Stage("MPI_Init")), 0.9 * WATCHED.timeout_s)
    assert events.SetTimer("warn", WATCHED.timeout_s / 4) in begun
    (probe,) = rank.handle(events.Due("warn"), 1.2 * WATCHED.timeout_s)
    assert isinstance(probe, events.ProbeHosts)
    assert f"has waited {WATCHED.timeout_s / 4:.0f} s in MPI_Init" in probe.line
    assert events.CancelTimer("warn") in rank.handle(events.FromRank(Stage("roll call")), 1.3 * WATCHED.timeout_s)


def test_a_step_daemon_that_is_killed_while_the_job_starts_ends_the_rank() -> None:
    watcher = Watcher(WATCHED, 0.0)
    watcher.handle(events.FromRank(Stage("MPI_Init")), 1.0)
    printed, *others = watcher.handle(events.StepDaemonGone(), 2.0)
    assert printed == events.PrintLine(message("launch/startup_death", rank=1, host="n0", stage="MPI_Init",
                                               cause=message("launch/step_daemon_killed")))
    assert events.WatcherCommand.TERMINATE in others
