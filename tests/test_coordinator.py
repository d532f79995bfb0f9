"""The coordinator: its logic, who gets in, what strangers can do, what a fault of its own does."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from mpiddp.agent import connections, process
from mpiddp.agent.coordinator import Coordinator, Decided, Ending, Over, Running
from mpiddp.agent.coordinator_server import CoordinatorServer
from mpiddp.agent.events import (
    AgentEvent,
    CompleteIndex,
    CoordinatorAction,
    CoordinatorCommand,
    CoordinatorEvent,
    Due,
    FromCoordinator,
    FromPeer,
    IndexCompleted,
    OwnRankJoined,
    PeerGreeted,
    PeerLost,
    PrintLine,
    PrintOwnReport,
    SetTimer,
    SnapshotTaken,
    StallChanged,
    ToPeer,
    ToPeers,
)
from mpiddp.agent.protocol import (
    Abort,
    Admitted,
    AgentConfig,
    AllFinished,
    CoordinatorReceives,
    CoordinatorSends,
    CoordinatorToAgent,
    Deputy,
    Failed,
    Hello,
    JobEnds,
    JobOver,
    KillGroup,
    PrintReason,
    QueryStopped,
    RankEnded,
    ReasonPrinted,
    ScriptEnded,
    Signalled,
    Stage,
    StartCoordinator,
    StepDaemonLost,
    StoppedStatus,
    UnaskedStop,
)
from mpiddp.agent.startup_timeout import LATE_S, LATE_SPREAD_S
from mpiddp.agent.tasks import Tasks
from mpiddp.agent.timeouts import (
    FINAL_EXIT_TIMEOUT_S,
    LATE_AGENTS_TIMEOUT_S,
    LOST_COORDINATOR_TIMEOUT_S,
    PRINT_TIMEOUT_S,
    SIGNAL_SPREAD_S,
)
from mpiddp.base.ranks import LogPlan
from mpiddp.base.stderr import write_line
from mpiddp.failure.root_cause import NOBODY, JobActivity, Report, ReportKind, RootCause
from mpiddp.ipc import authentication
from mpiddp.ipc.authentication import NONCE_BYTES, PROOF_BYTES, ClientHandshake, authenticate, connect
from mpiddp.ipc.channel import Channel, Codec, Unreadable, encode, listen
from mpiddp.ipc.event_loop import EventLoop
from mpiddp.output.index import RankEnd
from mpiddp.systems.statuses import EXIT_STALLED
from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import MPIS, PROGRAMS, ROOT, TWO_NAMES, Mpi, check, mpiexec, need, noise, on_path, srun
from tests.test_protocol import BRACKETS, NONSENSE, TOKEN, frame, member, report

pytestmark = pytest.mark.light

STRANGERS = {
    "brackets": BRACKETS, "half-a-token": TOKEN.encode()[:16], "megabyte": b"x" * 2**20, "nothing": b"",
    "another-token": TOKEN[::-1].encode() + BRACKETS, "the-token": TOKEN.encode() + BRACKETS,
}
CONFIG = AgentConfig("rank 0 on n0", True, None, list, False, 60.0)
WAIT_S = 10
SOON_S = 5  # from a fault to the end of its job, on a busy machine


AgentChannel = Channel[CoordinatorReceives, CoordinatorSends]
AGENT_CODEC: Codec[CoordinatorSends] = Codec(CoordinatorSends)


def dial(port: int, hello: Hello) -> AgentChannel:
    """Connect a rank's agent to the coordinator; raise OSError or EOFError if that fails."""
    channel = AgentChannel(connect(("127.0.0.1", port), TOKEN, WAIT_S, WAIT_S), AGENT_CODEC)
    channel.send(hello)
    return channel


# The logic


def start(ranks: int = 2, config: AgentConfig = CONFIG, log: LogPlan | None = None) -> Coordinator:
    """Return the coordinator of a job whose ranks have joined: two on each node."""
    coordinator = Coordinator(config, 0.0)
    handle(coordinator, 1.0, OwnRankJoined(0, member(0, world_size=ranks)._replace(log=log or LogPlan())),
           *[greeting(rank) for rank in range(1, ranks)])
    return coordinator


def greeting(rank: int) -> PeerGreeted:
    """Return the first message of a rank's agent."""
    return PeerGreeted(rank, Hello(rank, f"n{rank // 2}", 70 + rank, f"n{rank // 2}"))


def handle(coordinator: Coordinator, at_s: float, *received: CoordinatorEvent) -> list[CoordinatorAction]:
    """Return the actions for events that come at the same time; a message to several agents as one for each."""
    actions: list[CoordinatorAction] = []
    for event in received:
        for action in coordinator.handle(event, at_s):
            actions += ([ToPeer(link, action.message) for link in action.links] if isinstance(action, ToPeers)
                        else [action])
    return actions


def to_all(message: CoordinatorToAgent, ranks: int = 2) -> list[CoordinatorAction]:
    """Return the actions that send a message to all agents."""
    return [ToPeer(rank, message) for rank in range(ranks)]


def end(coordinator: Coordinator, status: int, *ranks: int) -> list[CoordinatorAction]:
    """Let these ranks end."""
    return handle(coordinator, 9.0, *[FromPeer(rank, RankEnded(status)) for rank in ranks])


def test_a_failure_from_the_report_to_the_end() -> None:
    coordinator = start()
    assert handle(coordinator, 2.0, FromPeer(1, Failed(report(1)))) == [
        SetTimer(f"select {after_s:g}", after_s) for after_s in (0.031, 0.151, 0.501, 1.001)]
    assert handle(coordinator, 2.04, Due("select 0.031")) == [
        ToPeer(1, PrintReason(RootCause(report(1)))), SetTimer("printed", PRINT_TIMEOUT_S)]
    assert handle(coordinator, 2.1, FromPeer(1, ReasonPrinted())) == [
        *to_all(JobEnds(1)), SetTimer("end", member(0).grace_s + FINAL_EXIT_TIMEOUT_S)]
    assert end(coordinator, 137, 0) == []
    assert end(coordinator, 1, 1) == to_all(JobOver(1))
    assert coordinator.phase == Over(1)


def test_an_end_in_order() -> None:
    """The largest status of all is the job's."""
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(0, ScriptEnded(calls=3)))
    assert handle(coordinator, 2.1, FromPeer(1, ScriptEnded(calls=4))) == to_all(AllFinished(4, complete=True))
    assert end(coordinator, 0, 0) == []
    assert end(coordinator, 75, 1) == [CoordinatorCommand.NOTE_END_IN_ORDER, *to_all(JobOver(75))]


def test_a_rank_that_has_vanished_blocks_nobody() -> None:
    coordinator = start()
    vanishing = [FromPeer(1, ScriptEnded(vanished=True)), FromPeer(1, RankEnded(0))]
    assert not any(isinstance(action, ToPeer) for action in handle(coordinator, 2.0, *vanishing))
    assert handle(coordinator, 3.0, FromPeer(0, ScriptEnded())) == to_all(AllFinished(0, complete=False))


def test_a_rank_that_fails_after_its_script_has_finished() -> None:
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(1, ScriptEnded()), FromPeer(1, Failed(report(1))))
    assert ToPeer(1, PrintReason(RootCause(report(1)))) in handle(coordinator, 2.1, Due("select 0.031"))
    assert not any(isinstance(action, ToPeer) for action in handle(coordinator, 2.2, FromPeer(0, ScriptEnded())))


def test_a_report_that_nobody_prints_is_printed_by_the_coordinator() -> None:
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(1, Failed(report(1))), Due("select 0.031"))
    handle(coordinator, 2.1, Due("select 0.031"))
    assert isinstance(coordinator.phase, Decided)
    late = handle(coordinator, 7.1, Due("printed"))
    assert PrintOwnReport(RootCause(report(1)), 7.1, "") in late
    assert coordinator.phase == Ending(1)
    assert not any(isinstance(action, PrintOwnReport) for action in handle(
        coordinator, 7.2, FromPeer(1, ReasonPrinted()), Due("printed")))


def test_a_report_whose_printer_is_lost_is_printed_by_the_coordinator() -> None:
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(1, Failed(report(1))))
    handle(coordinator, 2.1, Due("select 0.031"))
    lost = handle(coordinator, 2.2, PeerLost(1))
    assert PrintOwnReport(RootCause(report(1)), 2.2, "") in lost
    assert end(coordinator, 1, 0) == [ToPeer(0, JobOver(1))]


@pytest.mark.parametrize(("error", "cause", "status"), [
    ("", "its agent was killed, and the rank with it", 137),
    ("No route to host", message("launch/node_unreachable", error="No route to host"), 1)])
def test_an_agent_that_is_lost_is_named(error: str, cause: str, status: int) -> None:
    """If its node is cut off, the launcher has to end the rest of its step, too."""
    coordinator = start(4)
    actions = handle(coordinator, 3.0, PeerLost(3, error))
    assert (ToPeer(2, KillGroup(73)) in actions) == (not error)
    assert coordinator.evidence.reports.all == [Report(3, "n1", ReportKind.UNREACHABLE, cause, status)]
    handle(coordinator, 3.01, *[FromPeer(rank, StoppedStatus(stopped=False)) for rank in (0, 1, 2)])
    assert isinstance(handle(coordinator, 4.01, Due("select 1.001"))[0], PrintOwnReport)
    assert (CoordinatorCommand.CANCEL_STEP in end(coordinator, 1, 0, 1, 2)) is bool(error)


@pytest.mark.parametrize("ranks", [4, 6])
def test_a_coordinator_that_loses_all_other_nodes_has_lost_its_network(ranks: int) -> None:
    """Or, of two nodes, one of them. The connections to other nodes are lost one after the other."""
    coordinator = start(ranks)
    asked = handle(coordinator, 3.0, PeerLost(2, "timed out"))
    assert ToPeer(3, QueryStopped()) in asked
    handle(coordinator, 3.01, *[FromPeer(rank, StoppedStatus(stopped=False)) for rank in (0, 1)])
    (reason,) = [action.root_cause.first for action in handle(coordinator, 4.01, Due("select 1.001"))
                 if isinstance(action, PrintOwnReport)]
    assert (reason.rank, reason.status) == (0 if ranks == 6 else NOBODY, 1)
    assert reason.cause == (message("launch/network_lost", host="n0", others="n1, n2") if ranks == 6 else
                            message("launch/nodes_cut_off", host="n0", other="n1"))


def test_the_deputy_is_an_agent_of_another_node() -> None:
    """Of the same node if there is no other; when it is lost, another agent is."""
    coordinator = Coordinator(CONFIG, 0.0)
    assert handle(coordinator, 1.0, greeting(1)) == [ToPeer(1, Admitted())]
    assert ToPeer(1, Deputy("n0")) in handle(coordinator, 1.1, OwnRankJoined(0, member(0, world_size=6)))
    assert handle(coordinator, 1.2, greeting(2)) == [
        ToPeer(2, Admitted()), ToPeer(2, Deputy("n0")), ToPeer(1, Deputy(""))]
    assert handle(coordinator, 1.3, greeting(4)) == [ToPeer(4, Admitted())]
    assert ToPeer(4, Deputy("n0")) in handle(coordinator, 2.0, PeerLost(2))
    assert ToPeer(1, Deputy("n0")) in handle(coordinator, 2.1, PeerLost(4))


def test_the_agent_of_a_rank_that_has_reported_may_be_lost() -> None:
    """Then the rank's report counts, and a number of another process is not killed."""
    coordinator = start(4)
    handle(coordinator, 2.0, FromPeer(3, Failed(report(3))), FromPeer(3, RankEnded(1)))
    assert not any(isinstance(action, ToPeer) for action in handle(coordinator, 2.01, PeerLost(3)))
    assert isinstance(handle(coordinator, 2.2, Due("select 0.151"))[0], PrintOwnReport)
    assert [found.cause for found in coordinator.evidence.reports.all] == ["seven"]


def test_an_agent_that_joins_late_is_awaited() -> None:
    coordinator = Coordinator(CONFIG, 0.0)
    handle(coordinator, 1.0, OwnRankJoined(0, member(0)), FromPeer(0, Failed(report(0))))
    handle(coordinator, 1.1, Due("select 0.031"))
    assert SetTimer("late agents", LATE_AGENTS_TIMEOUT_S) in handle(coordinator, 1.2, FromPeer(0, ReasonPrinted()))
    assert end(coordinator, 1, 0) == []
    assert handle(coordinator, 1.4, greeting(1)) == [ToPeer(1, Admitted()), ToPeer(1, JobEnds(1))]
    assert end(coordinator, 1, 1) == to_all(JobOver(1))


def test_an_agent_that_never_joins_is_not_awaited_for_ever() -> None:
    coordinator = Coordinator(CONFIG, 0.0)
    handle(coordinator, 1.0, OwnRankJoined(0, member(0)), FromPeer(0, Failed(report(0))))
    handle(coordinator, 1.1, Due("select 0.031"))
    handle(coordinator, 1.2, FromPeer(0, ReasonPrinted()), FromPeer(0, RankEnded(1)))
    assert handle(coordinator, 2.2, Due("late agents")) == [ToPeer(0, JobOver(1))]


def test_an_agent_that_joins_a_job_that_is_over_ends_too() -> None:
    coordinator = Coordinator(CONFIG, 0.0)
    handle(coordinator, 1.0, OwnRankJoined(0, member(0)), FromPeer(0, Failed(report(0))))
    handle(coordinator, 1.1, Due("select 0.031"))
    handle(coordinator, 1.2, FromPeer(0, ReasonPrinted()), FromPeer(0, RankEnded(1)))
    handle(coordinator, 2.2, Due("late agents"))
    assert handle(coordinator, 2.3, greeting(1)) == [ToPeer(1, Admitted()), ToPeer(1, JobOver(1))]


def test_a_report_that_comes_twice_counts_once() -> None:
    coordinator = start()
    assert handle(coordinator, 2.0, FromPeer(1, Failed(report(1)))) != []
    assert handle(coordinator, 2.01, FromPeer(1, Failed(report(1)))) == []


def test_an_exit_timeout_that_is_over_while_the_job_fails() -> None:
    """Its snapshot comes late: the failure stays the root cause."""
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(0, ScriptEnded()))
    assert handle(coordinator, 3.0, Due("exit timeout")) == [CoordinatorCommand.TAKE_SNAPSHOT]
    handle(coordinator, 3.1, FromPeer(1, Failed(report(1))), SnapshotTaken(JobActivity()))
    assert coordinator.evidence.reports.all == [report(1)]


def test_logs_that_are_incomplete_are_named() -> None:
    coordinator = start()
    handle(coordinator, 9.0, FromPeer(0, RankEnded(0)))
    assert PrintLine("mpiddp: logs are incomplete: rank 1") in handle(
        coordinator, 9.0, FromPeer(1, RankEnded(0, log_lost=7)))


@pytest.mark.parametrize("error", ["", "mpiddp: cannot write /logs/ranks.json: no response within 1 s"])
def test_the_agents_end_when_the_index_of_the_logs_is_complete(error: str) -> None:
    coordinator = start(log=LogPlan("/logs/0", ranks_file="/logs/ranks.json"))
    handle(coordinator, 9.0, FromPeer(0, RankEnded(0, log_lost=7, last_line="seven")))
    assert handle(coordinator, 9.1, FromPeer(1, RankEnded(0))) == [
        CompleteIndex("/logs/ranks.json", {0: RankEnd(0, 7, "seven"), 1: RankEnd(0, -1, "")}, NOBODY)]
    lost = f"mpiddp: logs are incomplete: rank 0{'' if error else ' (first lost byte of each in /logs/ranks.json)'}"
    assert handle(coordinator, 9.2, IndexCompleted(error)) == [
        *[PrintLine(error)] * bool(error), CoordinatorCommand.NOTE_END_IN_ORDER, PrintLine(lost), *to_all(JobOver(0))]


def test_the_index_tells_which_rank_failed_first() -> None:
    """It can end the job by MPI_Abort: its process, which is still there, ends with the job's status."""
    coordinator = start(log=LogPlan("/logs/0", ranks_file="/logs/ranks.json"))
    handle(coordinator, 2.0, FromPeer(1, Failed(report(1))))
    handle(coordinator, 2.1, Due("select 0.031"))
    actions = handle(coordinator, 2.2, FromPeer(1, ReasonPrinted()), FromPeer(0, RankEnded(137)),
                     FromPeer(1, RankEnded(0, can_abort=True)))
    assert actions[-1] == CompleteIndex("/logs/ranks.json", {0: RankEnd(137, -1, ""), 1: RankEnd(1, -1, "")}, 1)
    assert handle(coordinator, 9.2, Due("end")) == []
    assert handle(coordinator, 9.2, IndexCompleted()) == [
        CoordinatorCommand.CANCEL_STEP, ToPeer(0, JobOver(1, aborts=True)), ToPeer(1, Abort(1))]


def test_a_slurmstepd_that_ends_is_the_root_cause() -> None:
    """What it had started is cancelled at the end."""
    coordinator = start()
    actions = handle(coordinator, 2.0, FromPeer(1, StepDaemonLost()), Due("select 0.031"))
    (reason,) = [action for action in actions if isinstance(action, PrintOwnReport)]
    assert reason.root_cause.first.cause == message("launch/step_daemon_killed")
    assert CoordinatorCommand.CANCEL_STEP in end(coordinator, 137, 0, 1)


def test_a_rank_that_does_not_end_in_time() -> None:
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(1, Failed(report(1))))
    handle(coordinator, 2.1, Due("select 0.031"))
    handle(coordinator, 2.2, FromPeer(1, ReasonPrinted()), FromPeer(1, RankEnded(1)))
    assert handle(coordinator, 9.2, Due("end")) == [CoordinatorCommand.CANCEL_STEP, *to_all(JobOver(1))]


def test_a_rank_that_can_end_the_job_by_mpi_abort() -> None:
    """When all others have ended."""
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(1, Failed(report(1))))
    handle(coordinator, 2.1, Due("select 0.031"))
    handle(coordinator, 2.2, FromPeer(1, ReasonPrinted()), FromPeer(1, RankEnded(0, can_abort=True)))
    assert end(coordinator, 137, 0) == [ToPeer(0, JobOver(1, aborts=True)), ToPeer(1, Abort(1))]


def test_of_several_ranks_that_can_end_the_job_the_failed_one_does() -> None:
    """The end of the others may be cut short."""
    coordinator = start()
    handle(coordinator, 2.0, FromPeer(1, Failed(report(1))))
    handle(coordinator, 2.1, Due("select 0.031"))
    handle(coordinator, 2.2, FromPeer(0, RankEnded(1, can_abort=True)), FromPeer(1, ReasonPrinted()))
    assert handle(coordinator, 2.3, FromPeer(1, RankEnded(1, can_abort=True))) == [
        ToPeer(0, JobOver(1, aborts=True)), ToPeer(1, Abort(1))]


def test_a_signal_from_outside_ends_the_job() -> None:
    coordinator = start()
    killed = report(1)._replace(kind=ReportKind.PROCESS_EXIT, signal="SIGTERM", status=143)
    actions = handle(coordinator, 2.0, FromPeer(1, Signalled(signal.SIGTERM)), FromPeer(1, Failed(killed)))
    assert ToPeer(1, PrintReason(RootCause(killed, outside=True))) in actions


def test_where_the_ranks_are_is_printed_if_none_reacts_to_a_sigint() -> None:
    """Once for all ranks; in a job that fails it is part of the report."""
    coordinator, seen = start(), SnapshotTaken(JobActivity(table="table"))
    line = PrintLine(f"{message('launch/sigint_blocked')}\ntable")
    assert handle(coordinator, 1.5, seen) == []
    assert handle(coordinator, 2.0, FromPeer(0, Signalled(signal.SIGINT)), FromPeer(1, Signalled(signal.SIGINT))) == [
        CoordinatorCommand.TAKE_SNAPSHOT]
    assert handle(coordinator, 3.0, seen) == [line]
    assert handle(coordinator, 2.9 + SIGNAL_SPREAD_S, seen) == []
    assert handle(coordinator, 3.1 + SIGNAL_SPREAD_S, seen) == [line]
    handle(coordinator, 9.0, FromPeer(1, Failed(report(1))))
    assert line not in handle(coordinator, 9.1, seen)


def test_a_stop_before_the_first_should_stop_is_explained_once() -> None:
    coordinator = start()
    stops = [FromPeer(rank, UnaskedStop(signal.SIGTERM)) for rank in (1, 0)]
    assert handle(coordinator, 2.0, *stops) == [PrintLine(message("launch/stop_unasked", signal="SIGTERM"))]


@pytest.mark.parametrize("aborts", [True, False])
def test_a_stall_is_printed_and_may_end_the_job(aborts: bool) -> None:
    coordinator = start(config=CONFIG._replace(stall_abort=aborts))
    assert handle(coordinator, 2.0, StallChanged("they move", "", -1)) == [PrintLine("mpiddp: they move")]
    line, *others = handle(coordinator, 9.0, StallChanged("no rank has moved\ntable", "no rank has moved", 1))
    assert line == PrintLine("mpiddp: no rank has moved\ntable")
    stalled = Report(1, "n0", ReportKind.UNREACHABLE, "no rank has moved", EXIT_STALLED)
    assert coordinator.evidence.reports.all == [stalled] * aborts
    assert bool(others) == aborts
    assert (PrintLine("mpiddp: they move") in handle(coordinator, 9.1, StallChanged("they move", "", -1))) != aborts


def test_ranks_that_wait_in_vain_are_probed() -> None:
    """One is stopped, and named."""
    coordinator = start()
    lost = report(0)._replace(kind=ReportKind.SECONDARY, cause="timed out waiting")
    assert [*to_all(QueryStopped()), CoordinatorCommand.TAKE_SNAPSHOT] == [
        action for action in handle(coordinator, 2.0, FromPeer(0, Failed(lost))) if not isinstance(action, SetTimer)]
    reason, _ = handle(coordinator, 2.1, FromPeer(1, StoppedStatus(stopped=True)))[:2]
    assert isinstance(reason, PrintOwnReport)
    assert reason.root_cause.first.rank == 1


def test_late_ranks_are_named_until_the_script_begins() -> None:
    coordinator = Coordinator(CONFIG, 0.0)
    handle(coordinator, 1.0, OwnRankJoined(0, member(0, world_size=9)),
           *[PeerGreeted(rank, Hello(rank, f"n{rank}", 77, "1")) for rank in range(1, 8)])
    assert handle(coordinator, 11.0, FromPeer(0, Stage("process group"))) == [SetTimer("late", LATE_SPREAD_S)]
    for rank in (1, 2, 3, 7):
        stage = "agents meet" if rank == 7 else "process group"
        assert handle(coordinator, 11.0, FromPeer(rank, Stage(stage))) == []
    assert handle(coordinator, 12.0, Due("late")) == [
        PrintLine(message(
            "launch/script_awaits_ranks", seconds=12,
            ranks="ranks 0-3 (process group); rank 7 on n7 (agents meet); rank 8 (not joined)")),
        SetTimer("late", 2 * LATE_S)]
    for rank in (1, 2, 3, 7):
        handle(coordinator, 20.0, FromPeer(rank, Stage("")))
    handle(coordinator, 20.0, PeerGreeted(8, Hello(8, "n8", 77, "1")))
    assert handle(coordinator, 32.0, Due("late")) == [
        PrintLine(message("launch/script_awaits_ranks", seconds=32, ranks="rank 0 on n0 (process group)")),
        SetTimer("late", 4 * LATE_S)]
    handle(coordinator, 33.0, FromPeer(0, Stage("")))
    assert handle(coordinator, 72.0, Due("late")) == []
    assert coordinator.phase == Running()


# The connections


def await_admission(wire: AgentChannel) -> None:
    """Wait until the only other agent is admitted."""
    answers: list[object] = []
    while len(answers) < 2:
        answers += wire.receive(WAIT_S)
    assert answers == [Admitted(), Deputy("n0")]


class RunningServer:
    """A coordinator with its loop in a thread."""

    def __init__(self) -> None:
        self.excuses: list[Exception] = []
        self.loop = EventLoop(self.excuses.append)
        self._heard: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()  # by the watcher of rank 0
        self.server = CoordinatorServer(self.loop, StartCoordinator("127.0.0.1", TOKEN, 2), CONFIG, self._heard.put,
                                        time.monotonic(), Tasks(self.loop))
        self.server.register_own_rank(member(0))
        assert self.heard() == Admitted()
        self.thread = threading.Thread(target=self.loop.run)

    def heard(self) -> CoordinatorToAgent | Unreadable:
        """Return the next message to rank 0's watcher."""
        event = self._heard.get(timeout=WAIT_S)
        assert isinstance(event, FromCoordinator)
        return event.message

    def end(self) -> None:
        """Let the loop end at the next event."""
        self.loop.stop()
        self.call(b"").close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def join(self, rank: int) -> AgentChannel:
        """Connect the agent of a rank, and return its end when it is admitted."""
        wire = dial(self.server.port, Hello(rank, "n0", 77, "0"))
        await_admission(wire)
        return wire

    def call(self, data: bytes) -> socket.socket:
        """Connect a stranger that says something, and may be turned away before it has."""
        stranger = socket.create_connection(("127.0.0.1", self.server.port), timeout=WAIT_S)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        return stranger


@pytest.fixture
def server() -> Iterator[RunningServer]:
    one = RunningServer()
    one.thread.start()
    yield one
    one.end()


def is_turned_away(stranger: socket.socket) -> bool:
    """Tell whether the other end closes a connection after at most its part of a handshake."""
    heard = b""
    try:
        while data := stranger.recv(100):
            heard += data
    except ConnectionResetError:  # it has not read all
        pass
    return len(heard) in (0, NONCE_BYTES + PROOF_BYTES)


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_turned_away_and_the_ranks_go_on(
    data: bytes, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 0.3)
    with server.call(data) as stranger:
        assert is_turned_away(stranger)
    server.join(1)
    assert server.excuses == []


def test_a_handshake_in_pieces_and_a_hello_behind_it(server: RunningServer) -> None:
    hello, challenge, shown = encode(Hello(1, "n0", 77, "0")), ClientHandshake(TOKEN), b""
    with server.call(challenge.nonce[:5]) as one:
        time.sleep(0.1)
        one.sendall(challenge.nonce[5:])
        while not shown:
            shown = challenge.feed(one.recv(7))
        for piece in (shown[:5], shown[5:] + hello[:3], hello[3:]):
            time.sleep(0.1)
            one.sendall(piece)
        await_admission(AgentChannel(one, AGENT_CODEC))


def test_who_had_to_wait_for_the_answer_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator may have been stopped, or too busy, between it took the connection and heard what was said."""
    excuses: list[Exception] = []
    admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    loop = EventLoop(excuses.append)
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 0.0)
    door = authentication.AuthListener(loop, listen("127.0.0.1", 0), TOKEN, 2, admitted.put)
    with socket.create_connection(("127.0.0.1", door.port), timeout=WAIT_S) as one:
        proving = threading.Thread(target=authenticate, args=(one, TOKEN, WAIT_S), daemon=True)
        proving.start()
        select.select([door], [], [], WAIT_S)
        door._accept()
        assert select.select(list(door._pending), [], [], WAIT_S)[0]
        monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", WAIT_S)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        try:
            admitted.get(timeout=WAIT_S).close()
        finally:
            loop.stop()
            socket.create_connection(("127.0.0.1", door.port)).close()
        for other in (thread, proving):
            other.join(WAIT_S)
            assert not other.is_alive()
    assert excuses == []


def test_a_proof_is_good_for_one_connection(server: RunningServer) -> None:
    """Neither the server's own proof nor one that a client has sent before lets anybody in."""
    challenge = ClientHandshake(TOKEN)
    with server.call(challenge.nonce) as one:
        answer = one.recv(100)
        known = challenge.feed(answer)
        one.sendall(answer[NONCE_BYTES:])
        assert one.recv(100) == b""
    with server.call(challenge.nonce + known) as one:
        assert is_turned_away(one)
    server.join(1)


def test_a_server_that_does_not_know_the_token_is_told_nothing_of_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        dialling = pool.submit(dial, port, greeting(1).hello)
        connection, _ = server.accept()
        connection.settimeout(WAIT_S)
        with connection:
            assert len(connection.recv(100)) == NONCE_BYTES
            connection.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
            assert connection.recv(100) == b""
        with pytest.raises(PermissionError, match=re.escape(message("launch/foreign_listener"))):
            dialling.result(WAIT_S)


@pytest.mark.process
def test_a_crowd_of_strangers_does_not_keep_a_agent_out(server: RunningServer) -> None:
    """All of them are there at once when the entrance looks; the agent may have to call again, as it does then."""
    server.loop.stop()
    server.call(b"").close()
    server.thread.join(WAIT_S)

    def join() -> AgentChannel:
        for _ in range(connections.MAX_RECONNECTS + 1):
            with contextlib.suppress(EOFError, ConnectionError):
                return server.join(1)
        raise TimeoutError("the strangers have crowded it out each time")

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        time.sleep(0.2)
        strangers = [server.call(b"") for _ in range(3 * (2 * 2 + authentication.SPARE_CONNECTIONS))]
        server.loop.stopped = False
        server.thread = threading.Thread(target=server.loop.run)
        server.thread.start()
        wire = joining.result(WAIT_S)
    wire.send(Failed(report(1)))
    assert wire.receive(WAIT_S) == [PrintReason(RootCause(report(1)))]
    assert server.excuses == []
    for stranger in strangers:
        stranger.close()


def test_many_silent_strangers_keep_nobody_out(server: RunningServer) -> None:
    """The one that has been silent for longest goes."""
    strangers = [server.call(b"") for _ in range(2 * 2 + authentication.SPARE_CONNECTIONS + 3)]
    server.join(1)
    assert is_turned_away(strangers[0])
    for stranger in strangers:
        stranger.close()


def test_a_coordinator_that_is_out_of_reach_is_told_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answers: list[tuple[object, str]] = []
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    authentication.Connector(loop, "127.0.0.1", port, TOKEN, "rank 0's agent",
                        lambda *answer: answers.append(answer)).connect()
    loop.set_timer("end", authentication.MAX_ATTEMPTS * authentication.RETRY_INTERVAL_S + 1, loop.stop)
    loop.run()
    (none, error), = answers
    assert none is None
    assert error == message("launch/cannot_connect", server="rank 0's agent", address=f"127.0.0.1:{port}",
                            error=os.strerror(errno.ECONNREFUSED))


@pytest.mark.parametrize("rank", [1, 2, -1, 0], ids=["again", "too-high", "negative", "rank-0"])
def test_a_rank_that_cannot_be(rank: int, server: RunningServer) -> None:
    first = server.join(1)
    with pytest.raises(EOFError):
        dial(server.server.port, Hello(rank, "n0", 77, "0")).receive(WAIT_S)
    first.send(Failed(report(1)))
    assert first.receive(WAIT_S) == [PrintReason(RootCause(report(1)))]


def test_a_agent_that_begins_with_something_else_is_turned_away(server: RunningServer) -> None:
    with server.call(b"") as older:
        authenticate(older, TOKEN, WAIT_S)
        older.sendall(frame(b'{"rank": 1, "host": "n0", "pid": 77}'))
        assert is_turned_away(older)
    server.join(1)
    assert [type(one) for one in server.excuses] == [ValueError]


def test_a_peer_that_says_nonsense_is_heard_all_the_same(server: RunningServer) -> None:
    wire = server.join(1)
    for nonsense in NONSENSE.values():
        wire._socket.sendall(frame(nonsense))
    wire.send(Failed(report(1)))
    assert wire.receive(WAIT_S) == [PrintReason(RootCause(report(1)))]
    assert [type(error) for error in server.excuses] == [ValueError] * len(NONSENSE)


def test_what_raises_again_and_again_is_dropped() -> None:
    """It could be read at once again, and nobody reads it."""
    excuses: list[Exception] = []
    loop = EventLoop(excuses.append)
    ours, its = socket.socketpair()

    def fail() -> None:
        raise ValueError("seven")

    its.send(b"x")
    loop.watch(ours, fail)
    loop.set_timer("fail", 0, fail)
    loop.set_timer("end", 0.2, loop.stop)
    loop.run()
    assert [str(one) for one in excuses] == ["seven"] * 2
    ours.close()
    its.close()


SCARCE = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
from tests.test_coordinator import RunningServer
server = RunningServer()
server.thread.start()
strangers = [server.call(b"") for _ in range((30 - len(os.listdir("/proc/self/fd"))) // 2 + 1)]
while True:
    try:
        strangers.append(server.call(b""))
    except OSError:
        break
strangers.pop().close()  # one descriptor: either for this end or for the other
strangers.append(server.call(b""))
before = time.process_time()
time.sleep(1)
assert time.process_time() - before < 0.3
for one in strangers:
    one.close()
server.join(1)
assert server.excuses == []
server.end()
"""


@pytest.mark.process
def test_without_descriptors_it_sleeps_until_there_are_some() -> None:
    done = subprocess.run([sys.executable, "-c", SCARCE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    check(done)


def test_strangers_at_the_port_of_a_running_job(quick: Mpi, tmp_path: Path) -> None:
    need(quick.missing())
    script, go = tmp_path / "waits.py", tmp_path / "go"
    script.write_text("import os, sys, time\nprint('READY', flush=True)\n"
                      "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(go.touch)
        job = pool.submit(mpiexec, quick, 2, script, go, env=(mark := processes.marked({})))
        address = port_of_agents(mark)
        limit_s = 4 * authentication.HANDSHAKE_TIMEOUT_S
        strangers = [stack.enter_context(socket.create_connection(address, timeout=limit_s)) for _ in range(200)]
        for data in STRANGERS.values():
            with socket.create_connection(address) as one, contextlib.suppress(ConnectionError):
                one.sendall(data)
        assert all(is_turned_away(stranger) for stranger in strangers)
        time.sleep(LOST_COORDINATOR_TIMEOUT_S + 1)  # which would end ranks that have lost their coordinator
        assert not job.done()
        go.touch()
        done = check(job.result())
    assert noise(done) == []
    assert done.stdout == "READY\n" * 2


def port_of_agents(mark: dict[str, str]) -> tuple[str, int]:
    """Return where the agent of rank 0 of a job listens; it has a title when its rank has joined."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for agent, title in beside(mark).items():
            for one in agent.net_connections("tcp"):
                is_own = one.laddr.ip == "127.0.0.1"  # it also has a port of Hydra's proxy, as all processes of ranks
                if one.status == psutil.CONN_LISTEN and is_own and title.startswith("mpiddp: agent of rank 0 on "):
                    return one.laddr
        time.sleep(0.1)
    raise TimeoutError("no agent listens")


def beside(mark: dict[str, str]) -> dict[psutil.Process, str]:
    """Return the agents of a job that runs with a mark, and their titles, as far as they have one."""
    (value,) = mark.values()
    found = {process: " ".join(words).strip() for process, words in processes.with_mark(value).items()}
    return {process: title for process, title in found.items() if title.startswith("mpiddp: agent of ")}


def failing(folder: Path, line: str, name: str = "fails.py") -> Path:
    """Return a script that says when its rank 1 fails, at a line, while the others sleep."""
    path = folder / name
    path.write_text("import os, sys, time\nif os.environ['RANK'] == '1':\n"
                    "    print(f'FAULT {time.time()}\\n', end='', file=sys.stderr, flush=True)\n"
                    f"    {line}\ntime.sleep(600)\n")
    return path


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
@pytest.mark.parametrize("line", ["raise ValueError({error})", "sys.exit({error})"], ids=["raise", "exit"])
def test_a_very_long_error_on_one_line(name: str, line: str, tmp_path: Path) -> None:
    """Open MPI 5's prterun forwards a megabyte in a second; on a busy machine the rank's grace would end meanwhile."""
    length = 2_000_000 if name == "mpich" else 300_000
    done = check(mpiexec(MPIS[name], 2, failing(tmp_path, line.format(error=f"'x' * {length}"))), 1)
    ended = time.time()
    said = re.search(r"FAULT ([\d.]+)", done.stderr)
    assert said is not None
    assert ended - float(said[1]) < SOON_S
    assert "x" * length in done.stderr
    (report,) = find("launch/failed_rank", done.stderr)
    assert re.search(r"xxx \.\.\. .* characters left out. \.\.\. xxx", report["cause"])
    assert len(report["cause"]) < 3000


def test_a_line_of_a_agent_that_is_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    write_line("odd-\udcff.py\n")
    assert capfd.readouterr().err == "odd-?.py\n"


def test_a_script_whose_name_is_no_text(quick: Mpi, tmp_path: Path) -> None:
    path = failing(tmp_path, "raise ValueError('\\udc80')", os.fsdecode(b"odd-\xff.py"))
    done = check(mpiexec(quick, 2, path), 1)
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
    assert re.search(r"where +\S+odd-\?\.py:4 <module>\n", done.stderr), done.stderr


@pytest.mark.alone
def test_a_package_that_is_missing_everywhere(quick: Mpi) -> None:
    done = check(mpiexec(quick, 4, PROGRAMS / "lacks_package.py"), 1)
    assert done.stderr.count("Traceback (most recent call last)") == done.stderr.count("mpiddp: failed: ") == 1
    assert f"  others   {message('launch/same_error_everywhere', number=4)}\n" in done.stderr


@pytest.mark.thorough("a package that is missing everywhere")
def test_a_package_that_is_missing_on_a_node(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", PROGRAMS / "lacks_package.py", "node2"), 1)
    (report,) = find("launch/failed_rank", done.stderr, host="node2")
    assert report["cause"].startswith("ModuleNotFoundError: ")
    assert f"  others   {message('launch/same_error_on_nodes', number=2, hosts='node2')}\n" in done.stderr


SHOWS_MODULES = """
import os, signal, sys
def show(*_):
    path = f"{os.environ['SHOWN']}/{os.getpid()}"
    with open(path + ".part", "w") as file:
        file.write(" ".join(sys.modules))
    os.rename(path + ".part", path)
signal.signal(signal.SIGRTMIN, show)
"""  # in sitecustomize.py; who is forked has the handler too


@pytest.mark.torch
def test_a_running_agent_has_neither_torch_nor_mpi(quick: Mpi, tmp_path: Path) -> None:
    """Its rank has both: so the look would see them."""
    need(quick.missing())
    (tmp_path / "sitecustomize.py").write_text(SHOWS_MODULES)
    script, go = tmp_path / "waits.py", tmp_path / "go"
    script.write_text("import os, sys, time\nname = sys.argv[1] + os.environ['RANK']\n"
                      "with open(name + '.part', 'w') as file:\n    file.write(str(os.getpid()))\n"
                      "os.rename(name + '.part', name)\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(go.touch)
        job = pool.submit(mpiexec, quick, 2, "--prefix", "--stop-before=1", "--log-dir", tmp_path / "logs", script, go,
                          env={"PYTHONPATH": str(tmp_path), "SHOWN": str(tmp_path), **(mark := processes.marked({}))})
        await_files(tmp_path / "go0", tmp_path / "go1")
        deadline = time.monotonic() + 30
        while len(titles := beside(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        looks = [look_into(one, tmp_path) for one in titles]
        ranks = [look_into(psutil.Process(int(path.read_text())), tmp_path)
                 for path in (tmp_path / "go0", tmp_path / "go1")]
        go.touch()
        check(job.result())
    assert sorted(title.partition(" on ")[0] for title in titles.values()) == [
        f"mpiddp: agent of rank {rank}" for rank in (0, 1)]
    assert [(look.foreign, look.libraries) for look in ranks] == [({"torch", "mpi4py"}, {"torch", "mpi"})] * 2
    assert [(look.foreign, look.libraries) for look in looks] == [(set(), set())] * 2
    assert all({"mpiddp.agent.watcher", "mpiddp.output.forwarder"} <= look.modules for look in looks)


HOLDS = """
import os, time
fork = os.fork
def held():
    pid = fork()
    while pid == 0:
        time.sleep(0.1)
        if os.getppid() == 1:
            os._exit(1)
    return pid
os.fork = held
"""


def test_a_debuggers_own_fork_holds_no_rank(quick: Mpi, tmp_path: Path) -> None:
    """The one of debugpy replaces os.fork, so that the process which it makes waits for a debugger."""
    (tmp_path / "sitecustomize.py").write_text(HOLDS)
    done = check(mpiexec(quick, 2, "--prefix", "-c", "print('ran')", env=on_path(tmp_path)))
    assert done.stdout.count("ran\n") == 2


class Look(NamedTuple):
    """What a process has loaded."""

    modules: set[str]
    foreign: set[str]
    libraries: set[str]


def look_into(process: psutil.Process, folder: Path) -> Look:
    """Return what a process has loaded, in Python and by the dynamic linker."""
    process.send_signal(signal.SIGRTMIN)
    shown = folder / str(process.pid)
    await_files(shown)
    modules = set(shown.read_text().split())
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return Look(modules, {"torch", "mpi4py"} & modules, set(re.findall(r"/lib(torch|mpi)[^/\n]*\.so", maps)))


def await_files(*paths: Path) -> None:
    """Return when all of these files are there."""
    deadline = time.monotonic() + 60
    while missing := [path for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)


IMPORTS_ALL = """
import importlib, pkgutil, sys
import mpiddp.agent, mpiddp.output.forwarder
for one in pkgutil.iter_modules(mpiddp.agent.__path__, "mpiddp.agent."):
    importlib.import_module(one.name)
print(*sys.modules)
"""


@pytest.mark.process
def test_no_module_of_a_agent_imports_torch_or_mpi() -> None:
    """Some of them are imported only when the rank ends."""
    done = subprocess.run([sys.executable, "-c", IMPORTS_ALL], cwd=ROOT, capture_output=True, text=True, timeout=60)
    modules = set(check(done).stdout.split())
    assert {"mpiddp.output.forwarder", "mpiddp.agent.watcher", "mpiddp.agent.process_cleanup"} <= modules
    assert not modules & {"torch", "mpi4py"}


def test_where_something_went_wrong_is_told_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may have no descriptor left for it."""
    monkeypatch.setitem(sys.modules, "traceback", None)
    try:
        int("x")
    except ValueError as error:
        assert re.fullmatch(rf"{re.escape(__file__)}:\d+ test_where_something_.*", process.location_of(error))
