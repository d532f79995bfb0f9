"""An agent that is killed: its rank goes on unwatched and says so, and no rank is taken for dead because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import MPIS, PROGRAMS, Done, Mpi, check, first_of, mpiexec, need, noise, srun

pytestmark = pytest.mark.light

PROGRAM = PROGRAMS / "loses_agent.py"
RANKS = 3
END = sorted(f"rank {rank} has come to its end" for rank in range(RANKS))
THOROUGH = pytest.mark.thorough
ROWS = first_of([pytest.param("0", id="the coordinator"), pytest.param("1", id="one"), pytest.param("0,1,2", id="all")])


def missed(done: Done) -> str:
    """Return the ranks of which it is said that their agent was killed."""
    others = [line["rank"] for line in find("launch/agent_exited", done.stderr)]
    return ",".join(sorted([*others, *["0" for _ in find("launch/agent_of_rank_0_exited", done.stderr)]]))


@pytest.mark.parametrize("who", ROWS)
def test_a_job_whose_agents_are_killed_goes_on(who: str, quick: Mpi) -> None:
    need(quick.missing())
    done = check(mpiexec(quick, RANKS, PROGRAM, who, "end"))
    assert sorted(done.stdout.splitlines()) == END
    assert missed(done) == who
    assert len(noise(done)) == len(who.split(","))


def test_a_script_that_a_broken_pipe_ends_goes_on(quick: Mpi, tmp_path: Path) -> None:
    need(quick.missing())
    (script := tmp_path / "pipes.py").write_text(
        f"import signal\nsignal.signal(signal.SIGPIPE, signal.SIG_DFL)\n{PROGRAM.read_text()}")
    done = check(mpiexec(quick, RANKS, script, "0", "end"))
    assert sorted(done.stdout.splitlines()) == END


@pytest.mark.parametrize("who", ROWS)
def test_a_rank_that_raises_is_reported(who: str, quick: Mpi) -> None:
    need(quick.missing())
    done = check(mpiexec(quick, RANKS, PROGRAM, who, "raise"), 1)
    assert missed(done) == who
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause="ValueError: seven")) == 1
    assert done.stderr.count("mpiddp: failed:") == 1


@pytest.mark.torch
@pytest.mark.parametrize(("who", "cause"), [
    pytest.param("1", message("launch/ended_without_agent"), id="one"),
    pytest.param("2", message("launch/killed_by_sigkill"), id="another", marks=THOROUGH),
    pytest.param("0", "", id="the coordinator", marks=THOROUGH)])
def test_a_rank_that_is_killed_is_reported(who: str, cause: str, quick: Mpi) -> None:
    """Where there is no coordinator, the launcher alone says so: it may have killed any rank."""
    need(quick.missing())
    done = mpiexec(quick, 2 if who == "1" else RANKS, PROGRAM, who, "killed")
    assert done.returncode in (137, 9)  # MPICH's launcher tells a signal so
    assert missed(done) == who
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause=cause)) == bool(cause)
    assert done.stderr.count("mpiddp: failed:") == bool(cause)


@pytest.mark.thorough("an agent that is killed is reported")
def test_it_is_said_where_the_launcher_reads(quick: Mpi, tmp_path: Path) -> None:
    """The rank's own output goes to a log."""
    need(quick.missing())
    done = mpiexec(quick, RANKS, "--log-dir", tmp_path / "logs", "--show=0", PROGRAM, "1", "killed")
    assert missed(done) == "1"
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == done.stderr.count("mpiddp: failed:") == 1


@pytest.mark.thorough("test_a_rank_that_is_killed_is_reported")
@pytest.mark.torch
@pytest.mark.parametrize("who", ["1", pytest.param("0", marks=THOROUGH)])
def test_a_rank_that_is_killed_with_its_agent(who: str, quick: Mpi) -> None:
    """Rank 0 has said nothing, and the others only that it is gone."""
    need(quick.missing())
    done = mpiexec(quick, 2 if who == "1" else RANKS, PROGRAM, who, "with its rank")
    assert done.returncode != 0
    if who == "1":
        assert done.stderr.count("mpiddp: failed: rank 1 on ") == done.stderr.count("mpiddp: failed:") == 1
    else:
        assert done.stderr.count("mpiddp: failed:") == 0


@pytest.mark.thorough("an agent that is killed is reported")
@pytest.mark.parametrize("who", ["1", "0"])
def test_a_rank_in_native_code_is_not_taken_for_dead(who: str, quick: Mpi) -> None:
    need(quick.missing())
    done = check(mpiexec(quick, RANKS, PROGRAM, who, "in native code"))
    assert sorted(done.stdout.splitlines()) == END
    assert missed(done) == who


@pytest.mark.thorough("an agent that is killed, on one node")
@pytest.mark.parametrize("how", ["end", "raise"])
def test_on_three_nodes(how: str, cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    done = srun(cluster, mpi, "-N3 -n3", PROGRAM, "0,1,2", how)
    assert missed(done) == "0,1,2"
    if how == "end":
        assert sorted(check(done).stdout.splitlines()) == END
    else:
        assert len(find("launch/failed_rank", done.stderr, rank=1, host="node2", cause="ValueError: seven")) == 1
        assert done.stderr.count("mpiddp: failed:") == 1
        assert done.returncode == 1


def test_what_is_left_of_them(quick: Mpi) -> None:
    need(quick.missing())
    env = processes.marked(quick.environ())
    check(mpiexec(quick, RANKS, PROGRAM, "0,1,2", "end", env=env))
    assert processes.leftovers(env) == []
