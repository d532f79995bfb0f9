"""Which of several reports is the reason for a failure: plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mpiddp.agent.protocol import Failed
from mpiddp.base.ranks import LogPlan, RankIdentity
from mpiddp.failure.postmortem import describe_signal
from mpiddp.failure.report import format_failure, make_error_record
from mpiddp.failure.root_cause import (
    KILL_SPREAD_S,
    NOBODY,
    NODE_LOST,
    ROOT_CAUSE_WAIT_S,
    RULES,
    SAME_CAUSE_WAIT_S,
    SAME_ERROR_WAIT_S,
    STEP_DAEMON_KILLED,
    Case,
    FailureContext,
    JobActivity,
    Report,
    ReportKind,
    Reports,
    RootCause,
    conclude_abort,
    conclude_death,
    conclude_error,
    conclude_isolation,
    conclude_outside,
    conclude_secondary,
    conclude_step_daemon,
    is_peer_loss,
    make_loss_report,
    select_root_cause,
    truncate_report,
)
from mpiddp.ipc.channel import encode
from tests.messages import message

HOSTS = {rank: f"n{rank // 2}" for rank in range(6)}


def report(rank: int, kind: str, signal: str = "") -> Report:
    """Return a report of a rank."""
    return Report(rank, HOSTS[rank], kind, f"cause {rank}", 1, signal=signal)


def select(reports: Sequence[Report], waited_s: float, context: FailureContext) -> RootCause | None:
    """Return the root cause of reports that came in this order."""
    return select_root_cause(Reports(reports), waited_s, context)


RAISED, LOST, OTHER_LOST = report(5, ReportKind.ERROR), report(0, ReportKind.SECONDARY), report(1, ReportKind.SECONDARY)
KILLED, STOPPED = report(4, ReportKind.PROCESS_EXIT, "SIGKILL"), report(3, ReportKind.UNREACHABLE)
ABORTED = report(4, ReportKind.PROCESS_EXIT, "SIGABRT")
ONE_LOST = message("launch/lost_connection", ranks="1 other rank")
TWO_LOST = message("launch/lost_connection", ranks="2 other ranks")
RAISED_TOO = message("launch/also_failed", rank=5, host="n2", cause="cause 5")


@pytest.mark.parametrize(("reports", "waited_s", "root_cause"), [
    ([], 9, None),
    ([RAISED], 0, None),
    ([RAISED], SAME_ERROR_WAIT_S, RootCause(RAISED)),
    ([LOST, OTHER_LOST, RAISED], SAME_ERROR_WAIT_S, RootCause(RAISED, TWO_LOST)),
    ([KILLED], 0, None),
    ([KILLED], SAME_CAUSE_WAIT_S, RootCause(KILLED)),
    ([LOST, KILLED], SAME_CAUSE_WAIT_S, RootCause(KILLED, ONE_LOST)),
    ([KILLED, RAISED], SAME_CAUSE_WAIT_S, RootCause(KILLED, RAISED_TOO)),
    ([RAISED, KILLED], SAME_CAUSE_WAIT_S, RootCause(KILLED, RAISED_TOO)),
    ([ABORTED, RAISED], ROOT_CAUSE_WAIT_S, RootCause(ABORTED, RAISED_TOO)),
    ([RAISED, ABORTED], SAME_CAUSE_WAIT_S, RootCause(RAISED)),
    ([LOST, STOPPED], SAME_CAUSE_WAIT_S, RootCause(STOPPED, ONE_LOST)),
    ([LOST], SAME_CAUSE_WAIT_S, None),
    ([LOST, OTHER_LOST], ROOT_CAUSE_WAIT_S, RootCause(LOST, ONE_LOST)),
    ([report(rank, ReportKind.SECONDARY) for rank in range(6)], 0,
     RootCause(LOST, message("launch/lost_connection", ranks="5 other ranks"))),
])
def test_the_root_cause(reports: list[Report], waited_s: float, root_cause: RootCause | None) -> None:
    assert select(reports, waited_s, FailureContext(HOSTS)) == root_cause


@pytest.mark.parametrize(("by_srun", "waited_s", "is_clear"), [
    (True, SAME_CAUSE_WAIT_S, False), (True, KILL_SPREAD_S, True), (False, SAME_CAUSE_WAIT_S, True)])
def test_an_srun_that_gets_a_signal_has_time_to_kill_all_agents(by_srun: bool, waited_s: float, is_clear: bool) -> None:
    """So that the first of them is not blamed, also if all ranks have noticed."""
    gone = make_loss_report(3, "n1", "")
    reports = [gone, *(report(rank, ReportKind.SECONDARY) for rank in (0, 1, 2, 4, 5))]
    selected = select(reports, waited_s, FailureContext(HOSTS, world_size=6, by_srun=by_srun))
    assert (selected is not None and selected.first == gone) == is_clear


TERMINATED = report(4, ReportKind.PROCESS_EXIT, "SIGTERM")
INTERRUPTED = report(2, ReportKind.ERROR, "SIGINT")
AT_9 = INTERRUPTED._replace(where="train.py:9 step")
AT_7 = INTERRUPTED._replace(rank=0, host="n0", where="train.py:7 step")
WAS_AT = f"  {message('launch/waiting_rank', rank='{}', host='n{}', place='train.py:{} step')}"
DAEMON = report(3, ReportKind.UNREACHABLE)._replace(cause=STEP_DAEMON_KILLED)


@pytest.mark.parametrize(("rule", "reports", "signals", "root_cause"), [
    # srun: slurmstepd is killed by hand or for lack of memory, its ranks live or die with it.
    (conclude_step_daemon, [KILLED, DAEMON], [], RootCause(DAEMON)),
    # mpirun of Open MPI, mpiexec of MPICH, scancel JOB: agents get SIGTERM; others may lose a rank that it ends first.
    (conclude_outside, [LOST, RAISED, TERMINATED], ["SIGTERM"], RootCause(TERMINATED, outside=True)),
    # mpiexec of MPICH and Intel MPI, Ctrl-C: agents get SIGINT, and ranks raise KeyboardInterrupt.
    (conclude_outside, [LOST, INTERRUPTED], ["SIGINT"],
     RootCause(INTERRUPTED._replace(kind=ReportKind.PROCESS_EXIT, cause=f"{INTERRUPTED.cause} (SIGINT)"),
               outside=True)),
    # Any launcher: a user's `kill` of one rank, of which no agent knows.
    (conclude_death, [LOST, TERMINATED], ["SIGUSR1"], RootCause(TERMINATED, ONE_LOST)),
    # Any launcher: none of them sees a rank's end before its agent has ended.
    (conclude_death, [RAISED, KILLED], [], RootCause(KILLED, RAISED_TOO)),
    (conclude_error, [LOST, RAISED], [], RootCause(RAISED, ONE_LOST)),
    # Any launcher, NCCL: its watchdog aborts a rank whose collective takes too long, because another rank has failed.
    (conclude_abort, [ABORTED, LOST], [], RootCause(ABORTED, ONE_LOST)),
    # Any launcher: a rank hangs, which says nothing, and the others time out.
    (conclude_secondary, [LOST, OTHER_LOST], [], RootCause(LOST, ONE_LOST)),
])
def test_each_rule(
    rule: Callable[[Case], object], reports: list[Report], signals: list[str], root_cause: RootCause
) -> None:
    """With the launchers under which it was seen."""
    context = FailureContext(HOSTS, signals=signals)
    concluding = next(row.conclude for row in RULES if isinstance(
        row.conclude(Case(Reports(reports), ROOT_CAUSE_WAIT_S, context)), RootCause))
    assert concluding is rule
    assert select(reports, ROOT_CAUSE_WAIT_S, context) == root_cause


def test_every_rule_is_tested() -> None:
    assert [row.conclude for row in RULES] == [
        conclude_step_daemon, conclude_outside, conclude_isolation, conclude_death, conclude_error, conclude_abort,
        conclude_secondary]


UNREACHABLE = report(2, ReportKind.UNREACHABLE)._replace(cause=f"{NODE_LOST} (timed out)")
ELSEWHERE = (2, 3, 4, 5)


@pytest.mark.parametrize(("reports", "silent", "is_isolated"), [
    ([UNREACHABLE], (3, 4, 5), True),
    ([LOST, OTHER_LOST], ELSEWHERE, True),
    ([ABORTED._replace(rank=0, host="n0")], ELSEWHERE, True),
    ([UNREACHABLE], (3,), False),
    ([LOST, report(2, ReportKind.SECONDARY)], ELSEWHERE, False),
    ([LOST], (1, *ELSEWHERE), True),
    ([OTHER_LOST], (0, *ELSEWHERE), False),
    ([KILLED], (2, 3, 5), False),
    ([LOST, report(1, ReportKind.ERROR)], ELSEWHERE, False),
])
def test_a_node_that_has_lost_its_network(reports: list[Report], silent: tuple[int, ...], is_isolated: bool) -> None:
    """As the coordinator on it sees that: it gets no answer from any other node."""
    context = FailureContext(HOSTS, silent)
    root_cause = select(reports, ROOT_CAUSE_WAIT_S, context)
    assert root_cause is not None
    cause = message("launch/network_lost", host="n0", others="n1, n2")
    assert (root_cause.first.cause == cause) == is_isolated
    if is_isolated:
        assert (root_cause.first.rank, root_cause.first.kind) == (0, ReportKind.UNREACHABLE)
        assert select(reports, SAME_CAUSE_WAIT_S, context) is None


def test_two_nodes_that_cannot_reach_each_other() -> None:
    """Either may have lost its network."""
    hosts = {rank: HOSTS[rank] for rank in range(4)}
    root_cause = select([LOST], ROOT_CAUSE_WAIT_S, FailureContext(hosts, (2, 3)))
    assert root_cause == RootCause(
        Report(NOBODY, "", ReportKind.UNREACHABLE, message("launch/nodes_cut_off", host="n0", other="n1"), 1),
        message("launch/also_failed", rank=0, host="n0", cause="cause 0"))


def test_a_signal_of_which_the_agents_word_comes_later() -> None:
    assert select([TERMINATED], 0, FailureContext(HOSTS)) is None
    sent = select([TERMINATED], 0, FailureContext(HOSTS, signals=["SIGTERM"]))
    assert sent is not None
    assert format_failure(sent, None, 3.21) == message("launch/outside_signal", signal="SIGTERM", seconds=3.2) + "\n"


def test_an_interrupt_waits_for_the_snapshot() -> None:
    """But not for ever."""
    context = FailureContext(HOSTS, signals=["SIGINT"], activity=JobActivity(is_pending=True))
    assert select([INTERRUPTED], SAME_CAUSE_WAIT_S, context) is None
    assert select([INTERRUPTED], ROOT_CAUSE_WAIT_S, context) is not None


@pytest.mark.parametrize(("reports", "activity", "shown"), [
    ([INTERRUPTED], JobActivity(), ""),
    ([AT_9], JobActivity(), WAS_AT.format(2, 1, 9)),
    ([AT_9, AT_7], JobActivity(), WAS_AT.format(0, 0, 7)),
    ([AT_9, AT_7], JobActivity(calls={0: "train.py:5 step"}), WAS_AT.format(0, 0, 7)),
    ([AT_9], JobActivity(calls={0: "train.py:5 step"}), WAS_AT.format(0, 0, 5)),
    ([AT_9], JobActivity(table="  a table"), "  a table"),
])
def test_where_an_interrupted_job_was(reports: list[Report], activity: JobActivity, shown: str) -> None:
    sent = select(reports, SAME_CAUSE_WAIT_S, FailureContext(HOSTS, signals=["SIGINT"], activity=activity))
    assert sent is not None
    assert sent.others == shown


def test_an_interrupt_without_a_signal_is_an_error_like_any() -> None:
    alone = FailureContext({2: "n1"}, world_size=1)
    assert select([INTERRUPTED], 0, alone) is None
    assert select([INTERRUPTED], SAME_CAUSE_WAIT_S, alone) == RootCause(INTERRUPTED._replace(signal=""))


def test_a_rank_whose_agent_has_not_joined_yet() -> None:
    """It may have died by then: what another one has lost is no reason."""
    first, lost = FailureContext({0: "n0"}, world_size=2), [report(0, ReportKind.SECONDARY)]
    assert select(lost, SAME_CAUSE_WAIT_S, first) is None
    assert select(lost, ROOT_CAUSE_WAIT_S, first) is not None


@pytest.mark.parametrize(("same", "others"), [
    (range(6), message("launch/same_error_everywhere", number=6)),
    ([2, 3], message("launch/same_error_on_nodes", number=2, hosts="n1")),
    ([0, 1, 4, 5], message("launch/same_error_on_nodes", number=4, hosts="n0, n2")),
    ([0, 2, 3], message("launch/same_error_on_some", number=3, ranks=6)), ([3], ""),
])
def test_ranks_that_come_to_the_same_error(same: Sequence[int], others: str) -> None:
    """The others come to another one, or raise it at another line."""
    reports = [Report(rank, HOSTS[rank], ReportKind.ERROR, "seven", 1, "" if rank in same else f"line {rank}")
               for rank in HOSTS]
    reports.sort(key=lambda one: one.rank not in same)
    assert select(reports, SAME_CAUSE_WAIT_S, FailureContext(HOSTS, world_size=6)) == RootCause(
        reports[0], others)


@pytest.mark.parametrize(("causes", "waited_s", "waits"), [
    (["seven"], 0, True), (["seven"], SAME_ERROR_WAIT_S, False), (["seven", "eight"], SAME_ERROR_WAIT_S, False),
    (["seven", "seven"], SAME_ERROR_WAIT_S, True), (["seven", "seven"], SAME_CAUSE_WAIT_S, False),
    (["seven"] * 6, 0, False),
])
def test_how_long_the_same_error_of_others_is_waited_for(causes: list[str], waited_s: float, waits: bool) -> None:
    """A rank that is alone with its error does not hold the job's end up for long."""
    reports = [report(rank, ReportKind.ERROR)._replace(cause=cause) for rank, cause in enumerate(causes)]
    assert (select(reports, waited_s, FailureContext(HOSTS, world_size=6)) is None) == waits


def test_a_cause_of_two_megabytes() -> None:
    long = truncate_report(Report(1, "n0", ReportKind.ERROR, "ValueError: " + "x" * 2_000_000, 1, "train.py:3 step",
                                  "\udc80" * 10**6))
    assert len(long.cause) < 2100
    assert long.cause.startswith("ValueError: xxx")
    assert " [1,998,012 characters left out] " in long.cause
    assert len(encode(Failed(long))) < 2**20
    assert long.where == "train.py:3 step"


class CountedRank(int):
    """A rank that counts how often it is looked up or compared."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        CountedRank.uses += 1
        return int.__eq__(self, other)

    def __hash__(self) -> int:
        CountedRank.uses += 1
        return int.__hash__(self)


@pytest.mark.parametrize(("first", "others"), [
    (("ended", "SIGKILL"), ("ended", "SIGKILL")), (("ended", "SIGTERM"), ("ended", "SIGTERM")),
    (("own", "SIGINT"), ("own", "SIGINT")), (("own", ""), ("ended", "SIGABRT")), (("ended", "SIGABRT"), ("own", "")),
    (("consequence", ""), ("consequence", "")),
])
def test_the_cost_is_proportional_to_the_number_of_ranks(
    first: tuple[str, str], others: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the rules are applied to each new report."""
    reports = Reports()
    hosts: dict[int, str] = {CountedRank(rank): "n0" for rank in range(1000)}
    context = FailureContext(hosts, signals=["SIGINT", "SIGTERM"], world_size=1000)
    monkeypatch.setattr(CountedRank, "uses", 0)
    for rank in range(1000):
        kind, signal = others if rank else first
        reports.add(Report(CountedRank(rank), "n0", kind, f"cause {rank}", 1, signal=signal))
        found = select_root_cause(reports, 0.0, context)
    assert found is not None
    assert CountedRank.uses < 20 * 1000


LATE = LOST._replace(cause="RuntimeError: Timed out waiting 5000ms for recv operation to complete",
                     where="train.py:9 step")


def test_a_rank_that_was_waited_for_in_vain() -> None:
    others = [LATE._replace(rank=rank) for rank in HOSTS if rank not in (1, LATE.rank)]
    root_cause = select([LATE, *others], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity({1: "train.py:40 load"}, {1})))
    assert root_cause is not None
    cause = message("launch/late_rank", ranks="5 ranks", call="train.py:9 step", cause=LATE.cause)
    assert root_cause.first == Report(1, HOSTS[1], ReportKind.UNREACHABLE, cause, 1, "train.py:40 load")


def test_who_waits_for_whom_is_not_known_of_several_groups() -> None:
    seen = JobActivity({1: "train.py:40 load"}, {1}, has_groups=True)
    root_cause = select([LATE], ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, activity=seen))
    assert root_cause is not None
    assert root_cause.first == LATE
    assert root_cause.others == message("launch/waiting_rank", rank=1, host=HOSTS[1], place="train.py:40 load")


def test_ranks_that_have_waited_in_unlike_calls() -> None:
    calls = {rank: f"train.py:{40 + (rank == 0)} main" for rank in HOSTS}
    late = LOST._replace(cause="Timed out waiting 6000ms for recv operation", where=calls[LOST.rank])
    root_cause = select([late], ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, activity=JobActivity(calls=calls)))
    assert root_cause is not None
    assert (root_cause.first.rank, root_cause.first.status) == (NOBODY, late.status)
    assert format_failure(root_cause, None, 9.0).splitlines()[0] == message(
        "launch/different_calls", calls="rank 0 at train.py:41 main, ranks 1-5 at train.py:40 main",
        cause=late.cause)
    extra = make_error_record(root_cause, None, "", 0, 0)["message"]
    assert isinstance(extra, dict)
    assert extra["extraInfo"]["rank"] is None
    unknown = select([late], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity(calls={0: calls[0]})))
    assert unknown is not None
    assert unknown.first == late


def test_a_timeout_of_something_else_blames_nobody() -> None:
    late = LOST._replace(cause="TimeoutError: database server: timed out waiting for a licence")
    root_cause = select([late], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity({1: "train.py:40 load"}, {1})))
    assert root_cause is not None
    assert root_cause.first == late


def test_a_lost_connection_is_no_sign_that_a_rank_is_late() -> None:
    root_cause = select([LOST], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity({1: "train.py:40 load"}, {1})))
    assert root_cause is not None
    assert root_cause.first == LOST
    assert root_cause.others == message("launch/waiting_rank", rank=1, host=HOSTS[1], place="train.py:40 load")


def test_what_is_known_of_the_others() -> None:
    root_cause = select([LOST], ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, silent=[3], finished=[1, 2]))
    assert root_cause is not None
    finished = message("launch/finished_ranks", finished="rank 1 on n0, rank 2 on n1",
                       others="rank 4 on n2, rank 5 on n2")
    assert root_cause.others == f"{message('launch/no_response', ranks='rank 3 on n1')}; {finished}"


AT_EXIT = LOST._replace(cause=f"{message('launch/exit_timeout', limit='3 s')}: rank 1 on n0 (train.py:40 load)")


def test_a_rank_that_does_not_finish_is_named_once() -> None:
    late, both = (select([AT_EXIT], ROOT_CAUSE_WAIT_S, FailureContext(
        HOSTS, finished=[2], activity=JobActivity({1: "train.py:40 load", 3: "train.py:41 load"}, ranks)))
        for ranks in ({1}, {1, 3}))
    assert late is not None
    assert late.first.cause == message("launch/late_at_exit", ranks="rank 0", limit="3 s")
    assert (late.first.rank, late.first.where) == (1, "train.py:40 load")
    assert "rank 1" not in late.others
    assert both is not None
    assert both.first == AT_EXIT
    assert "rank 1" not in both.others
    unknown = select([LOST._replace(cause=f"{message('launch/exit_timeout', limit='3 s')}: unknown ranks")],
                                ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, finished=[2], activity=JobActivity(
                                    {1: "train.py:40 load", 3: "train.py:41 load"}, {1, 3})))
    assert unknown is not None
    assert message("launch/waiting_rank", rank=1, host=HOSTS[1], place="train.py:40 load") in unknown.others


C10D = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(("error", "file", "consequence"), [
    ("RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:29903", "train.py", True),
    ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1", "train.py", True),
    ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", "train.py", True),
    ("mpi4py.MPI.Exception: Other MPI error, error stack:\nwait(1): Connection reset by peer", "train.py", True),
    ("builtins.RuntimeError: Connection reset by peer", C10D, True),
    ("builtins.ValueError: seven", C10D, False), ("builtins.RuntimeError: CUDA out of memory", "train.py", False),
    ("builtins.ConnectionRefusedError: [Errno 111] Connection refused", "train.py", False),
    ("builtins.BrokenPipeError: [Errno 32] Broken pipe", "/lib/site-packages/wandb/sdk.py", False),
    ("builtins.RuntimeError: connection reset by peer", "/torch/distributed/checkpoint/filesystem.py", False),
])
def test_the_loss_of_a_peer_is_known_by_its_words_and_by_who_raised_it(
    error: str, file: str, consequence: bool
) -> None:
    assert is_peer_loss(error, file) == consequence


def test_the_block_names_all_there_is() -> None:
    who = RankIdentity(5, 6, 1, "n2", "cuda:1", 77, "run", 5.0, log=LogPlan("/logs/rank-00005.n2.log"))
    cause = message("launch/killed_by_signal", signal="SIGSEGV", description="Segmentation fault")
    assert describe_signal(11, out_of_memory=False) == cause
    crash = Report(5, "n2", ReportKind.PROCESS_EXIT, cause, 139, "train.py:3 step", "Fatal Python error\n  File x")
    assert format_failure(RootCause(crash, TWO_LOST), who, 12.34).splitlines() == [
        "[rank 5 on n2] Fatal Python error", "[rank 5 on n2]   File x",
        *message("launch/failure_report", rank=5, host="n2", cause=cause, where=crash.where, ranks=6, local_rank=1,
                 device="cuda:1", pid=77, seconds=12.3, status=139).splitlines(),
        f"  others   {TWO_LOST}", "  log      /logs/rank-00005.n2.log"]
    pool = crash._replace(cause="BrokenProcessPool: A process in the process pool was terminated abruptly", signal="")
    (advice,) = [line for line in format_failure(RootCause(pool), who, 1.0).splitlines() if line.startswith("  do")]
    assert 'if __name__ == "__main__":' in advice and "DataLoader" not in advice
    report = format_failure(RootCause(crash), who, 1.0, 512)
    assert report.splitlines()[-1] == message("launch/log_incomplete", log="/logs/rank-00005.n2.log", byte=512)


def test_the_block_on_a_killed_rank_says_where_to_look() -> None:
    killed = Report(5, "n2", ReportKind.PROCESS_EXIT, describe_signal(9, out_of_memory=False), 137, signal="SIGKILL")
    advice = message("launch/check_memory", commands="dmesg on the node")
    assert f"\n  do       {advice}\n" in format_failure(RootCause(killed), None, 1.0)
    crashed = killed._replace(cause=describe_signal(11, out_of_memory=False), signal="SIGSEGV")
    assert "\n  do  " not in format_failure(RootCause(crashed), None, 1.0)
    assert killed.cause == message("launch/killed_by_sigkill")
    assert describe_signal(9, out_of_memory=True) == message("launch/out_of_memory")


def test_the_error_record_has_torchelastics_form() -> None:
    record = make_error_record(RootCause(RAISED), None, "Traceback", 1700000000, 0)["message"]
    assert isinstance(record, dict)
    assert record["message"] == "cause 5"
    assert record["extraInfo"]["py_callstack"] == "Traceback"
    assert record["extraInfo"]["timestamp"] == "1700000000"
