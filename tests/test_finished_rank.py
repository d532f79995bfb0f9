"""A rank has come to its end, and others wait for it in a collective."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpiddp.failure import stack
from mpiddp.failure.root_cause import (
    NOBODY,
    FailureContext,
    JobActivity,
    Report,
    ReportKind,
    Reports,
    select_root_cause,
)
from mpiddp.failure.stack import Frame, FrameKind
from mpiddp.where.snapshot import CollectiveSeq, RankSample
from mpiddp.where.stall import DeadlockDetector, find_wait_for_finished, parse_ranks
from tests.messages import find, message
from tests.support import Mpi, check, mpiexec
from tests.test_where_stacks import LOAD, MAIN, rank

STOPS = (MAIN, Frame(FrameKind.OURS, f"{stack.OUR_FOLDER}api.py", 9, "should_stop"))
SUMMARY = Frame(FrameKind.LIBRARY, "/lib/site-packages/torch/_tensor.py", 9, "item")


def at(number: int, *frames: Frame, entered: int = 5, names: str = "0-2", **fields: object) -> RankSample:
    found = rank(number, **fields, sequences=(CollectiveSeq(entered, names, "0"),))
    return found._replace(frames=frames) if frames else found


def over(number: int, entered: int = 4, **fields: object) -> RankSample:
    return at(number, entered=entered, has_ended=True, **fields)


def test_ranks_that_wait_for_one_at_its_end() -> None:
    report = find_wait_for_finished([over(0), at(1), at(2)])
    assert report is not None
    assert report._replace(cause="", where="") == Report(NOBODY, "", ReportKind.UNREACHABLE, "", 1)
    assert report.cause == message("launch/finished_rank", ranks="ranks 1-2 wait", call="all_reduce",
                                   finished="rank 0 on n0", have="has")
    assert report.where


def test_a_rank_that_waits_for_several_at_their_end() -> None:
    report = find_wait_for_finished([over(0), at(1), over(2)])
    assert report is not None
    assert report.cause == message("launch/finished_rank", ranks="rank 1 on n0 waits", call="all_reduce",
                                   finished="ranks 0,2", have="have")


@pytest.mark.parametrize("ranks", [
    [at(0), at(1)],  # nobody has come to its end
    [over(0), over(1)],
    [over(0), at(1), at(2, MAIN, LOAD)],  # which the others may wait for
    [over(0), at(1), at(2, has_answered=False)],
    [over(0), at(1), at(2, state="T")],
    [over(0, entered=5), at(1), at(2)],  # it has done its part
    [over(0, names="0-1"), at(1, names="1-2"), at(2, names="1-2")],  # another group's
    [over(0)._replace(sequences=()), at(1, names="1-2"), at(2, names="1-2")],
    [over(0), at(1, MAIN, SUMMARY), at(2)],
])
def test_a_job_that_may_go_on(ranks: list[RankSample]) -> None:
    assert find_wait_for_finished(ranks) is None


def test_a_rank_that_has_destroyed_its_groups_at_its_end() -> None:
    assert find_wait_for_finished([over(0)._replace(sequences=()), at(1), at(2)]) is not None


def test_ranks_that_wait_for_their_gpus() -> None:
    assert find_wait_for_finished([over(0), at(1, MAIN, SUMMARY, spins=True, cores=1.0), at(2)]) is not None


@pytest.mark.parametrize(("steps", "waits"), [(7, False), (6, True)])
def test_a_rank_that_waits_in_should_stop(steps: int, waits: bool) -> None:
    found = find_wait_for_finished([over(0, entered=5, steps=steps), at(1, *STOPS, steps=7), at(2, *STOPS, steps=7)])
    assert (found is not None) is waits


def test_two_looks_without_a_movement() -> None:
    looks = DeadlockDetector()
    ranks = [over(0), at(1), at(2)]
    moved = [over(0), at(1)._replace(moved_bytes=10**6), at(2)]
    reports = [looks.update(seen, 5.0 * number) for number, seen in enumerate([ranks, ranks, moved, moved])]
    assert [report is not None for report in reports] == [False, True, False, True]


def test_ranks_in_words_are_read_as_far_as_they_are_there() -> None:
    assert parse_ranks("0-2,5,8-9") == {0, 1, 2, 5, 8, 9}
    assert parse_ranks("0,2,4,6,8 and 3 more ranges") == {0, 2, 4, 6, 8}


def test_the_timeout_of_a_rank_at_its_end_names_both() -> None:
    timeout = message("launch/exit_timeout", limit="9 s")
    late = Report(0, "n0", ReportKind.SECONDARY, f"{timeout}: rank 1 on n0 (train.py:9 <module>)", 1)
    report = find_wait_for_finished([over(0), at(1), at(2)])
    assert report is not None
    verdict = select_root_cause(Reports([late]), 2.0, FailureContext({0: "n0", 1: "n0", 2: "n0"}, world_size=3,
                                                                     activity=JobActivity(deadlock=report)))
    assert verdict is not None
    assert verdict.first == report._replace(cause=f"{report.cause}; {timeout}")


def script(folder: Path, *lines: str) -> Path:
    path = folder / "script.py"
    path.write_text("\n".join(["import os, sys, time", "import torch, torch.distributed as dist",
                               "rank = int(os.environ['RANK'])", *lines]))
    return path


@pytest.mark.long
def test_a_rank_that_waits_for_one_that_has_left_is_named(quick: Mpi, tmp_path: Path) -> None:
    path = script(tmp_path, "for batch in range(4 - (rank == 0)):", "    dist.all_reduce(torch.ones(1))",
                  "sys.exit(0)")
    done = mpiexec(quick, 2, "--exit-timeout=30", path)
    assert done.returncode == 1
    (awaited,) = find("launch/deadlock", done.stderr, limit="30 s")
    (fields,) = find("launch/finished_rank", awaited["cause"], call="all_reduce", have="has")
    assert re.fullmatch(r"rank 1 on \S+ waits", fields["ranks"]) and re.fullmatch(r"rank 0 on \S+", fields["finished"])
    timeout = message("launch/exit_timeout", limit="30 s")
    assert f"mpiddp: failed: {awaited['cause']}; {timeout}\n  where    {path}:5 <module>\n" in done.stderr


@pytest.mark.thorough("the same, simulated")
def test_a_rank_that_works_while_others_wait_or_have_ended_is_not_said_to_hang(quick: Mpi, tmp_path: Path) -> None:
    """Rank 2 waits in a group of its own for rank 1, which takes long; rank 0 has ended."""
    path = script(tmp_path, "pair = dist.new_group([1, 2])", "if rank == 1:", "    time.sleep(16)", "if rank:",
                  "    dist.all_reduce(torch.ones(1), group=pair)")
    done = check(mpiexec(quick, 3, path))
    assert find("launch/deadlock", done.stderr) == []
