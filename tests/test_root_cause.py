"""Which of several reports is the reason for a failure: plain functions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mpiddp.agent.protocol import Failed
from mpiddp.base.ranks import LogPlan, RankIdentity
from mpiddp.failure.postmortem import describe_signal
from mpiddp.failure.report import format_failure, make_error_record
from mpiddp.failure.root_cause import (
    NOBODY,
    OUT_OF_MEMORY,
    ROOT_CAUSE_WAIT_S,
    SAME_CAUSE_WAIT_S,
    SAME_ERROR_WAIT_S,
    FailureContext,
    JobActivity,
    Report,
    ReportKind,
    RootCause,
    is_peer_loss,
    select_root_cause,
    truncate_report,
)
from mpiddp.ipc.channel import encode
from tests.messages import message

HOSTS = {rank: f"n{rank // 2}" for rank in range(6)}


def report(rank: int, kind: str, signal: str = "") -> Report:
    """Return a report of a rank."""
    return Report(rank, HOSTS[rank], kind, f"cause {rank}", 1, signal=signal)


RAISED, LOST, OTHER_LOST = report(5, ReportKind.ERROR), report(0, ReportKind.SECONDARY), report(1, ReportKind.SECONDARY)
KILLED, STOPPED = report(4, ReportKind.PROCESS_EXIT, "SIGKILL"), report(3, ReportKind.UNREACHABLE)
ABORTED = report(4, ReportKind.PROCESS_EXIT, "SIGABRT")
ONE_LOST = message("launch/lost_connection", ranks="1 other rank")
TWO_LOST = message("launch/lost_connection", ranks="2 other ranks")
RAISED_TOO = message("launch/also_failed", rank=5, host="n2", cause="cause 5")


@pytest.mark.parametrize(("reports", "waited_s", "verdict"), [
    ([], 9, None),
    ([RAISED], 0, RootCause(RAISED)),
    ([LOST, OTHER_LOST, RAISED], 0, RootCause(RAISED, TWO_LOST)),
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
def test_the_reason(reports: list[Report], waited_s: float, verdict: RootCause | None) -> None:
    assert select_root_cause(reports, waited_s, FailureContext(HOSTS)) == verdict


def test_a_crash_that_nobody_saw_is_no_work_of_a_launcher() -> None:
    """The agent that sees the order was killed before; others' saw the launcher's SIGKILLs."""
    crashed, killed = report(2, ReportKind.PROCESS_EXIT, "SIGSEGV"), report(0, ReportKind.PROCESS_EXIT, "SIGKILL")
    context = FailureContext(HOSTS, end_order=(0, 1), reported_s={2: 0.0, 0: 0.03})
    assert select_root_cause([crashed, killed], ROOT_CAUSE_WAIT_S, context) == RootCause(crashed)
    assert select_root_cause([report(2, ReportKind.PROCESS_EXIT, "SIGKILL"), killed], ROOT_CAUSE_WAIT_S,
                             context) == RootCause(killed)


@pytest.mark.parametrize(("signal", "cause", "first"), [
    ("SIGUSR1", "killed", 0), ("SIGSEGV", "killed", 0), ("SIGTERM", "killed", 1), ("", "killed", 1),
    ("SIGSEGV", OUT_OF_MEMORY, 1),
])
def test_a_rank_that_mpiexec_kills_before_the_first_one_has_ended(signal: str, cause: str, first: int) -> None:
    """A dying process closes its connection to mpiexec before others can see its end."""
    reports = [report(1, ReportKind.PROCESS_EXIT, "SIGKILL")._replace(cause=cause),
               report(0, ReportKind.PROCESS_EXIT, signal)]
    verdict = select_root_cause(reports, SAME_CAUSE_WAIT_S, FailureContext(HOSTS, end_order=(1, 0)))
    assert verdict is not None
    assert verdict.first.rank == first


@pytest.mark.parametrize(("order", "waited_s", "first"), [
    ([4, 1], SAME_CAUSE_WAIT_S, 4), ([1, 4], SAME_CAUSE_WAIT_S, 1),
    ([1], SAME_CAUSE_WAIT_S, None), ([1], ROOT_CAUSE_WAIT_S, 1), ([], SAME_CAUSE_WAIT_S, None),
    ([], ROOT_CAUSE_WAIT_S, 1),
    ([3, 4, 1], SAME_CAUSE_WAIT_S, None), ([3, 4, 1], ROOT_CAUSE_WAIT_S, 4),  # nobody has reported on rank 3 yet
])
def test_the_order_in_which_processes_ended(order: list[int], waited_s: float, first: int | None) -> None:
    """Rank 1's report overtook rank 4's."""
    verdict = select_root_cause([report(1, ReportKind.PROCESS_EXIT, "SIGKILL"), KILLED], waited_s,
                                FailureContext(HOSTS, end_order=order))
    assert (verdict and verdict.first.rank) == first


@pytest.mark.parametrize(("signals", "outside"), [
    (["SIGTERM", "SIGTERM"], True), (["SIGINT", "SIGKILL"], True), (["SIGTERM"], False), (["SIGHUP", "SIGKILL"], False),
    (["SIGKILL", "SIGKILL"], False), (["SIGSEGV", "SIGSEGV"], False),
    (["SIGALRM", "SIGALRM"], True), (["SIGALRM"], False),
])
def test_a_signal_to_the_whole_job(signals: list[str], outside: bool) -> None:
    reports = [report(rank, ReportKind.PROCESS_EXIT, signal) for rank, signal in enumerate(signals)]
    verdict = select_root_cause(reports, SAME_CAUSE_WAIT_S, FailureContext(HOSTS, end_order=range(len(signals))))
    assert verdict is not None
    assert verdict.outside == outside


def test_a_rank_whose_agent_has_not_joined_yet() -> None:
    """It may have died by then: what another one has lost is no reason, and a signal was not sent to all."""
    first = FailureContext({0: "n0"}, world_size=2)
    assert select_root_cause([report(0, ReportKind.SECONDARY)], SAME_CAUSE_WAIT_S, first) is None
    assert select_root_cause([report(0, ReportKind.SECONDARY)], ROOT_CAUSE_WAIT_S, first) is not None
    verdict = select_root_cause([report(0, ReportKind.PROCESS_EXIT, "SIGUSR1")], ROOT_CAUSE_WAIT_S, first)
    assert verdict is not None
    assert not verdict.outside


def test_a_signal_that_others_may_get_yet() -> None:
    """Slurm's daemons send it, on a busy node later than on another; mpirun would end the others by it meanwhile."""
    terminated = report(4, ReportKind.PROCESS_EXIT, "SIGTERM")
    assert select_root_cause([terminated], SAME_CAUSE_WAIT_S, FailureContext(HOSTS, by_node=True)) is None
    assert select_root_cause([terminated], ROOT_CAUSE_WAIT_S,
                             FailureContext(HOSTS, by_node=True)) == RootCause(terminated)
    assert select_root_cause([terminated], SAME_CAUSE_WAIT_S, FailureContext(HOSTS)) == RootCause(terminated)
    others = [report(rank, ReportKind.SECONDARY) for rank in HOSTS if rank != 4]
    assert select_root_cause([terminated, *others], SAME_CAUSE_WAIT_S, FailureContext(HOSTS, by_node=True)) is not None


def test_a_rank_that_exits_because_srun_has_told_it_of_another_ones_crash() -> None:
    """Open MPI 5 does so under pmix, and the report on the crash may come later."""
    context = FailureContext(HOSTS, by_srun=True)
    exited, crashed, near = (report(rank, ReportKind.PROCESS_EXIT, signal) for rank, signal in (
        (0, ""), (2, "SIGSEGV"), (1, "SIGSEGV")))
    assert select_root_cause([exited], 0.5, context) is None
    for reports, order, first in (
        ([exited], (0,), 0), ([exited, crashed, report(3, ReportKind.PROCESS_EXIT, "SIGKILL")], (0, 2, 3), 2),
        ([exited, crashed], (), 2), ([exited, near], (0, 1), 0),  # of one host the order is known
    ):
        found = select_root_cause(reports, 1.1, context._replace(end_order=order))
        assert found is not None and found.first.rank == first, reports
    found = select_root_cause([exited, crashed], 1.1, context._replace(by_srun=False))
    assert found is not None and found.first.rank == 0


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
    assert select_root_cause(reports, SAME_CAUSE_WAIT_S, FailureContext(HOSTS, world_size=6)) == RootCause(
        reports[0], others)


@pytest.mark.parametrize(("causes", "waited_s", "waits"), [
    (["seven"], 0, True), (["seven"], SAME_ERROR_WAIT_S, False), (["seven", "eight"], SAME_ERROR_WAIT_S, False),
    (["seven", "seven"], SAME_ERROR_WAIT_S, True), (["seven", "seven"], SAME_CAUSE_WAIT_S, False),
    (["seven"] * 6, 0, False),
])
def test_how_long_the_same_error_of_others_is_waited_for(causes: list[str], waited_s: float, waits: bool) -> None:
    """A rank that is alone with its error does not hold the job's end up for long."""
    reports = [report(rank, ReportKind.ERROR)._replace(cause=cause) for rank, cause in enumerate(causes)]
    assert (select_root_cause(reports, waited_s, FailureContext(HOSTS, world_size=6)) is None) == waits


def killed(came_s: dict[int, float], waited_s: float, context: FailureContext,
           cause: str = "killed") -> RootCause | None:
    """Return the verdict on ranks that got a SIGKILL, their reports at some time after the first."""
    reports = [report(rank, ReportKind.PROCESS_EXIT, "SIGKILL")._replace(cause=cause) for rank in came_s]
    return select_root_cause(reports, waited_s,
                             context._replace(reported_s=came_s, end_order=[*came_s, *context.end_order]))


SRUN = FailureContext(HOSTS, by_node=True, by_srun=True, world_size=6)


@pytest.mark.parametrize(("context", "cause", "outside"), [
    (FailureContext({0: "n0"}, by_srun=True, world_size=1), "killed", True),
    (FailureContext({0: "n0"}, world_size=1), "killed", False),
    (FailureContext({0: "n0"}, by_srun=True, world_size=1), OUT_OF_MEMORY, False)])
def test_the_only_rank_of_srun_is_killed(context: FailureContext, cause: str, outside: bool) -> None:
    """As on a SIGTERM to srun; by hand, it was sent from outside as well."""
    verdict = killed({0: 0.0}, ROOT_CAUSE_WAIT_S, context, cause)
    assert verdict is not None
    assert verdict.outside == outside


AT_ONCE = {4: 0.0, 5: 0.01, 2: 0.02, 3: 0.03, 0: 0.04, 1: 0.05}
FOLLOWED = {4: 0.0, 5: 0.2, 2: 0.21, 3: 0.22, 0: 0.23, 1: 0.24}


def test_ranks_that_srun_kills() -> None:
    """It does on SIGTERM and SIGHUP: the second dies right after the first; after one alone the others live on."""
    verdict = killed(AT_ONCE, 0.05, SRUN)
    assert verdict is not None
    assert format_failure(verdict, None, 4.3) == message("launch/outside_signal", signal="SIGKILL", seconds=4.3) + "\n"
    first = report(4, ReportKind.PROCESS_EXIT, "SIGKILL")._replace(cause="killed")
    assert killed(FOLLOWED, 0.24, SRUN) == RootCause(first)
    # mpiexec follows at once
    assert killed(AT_ONCE, SAME_CAUSE_WAIT_S, SRUN._replace(by_srun=False)) == RootCause(first)


def test_ranks_that_srun_is_about_to_kill() -> None:
    two, lost = {4: 0.0, 5: 0.01}, report(0, ReportKind.SECONDARY)
    assert killed(two, SAME_CAUSE_WAIT_S, SRUN) is None
    named = killed(two, ROOT_CAUSE_WAIT_S, SRUN)
    assert named is not None
    assert not named.outside
    reports = [report(rank, ReportKind.PROCESS_EXIT, "SIGKILL") for rank in (4, 5, 2, 3, 1)]
    context = SRUN._replace(reported_s=AT_ONCE, end_order=[4, 5, 2, 3, 1])
    assert select_root_cause([lost, *reports], 0.05, context) is None  # rank 0 had noticed, and lives
    ended = select_root_cause([lost, *reports], 0.05, context._replace(end_order=[*context.end_order, 0]))
    assert ended is not None
    assert ended.outside


def test_ranks_that_run_out_of_memory_at_once() -> None:
    verdict = killed(AT_ONCE, SAME_CAUSE_WAIT_S, SRUN, describe_signal(9, out_of_memory=True))
    assert verdict is not None
    assert not verdict.outside


def test_a_cause_of_two_megabytes() -> None:
    long = truncate_report(Report(1, "n0", ReportKind.ERROR, "ValueError: " + "x" * 2_000_000, 1, "train.py:3 step",
                                  "\udc80" * 10**6))
    assert len(long.cause) < 2100
    assert long.cause.startswith("ValueError: xxx")
    assert " [1,998,012 characters left out] " in long.cause
    assert len(encode(Failed(long))) < 2**20
    assert long.where == "train.py:3 step"


def test_an_interrupt_that_other_ranks_have_not_come_to_notice() -> None:
    interrupt = [report(0, ReportKind.PROCESS_EXIT, "SIGINT")]
    lone, sent = (select_root_cause(interrupt, SAME_CAUSE_WAIT_S, FailureContext(HOSTS, interrupted=ranks))
                  for ranks in ([0], [0, 3]))
    assert (lone and lone.outside, sent and sent.outside) == (False, True)


class CountedRank(int):
    """A rank that counts how often ranks are compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedRank.comparisons += 1
        return int.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = int.__hash__


@pytest.mark.parametrize(("first", "others", "interrupted"), [
    (("ended", "SIGKILL"), ("ended", "SIGKILL"), False),
    (("own", "SIGINT"), ("own", "SIGINT"), True),
    (("own", ""), ("ended", "SIGABRT"), False),
    (("ended", "SIGABRT"), ("own", ""), False),
])
def test_the_cost_is_proportional_to_the_number_of_ranks(
    first: tuple[str, str], others: tuple[str, str], interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ranks() -> list[int]:
        return [CountedRank(rank) for rank in range(1000)]

    reports = [Report(rank, "n0", kind, f"cause {rank}", 1, signal=signal)
               for rank, (kind, signal) in zip(ranks(), [first, *[others] * 999], strict=True)]
    context = FailureContext(dict.fromkeys(ranks(), "n0"), end_order=ranks()[::-1], world_size=1000,
                             interrupted=ranks() if interrupted else [], reported_s=dict.fromkeys(ranks(), 0.0))
    monkeypatch.setattr(CountedRank, "comparisons", 0)
    assert select_root_cause(reports, ROOT_CAUSE_WAIT_S, context) is not None
    assert CountedRank.comparisons < 10 * len(reports)


def test_a_lone_rank_that_is_interrupted() -> None:
    verdict = select_root_cause([report(0, ReportKind.PROCESS_EXIT, "SIGINT")], 0, FailureContext({0: "n0"}))
    assert verdict is not None
    assert format_failure(verdict, None, 3.21) == message("launch/outside_signal", signal="SIGINT", seconds=3.2) + "\n"


LATE = LOST._replace(cause="RuntimeError: Timed out waiting 5000ms for recv operation to complete",
                     where="train.py:9 step")


def test_a_rank_that_was_waited_for_in_vain() -> None:
    others = [LATE._replace(rank=rank) for rank in HOSTS if rank not in (1, LATE.rank)]
    verdict = select_root_cause([LATE, *others], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity({1: "train.py:40 load"}, {1})))
    assert verdict is not None
    cause = message("launch/late_rank", ranks="5 ranks", call="train.py:9 step", cause=LATE.cause)
    assert verdict.first == Report(1, HOSTS[1], ReportKind.UNREACHABLE, cause, 1, "train.py:40 load")


def test_who_waits_for_whom_is_not_known_of_several_groups() -> None:
    seen = JobActivity({1: "train.py:40 load"}, {1}, has_groups=True)
    verdict = select_root_cause([LATE], ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, activity=seen))
    assert verdict is not None
    assert verdict.first == LATE
    assert verdict.others == message("launch/waiting_rank", rank=1, host=HOSTS[1], place="train.py:40 load")


def test_ranks_that_have_waited_in_unlike_calls() -> None:
    calls = {rank: f"train.py:{40 + (rank == 0)} main" for rank in HOSTS}
    late = LOST._replace(cause="Timed out waiting 6000ms for recv operation", where=calls[LOST.rank])
    verdict = select_root_cause([late], ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, activity=JobActivity(calls=calls)))
    assert verdict is not None
    assert (verdict.first.rank, verdict.first.status) == (NOBODY, late.status)
    assert format_failure(verdict, None, 9.0).splitlines()[0] == message(
        "launch/different_calls", calls="rank 0 at train.py:41 main, ranks 1-5 at train.py:40 main",
        cause=late.cause)
    extra = make_error_record(verdict, None, "", 0, 0)["message"]
    assert isinstance(extra, dict)
    assert extra["extraInfo"]["rank"] is None
    unknown = select_root_cause([late], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity(calls={0: calls[0]})))
    assert unknown is not None
    assert unknown.first == late


def test_a_timeout_of_something_else_blames_nobody() -> None:
    late = LOST._replace(cause="TimeoutError: database server: timed out waiting for a licence")
    verdict = select_root_cause([late], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity({1: "train.py:40 load"}, {1})))
    assert verdict is not None
    assert verdict.first == late


def test_a_lost_connection_is_no_sign_that_a_rank_is_late() -> None:
    verdict = select_root_cause([LOST], ROOT_CAUSE_WAIT_S,
                                FailureContext(HOSTS, activity=JobActivity({1: "train.py:40 load"}, {1})))
    assert verdict is not None
    assert verdict.first == LOST
    assert verdict.others == message("launch/waiting_rank", rank=1, host=HOSTS[1], place="train.py:40 load")


def test_what_is_known_of_the_others() -> None:
    verdict = select_root_cause([LOST], ROOT_CAUSE_WAIT_S, FailureContext(HOSTS, silent=[3], finished=[1, 2]))
    assert verdict is not None
    finished = message("launch/finished_ranks", finished="rank 1 on n0, rank 2 on n1",
                       others="rank 4 on n2, rank 5 on n2")
    assert verdict.others == f"{message('launch/no_response', ranks='rank 3 on n1')}; {finished}"


AT_EXIT = LOST._replace(cause=f"{message('launch/exit_timeout', limit='3 s')}: rank 1 on n0 (train.py:40 load)")


def test_a_rank_that_does_not_finish_is_named_once() -> None:
    late, both = (select_root_cause([AT_EXIT], ROOT_CAUSE_WAIT_S, FailureContext(
        HOSTS, finished=[2], activity=JobActivity({1: "train.py:40 load", 3: "train.py:41 load"}, ranks)))
        for ranks in ({1}, {1, 3}))
    assert late is not None
    assert late.first.cause == message("launch/late_at_exit", ranks="rank 0", limit="3 s")
    assert (late.first.rank, late.first.where) == (1, "train.py:40 load")
    assert "rank 1" not in late.others
    assert both is not None
    assert both.first == AT_EXIT
    assert "rank 1" not in both.others
    unknown = select_root_cause([LOST._replace(cause=f"{message('launch/exit_timeout', limit='3 s')}: unknown ranks")],
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


def test_an_interrupt_without_a_signal_is_an_error_like_any() -> None:
    """Word of a signal may come after the report."""
    interrupt = report(0, ReportKind.ERROR, "SIGINT")
    alone = FailureContext({0: "n0"}, world_size=1)
    assert select_root_cause([interrupt], 0, alone) is None
    assert select_root_cause([interrupt], SAME_CAUSE_WAIT_S, alone) == RootCause(interrupt._replace(signal=""))
    sent = select_root_cause([interrupt], 0, alone._replace(interrupted=[0]))
    assert sent is not None
    assert sent.outside
    lone = select_root_cause([interrupt], SAME_CAUSE_WAIT_S, FailureContext(HOSTS, interrupted=[0]))
    assert lone is not None
    assert (lone.outside, lone.first.kind, lone.first.cause) == (False, ReportKind.PROCESS_EXIT, "cause 0 (SIGINT)")


def test_a_program_that_has_exited_while_others_waited_for_it() -> None:
    exited = report(2, ReportKind.ERROR)
    context = FailureContext(HOSTS, finished=[2], exits=[exited])
    assert select_root_cause([LOST, OTHER_LOST], SAME_CAUSE_WAIT_S, context) is None
    assert select_root_cause([LOST, OTHER_LOST], ROOT_CAUSE_WAIT_S,
                             context) == RootCause(exited, TWO_LOST)
    assert select_root_cause([LOST, KILLED], ROOT_CAUSE_WAIT_S,
                             context) == RootCause(KILLED, ONE_LOST)


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
    report = format_failure(RootCause(crash), who, 1.0, 512)
    assert report.splitlines()[-1] == message("launch/log_incomplete", log="/logs/rank-00005.n2.log", byte=512)


def test_the_block_on_a_killed_rank_says_where_to_look() -> None:
    killed = Report(5, "n2", ReportKind.PROCESS_EXIT, describe_signal(9, out_of_memory=False), 137, signal="SIGKILL")
    advice = message("launch/check_memory", commands="dmesg on the node")
    assert f"\n  do       {advice}\n" in format_failure(RootCause(killed), None, 1.0)
    assert "\n  do  " not in format_failure(RootCause(killed._replace(signal="SIGSEGV")), None, 1.0)
    assert killed.cause == message("launch/killed_by_sigkill")
    assert describe_signal(9, out_of_memory=True) == message("launch/out_of_memory")


def test_the_error_record_has_torchelastics_form() -> None:
    record = make_error_record(RootCause(RAISED), None, "Traceback", 1700000000, 0)["message"]
    assert isinstance(record, dict)
    assert record["message"] == "cause 5"
    assert record["extraInfo"]["py_callstack"] == "Traceback"
    assert record["extraInfo"]["timestamp"] == "1700000000"
