"""A sentinel that is killed is missed: another takes its place, and no rank is taken for dead because of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.support import MPIS, PROGRAMS, Done, Mpi, check, first_of, mpiexec, need, noise, srun

PROGRAM = PROGRAMS / "loses_sentinel.py"
RANKS = 3
END = sorted(f"rank {rank} has come to its end" for rank in range(RANKS))
REPLACED = re.compile(r"mpiddp: the sentinel of rank (\d) on \S+ is gone; another one watches this rank now")
UNWATCHED = re.compile(r"mpiddp: the sentinel of rank (\d) on \S+ is gone, and no other is started \(.+\): "
                       "this rank is not watched any more")
THOROUGH = pytest.mark.thorough
ROWS = first_of([pytest.param("0", id="the coordinator"), pytest.param("1", id="one"), pytest.param("0,1,2", id="all")])


def missed(done: Done, line: re.Pattern[str] = REPLACED) -> str:
    """Return the ranks of which it is said that their sentinel was killed."""
    return ",".join(sorted(line.findall(done.stderr)))


@pytest.mark.parametrize("who", ROWS)
def test_a_job_whose_sentinels_are_killed_goes_on(who: str, quick: Mpi) -> None:
    need(quick.missing())
    done = check(mpiexec(quick, RANKS, PROGRAM, who, "end"))
    assert sorted(done.stdout.splitlines()) == END
    assert missed(done) == who
    assert [line for line in noise(done) if not REPLACED.fullmatch(line)] == []


@pytest.mark.parametrize(("how", "status", "cause"), [
    pytest.param("raise", 1, "rank 1 on .*: ValueError: seven", id="raise"),
    pytest.param("killed", 137, "rank 1 on .*: ended by SIGKILL", id="killed", marks=THOROUGH)])
@pytest.mark.parametrize("who", ROWS)
def test_the_next_sentinel_reports_as_the_first(who: str, how: str, status: int, cause: str, quick: Mpi) -> None:
    need(quick.missing())
    done = mpiexec(quick, RANKS, PROGRAM, who, how)
    assert done.returncode in (status, 9)  # MPICH's launcher tells a signal so
    assert missed(done) == who
    assert len(re.findall(f"^mpiddp: failed: {cause}", done.stderr, re.M)) == 1
    assert done.stderr.count("mpiddp: failed:") == 1


@pytest.mark.thorough
def test_the_next_sentinel_prints_where_the_launcher_reads(quick: Mpi, tmp_path: Path) -> None:
    """The rank's own output goes to a log, and its folder has modules that are none of ours."""
    need(quick.missing())
    (tmp_path / "selectors.py").write_text("raise SystemExit('a module of the script')\n")
    done = mpiexec(quick, RANKS, "--log-dir", tmp_path / "logs", "--show=0", PROGRAM, "1", "killed",
                   env={"ODD_FOLDER": str(tmp_path)})
    assert missed(done) == "1"
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == done.stderr.count("mpiddp: failed:") == 1


def test_a_rank_that_is_killed_with_its_sentinel(quick: Mpi) -> None:
    need(quick.missing())
    done = mpiexec(quick, RANKS, PROGRAM, "1", "with its rank")
    assert done.returncode != 0
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == done.stderr.count("mpiddp: failed:") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["1", "0"])
def test_a_rank_in_native_code_is_not_taken_for_dead(who: str, quick: Mpi) -> None:
    need(quick.missing())
    done = check(mpiexec(quick, RANKS, PROGRAM, who, "in native code"))
    assert sorted(done.stdout.splitlines()) == END
    assert missed(done) == who


@pytest.mark.parametrize("who", ["1", pytest.param("0", marks=THOROUGH)])
def test_a_rank_that_goes_on_unwatched(who: str, quick: Mpi) -> None:
    need(quick.missing())
    done = check(mpiexec(quick, RANKS, PROGRAM, who, "no python"))
    assert sorted(done.stdout.splitlines()) == END
    assert missed(done, UNWATCHED) == who


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["end", "raise"])
def test_on_three_nodes(how: str, cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    done = srun(cluster, mpi, "-N3 -n3", PROGRAM, "0,1,2", how)
    assert missed(done) == "0,1,2"
    if how == "end":
        assert sorted(check(done).stdout.splitlines()) == END
    else:
        assert done.stderr.count("mpiddp: failed: rank 1 on node2: ValueError: seven") == 1
        assert done.stderr.count("mpiddp: failed:") == 1
        assert done.returncode == 1


def test_what_is_left_of_them(quick: Mpi) -> None:
    need(quick.missing())
    env = processes.marked(quick.environ())
    check(mpiexec(quick, RANKS, PROGRAM, "0,1,2", "end", env=env))
    assert processes.leftovers(env) == []
