"""No rank can go on, because ranks of a process group wait in different collectives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpiddp.failure.root_cause import NOBODY, Report, ReportKind
from mpiddp.where.snapshot import CollectiveSeq, RankSample
from mpiddp.where.stall import DeadlockDetector, find_mismatch
from tests.hangs.histories import Job
from tests.messages import find, message
from tests.support import Mpi, mpiexec
from tests.test_where_stacks import BACKWARD, LOAD, MAIN, REDUCES, STEP, collective, rank

BARRIER = (MAIN, STEP, *collective("barrier"))
RECEIVES = (MAIN, STEP, *collective("recv"))
HEALTHY, FAULTY, INTERVAL_S = 1000, 200, 5.0


def at(number: int, frames: tuple[object, ...] = REDUCES, entered: int = 5, **fields: object) -> RankSample:
    group = CollectiveSeq(entered, "0-2", "0")
    return rank(number, frames, **{"sequences": (group,), "waits_in": "0", **fields})  # type: ignore[arg-type]


def test_ranks_that_wait_in_different_collectives() -> None:
    report = find_mismatch([at(0, BARRIER), at(1), at(2)])
    assert report is not None
    assert report._replace(cause="") == Report(NOBODY, "", ReportKind.UNREACHABLE, "", 1)
    assert report.cause == message("launch/different_collectives", calls=(
        "rank 0 on n0 in barrier (train.py:92 step), ranks 1-2 in all_reduce (train.py:92 step)"))


def test_ranks_that_wait_in_different_calls_of_a_collective() -> None:
    report = find_mismatch([at(0), at(1, entered=6), at(2)])
    assert report is not None
    assert report.cause == message("launch/different_collectives", calls=(
        "ranks 0,2 in all_reduce (train.py:92 step) at sequence number 5, "
        "rank 1 on n0 in all_reduce (train.py:92 step) at sequence number 6"))


def test_a_rank_whose_gradients_nobody_awaits() -> None:
    assert find_mismatch([at(0, BARRIER), at(1, BACKWARD), at(2, BACKWARD)]) is not None


PAIR = CollectiveSeq(5, "0-2", "0"), CollectiveSeq(1, "1-2", "1")


def test_ranks_of_another_group_wait_too() -> None:
    pair = CollectiveSeq(5, "0-1", "0"), CollectiveSeq(5, "2", "1")
    assert find_mismatch([at(0, BARRIER, sequences=pair[:1]), at(1, sequences=pair[:1]),
                          at(2, sequences=pair[1:], waits_in="1")]) is not None


@pytest.mark.parametrize("ranks", [
    [at(0), at(1), at(2)],  # the network, or a device
    [at(0, BARRIER), at(1), at(2, (MAIN, LOAD), waits_in="")],  # which the others may wait for
    [at(0, BARRIER), at(1), at(2, has_answered=False)],
    [at(0, BARRIER), at(1), at(2, state="t")],
    [at(0, BARRIER), at(1), at(2, unseen="its sockets are not visible")],
    [at(0, BARRIER), at(1), at(2, has_ended=True)],
    [at(0, BARRIER), at(1)],  # rank 2 is not sampled
    [at(0, BARRIER), at(1, spins=True), at(2)],  # its GPU may work
    [at(0, BARRIER), at(1, (*REDUCES[:2], *collective("new_group")), waits_in=""), at(2)],
    [at(0, BARRIER), at(1, RECEIVES), at(2)],
    [at(0, BARRIER), at(1, sequences=PAIR, waits_in="1"), at(2, sequences=PAIR, waits_in="1")],
    [at(0, BARRIER), at(1, BACKWARD, waits_in=""), at(2)],  # in which group is unknown
])
def test_a_job_that_may_go_on(ranks: list[RankSample]) -> None:
    assert find_mismatch(ranks) is None


def test_data_on_its_way_is_awaited() -> None:
    still = [at(0, BARRIER), at(1), at(2)]
    sends = [at(0, BARRIER), at(1, unacked_bytes=100), at(2)]
    detector = DeadlockDetector()
    assert [detector.update(ranks, 5.0 * number) is not None
            for number, ranks in enumerate([still, sends, sends, still])] == [False, False, False, True]


def named(seed: int, has_fault: bool = False) -> list[str]:
    """Return what is said of a simulated job."""
    detector = DeadlockDetector()
    reports = [detector.update(ranks, at_s) for at_s, ranks in Job(seed, has_fault).snapshots(INTERVAL_S)]
    return [report.cause for report in reports if report is not None]


def test_healthy_jobs_are_in_no_deadlock() -> None:
    assert {seed: causes for seed in range(HEALTHY) if (causes := named(seed))} == {}


def test_a_job_in_which_a_rank_leaves_out_a_call_is_in_a_deadlock() -> None:
    found = {seed: named(seed, has_fault=True) for seed in range(FAULTY)}
    assert [seed for seed, causes in found.items() if not causes] == []
    kinds = {name: sum(bool(find(f"launch/{name}", causes[-1])) for causes in found.values())
             for name in ("different_collectives", "finished_rank")}
    assert sum(kinds.values()) == FAULTY
    assert all(kinds.values())


TESTS = """
import unittest
import torch, torch.distributed as dist

class Collective(unittest.TestCase):
    def test_1_one_rank_fails_before_a_collective(self):
        self.assertNotEqual(dist.get_rank(group), 0)
        dist.all_reduce(torch.ones(1), group=group)

    def test_2_all_ranks_meet(self):
        dist.barrier(group=group)

group = dist.new_group([0, 1])  # and its ranks know in which group they wait
unittest.main()
"""


@pytest.mark.long
def test_a_test_runner_that_goes_on_after_a_failure(quick: Mpi, tmp_path: Path) -> None:
    """Without any option it is said; the job ends at the same timeout as if a rank had finished."""
    (script := tmp_path / "tests.py").write_text(TESTS)
    done = mpiexec(quick, 2, "--exit-timeout=5", script)
    assert done.returncode == 1
    (said,) = find("launch/deadlock", done.stderr, limit="5 s")
    (fields,) = find("launch/different_collectives", said["cause"])
    assert re.fullmatch(r"rank 0 on \S+ in barrier \(tests.py:11 test_2_all_ranks_meet\), "
                        r"rank 1 on \S+ in all_reduce \(tests.py:8 test_1_\w+\)", fields["calls"])
    assert f"mpiddp: failed: {said['cause']}\n" in done.stderr
