"""The functions for programs that keep their own main()."""

from __future__ import annotations

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    PROGRAMS,
    ROOT,
    Done,
    Mpi,
    alone,
    check,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

PROGRAM = PROGRAMS / "own_main.py"
FROM_ROOT = {"PYTHONPATH": str(ROOT)}


def own_main(mpi: Mpi, ranks: int, *arguments: object) -> Done:
    """Run `mpiexec -n RANKS python ARGUMENTS`, without `-m mpiddp`."""
    need(mpi.missing())
    return processes.run(*mpiexec_command(mpi, ranks, *arguments), timeout=DEADLINE_S,
                         env={**single_node_environ(mpi), **FROM_ROOT}, cwd=ROOT)


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_a_with_block_holds_a_group_and_restores_the_environment(mpi: Mpi) -> None:
    done = check(own_main(mpi, 2, PROGRAM, "with"))
    assert done.stdout == "with 2\n" * 2
    assert done.stderr.splitlines() == [
        "mpiddp: warning: stale-environment: already set, and set anew from MPI: RANK=stale on rank 0"]


def test_one_group_after_another(quick: Mpi) -> None:
    assert check(own_main(quick, 2, PROGRAM, "again")).stdout == "again\n" * 2


def test_each_communicator_has_its_group(quick: Mpi) -> None:
    lines = check(own_main(quick, 4, PROGRAM, "halves")).stdout.splitlines()
    assert sorted(lines) == ["halves 0"] * 2 + ["halves 1"] * 2


def test_a_refusal_is_an_exception_on_every_rank(quick: Mpi) -> None:
    assert check(own_main(quick, 2, PROGRAM, "refused")).stdout == "refused backend-unavailable\n" * 2


def test_a_block_that_raises_gives_the_group_up(quick: Mpi) -> None:
    assert check(own_main(quick, 2, PROGRAM, "raises")).stdout == "raises\n" * 2


def test_a_world_of_one_as_in_a_notebook(quick: Mpi) -> None:
    assert check(alone(quick, PROGRAM, "again", env=FROM_ROOT)).stdout == "again\n"


@pytest.mark.parametrize("how", ["adopts", "halves"])
def test_under_the_launcher_too(quick: Mpi, how: str) -> None:
    done = check(mpiexec(quick, 4, PROGRAM, how))
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize("name", ["mpich", "openmpi4"])
def test_simulation_and_training_share_an_mpirun(name: str) -> None:
    check_coupled(own_main(MPIS[name], 4, EXAMPLES / "coupled.py"))


def test_simulation_and_training_share_an_srun(cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    done = cluster.run("srun", "--mpi=pmix", "-N3", "-n4", str(mpi.python), str(EXAMPLES / "coupled.py"),
                       timeout=DEADLINE_S, env={**mpi.environ(), **FROM_ROOT}, cwd=ROOT)
    check_coupled(done)


def check_coupled(done: Done) -> None:
    """Fail unless both trainers of coupled.py learned."""
    lines = sorted(check(done).stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == ["trainer 0/2", "trainer 1/2"]
    for line in lines:
        first, _, last = line.split("loss ")[1].split()
        assert float(last) < float(first) / 10
