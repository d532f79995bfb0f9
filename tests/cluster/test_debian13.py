"""Debian 13: README's first command, hello, a failure and the refusals, on this machine and on a cluster from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster, debian13
from tests.cluster.debian13 import MPICH, OPEN_MPI, RootMpi
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    PROGRAMS,
    ROOT,
    Done,
    check,
    check_hello,
    mpiexec_command,
    need,
    noise,
    single_node_environ,
    srun,
)
from tests.test_compatibility import check_refused
from tests.test_readme import ACCURACY, FIRST, clone  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.cluster, pytest.mark.thorough("the same on this machine's own system")]
HELLO = EXAMPLES / "hello_world.py"
BOTH = [pytest.param(mpi, id=mpi.name) for mpi in (OPEN_MPI, MPICH)]
on_cluster = pytest.mark.parametrize("cluster", ["debian13"], indirect=True)


@pytest.fixture(scope="module")
def root() -> Path:
    """Return the root folder."""
    need(debian13.missing_components())
    return debian13.root_folder()


def mpiexec(root: Path, launcher: RootMpi, library: RootMpi, *arguments: object) -> Done:
    """Run `mpiexec -n 2 python -m mpiddp ARGUMENTS` in the root folder, with a library of the same MPI or another."""
    command = mpiexec_command(launcher, 2, "-m", "mpiddp", *arguments)
    return processes.run(*debian13.inside(root), *command, timeout=DEADLINE_S, env=single_node_environ(library))


def test_the_first_command_trains_on_debian_13(root: Path, clone: Path) -> None:  # noqa: F811 (the fixture)
    """With Debian's torch 2.6, NumPy and scikit-learn instead of those in constraints.txt, and no network."""
    command = FIRST.replace("-m venv", "-m venv --system-site-packages").replace("-c tests/constraints.txt ", "")
    assert len(command) == len(FIRST) + len("--system-site-packages ") - len("-c tests/constraints.txt ")
    env = {"PATH": "/usr/sbin:/usr/bin", "HOME": str(clone), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/opt/wheels"}
    done = check(processes.run(*debian13.inside(root, clone), "sh", "-c", command, timeout=600, env=env))
    ((share, size),) = ACCURACY.findall(done.stdout)
    assert int(size) == 2
    assert float(share) >= 0.95


@pytest.mark.parametrize("mpi", BOTH)
@pytest.mark.parametrize("script", ["hello_world.py", "hello_torchrun.py"])
def test_mpiexec_says_hello_on_debian_13(root: Path, script: str, mpi: RootMpi) -> None:
    """The second script makes its process group itself, with a torch that was built without libuv."""
    done = mpiexec(root, mpi, mpi, EXAMPLES / script)
    check_hello(done, 2)
    assert noise(done) == []


@pytest.mark.parametrize("mpi", BOTH)
def test_a_rank_fails_on_debian_13(root: Path, mpi: RootMpi) -> None:
    check_failed(mpiexec(root, mpi, mpi, PROGRAMS / "fails.py", 1, 7))


@pytest.mark.parametrize(("launcher", "library"), [(OPEN_MPI, MPICH), (MPICH, OPEN_MPI)], ids=["openmpi", "mpich"])
def test_an_mpiexec_of_the_other_mpi_on_debian_13(root: Path, launcher: RootMpi, library: RootMpi) -> None:
    check_refused(mpiexec(root, launcher, library, HELLO), "launcher-mismatch")


@on_cluster
@pytest.mark.parametrize("mpi", BOTH)
def test_srun_says_hello_on_debian_13(cluster: Cluster, mpi: RootMpi) -> None:
    assert check(cluster.run("srun", "--version", timeout=30)).stdout.startswith("slurm-wlm 24.11.")
    lines = check_hello(srun(cluster, mpi, "-N3 -n4", HELLO), 4)
    assert sorted(line["host"] for line in lines) == ["node1", "node1", "node2", "node3"]
    assert {line["address"] for line in lines} == {"10.77.0.11"}


@on_cluster
@pytest.mark.parametrize("mpi", BOTH)
def test_a_rank_fails_on_three_nodes_of_debian_13(cluster: Cluster, mpi: RootMpi) -> None:
    check_failed(srun(cluster, mpi, "-N3 -n3", PROGRAMS / "fails.py", 1, 7))


@on_cluster
@pytest.mark.parametrize(("option", "mpi", "problem"), [
    (None, OPEN_MPI, "no-pmix"), (None, MPICH, "no-pmix"), ("pmi2", OPEN_MPI, "pmi-unsupported"),
    ("pmix", MPICH, "pmi-unsupported"), ("cray_shasta", OPEN_MPI, "pmi-unsupported"),
    ("cray_shasta", MPICH, "pmi-unsupported")],
    ids=lambda value: value.name if isinstance(value, RootMpi) else value)
def test_srun_that_offers_nothing_fitting_on_debian_13(
        cluster: Cluster, option: str | None, mpi: RootMpi, problem: str) -> None:
    """Slurm 24.11's plugin cray_shasta sets PMI_RANK and PMI_SIZE, too, which MPICH's mpiexec has."""
    options = [f"--mpi={option}"] if option else []
    done = cluster.run("srun", *options, "-N2", "-n2", str(mpi.python), "-m", "mpiddp", str(HELLO),
                       timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
    check_refused(done, problem)
    assert f"use srun --mpi={mpi.pmi}" in done.stderr
    assert re.search("this Slurm has --mpi=.*cray_shasta", done.stderr)


def check_failed(done: Done) -> None:
    """Fail unless a job was reported to have failed once, by rank 1's status 7."""
    check(done, 7)
    (who,) = re.findall(r"^mpiddp: failed: (rank \d) on", done.stderr, re.MULTILINE)
    assert who == "rank 1"
