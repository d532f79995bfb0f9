"""Newer releases of Debian: the first command, hello, failures, workers, refusals, here and on a cluster of one."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.cluster import Cluster, debian
from tests.cluster.debian import MPICH, OPEN_MPI, RELEASES, Release, RootMpi
from tests.faults.test_signals import Job
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
EACH_RELEASE = [pytest.param(release, id=suite) for suite, release in RELEASES.items()]
on_cluster = pytest.mark.parametrize("cluster", EACH_RELEASE[:1], indirect=True)  # sid's Slurm has no pmix
GLOO = re.compile(r"\[\S*gloo/transport/\S+ INFO Rank \d is connected to \d\. .*")  # gloo of Debian unstable
LOADS = """\
from mpi4py import MPI  # a worker imports this module again
import multiprocessing, sys
from pathlib import Path
import torch.distributed as dist
from torch.utils.data import DataLoader
import mpiddp

if __name__ == "__main__":
    checkpoint = Path(sys.argv[1])
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(f"rank {dist.get_rank()} goes on at {first}, by {multiprocessing.get_start_method()}\\n", end="", flush=True)
    for step, number in enumerate(DataLoader(range(first, 10**7), num_workers=2), first):
        assert int(number) == step
        if step == first + 5:
            print("READY\\n", end="", flush=True)
        if first and step == first + 200:
            break
        if mpiddp.should_stop():
            if dist.get_rank() == 0:
                checkpoint.write_text(str(step))
            mpiddp.stop_for_requeue()
"""


@pytest.fixture(scope="module", params=EACH_RELEASE)
def release(request: pytest.FixtureRequest) -> Release:
    """Return a release."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def root(release: Release) -> Path:
    """Return a release's root folder."""
    need(debian.missing_components())
    return debian.root_folder(release)


def mpiexec(root: Path, launcher: RootMpi, library: RootMpi, *arguments: object) -> Done:
    """Run `mpiexec -n 2 python -m mpiddp ARGUMENTS` in a root folder, with a library of the same MPI or another."""
    command = mpiexec_command(launcher, 2, "-m", "mpiddp", *arguments)
    return processes.run(*debian.inside(root), *command, timeout=DEADLINE_S, env=single_node_environ(library))


def test_the_first_command_trains_on_debian(root: Path, clone: Path) -> None:  # noqa: F811 (the fixture)
    """With Debian's torch, NumPy and scikit-learn instead of those in constraints.txt, and no network."""
    command = FIRST.replace("-m venv", "-m venv --system-site-packages").replace("-c tests/constraints.txt ", "")
    assert len(command) == len(FIRST) + len("--system-site-packages ") - len("-c tests/constraints.txt ")
    env = {"PATH": "/usr/sbin:/usr/bin", "HOME": str(clone), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/opt/wheels"}
    done = check(processes.run(*debian.inside(root, clone), "sh", "-c", command, timeout=600, env=env))
    ((share, size),) = ACCURACY.findall(done.stdout)
    assert int(size) == 2
    assert float(share) >= 0.95


@pytest.mark.parametrize("mpi", BOTH)
@pytest.mark.parametrize("script", ["hello_world.py", "hello_torchrun.py"])
def test_mpiexec_says_hello_on_debian(root: Path, script: str, mpi: RootMpi) -> None:
    """The second script makes its process group itself, with a torch that was built without libuv."""
    done = mpiexec(root, mpi, mpi, EXAMPLES / script)
    check_hello(done, 2)
    assert [line for line in noise(done) if not GLOO.fullmatch(line)] == []
    assert "2 ranks on 1 node, " in done.stderr


@pytest.mark.parametrize("mpi", BOTH)
def test_a_rank_fails_on_debian(root: Path, mpi: RootMpi) -> None:
    check_failed(mpiexec(root, mpi, mpi, PROGRAMS / "fails.py", 1, 7))


@pytest.mark.parametrize("mpi", BOTH)
def test_loader_workers_leave_a_signal_to_their_ranks_on_debian(
        release: Release, root: Path, mpi: RootMpi, tmp_path: Path) -> None:
    """Workers are started as Python does by default; the job is stopped, and goes on from its checkpoint."""
    (script := tmp_path / "loads.py").write_text(LOADS)
    command = [*debian.inside(root), *mpiexec_command(mpi, 2, "-m", "mpiddp", script, tmp_path / "checkpoint")]
    with processes.start(command, single_node_environ(mpi), ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT) as process:
        try:
            (job := Job(process)).await_ready(2)
            for one in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                    if "python" in one.exe():
                        one.send_signal(signal.SIGUSR1)
            text = job.output()
        finally:
            processes.end_tree(process.pid)
    assert process.returncode == 75, text
    assert text.count("mpiddp: time to stop: ") == 1, text
    done = check(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(mpi)))
    step = (tmp_path / "checkpoint").read_text()
    assert sorted(done.stdout.splitlines()) == [
        "READY", "READY", *(f"rank {rank} goes on at {step}, by {release.start_method}" for rank in range(2))]


@pytest.mark.parametrize(("launcher", "library"), [(OPEN_MPI, MPICH), (MPICH, OPEN_MPI)], ids=["openmpi", "mpich"])
def test_an_mpiexec_of_the_other_mpi_on_debian(root: Path, launcher: RootMpi, library: RootMpi) -> None:
    check_refused(mpiexec(root, launcher, library, HELLO), "launcher-mismatch")


@on_cluster
@pytest.mark.parametrize("mpi", BOTH)
def test_srun_says_hello_on_debian(cluster: Cluster, mpi: RootMpi) -> None:
    lines = check_hello(srun(cluster, mpi, "-N3 -n4", HELLO), 4)
    assert sorted(line["host"] for line in lines) == ["node1", "node1", "node2", "node3"]
    assert {line["address"] for line in lines} == {"10.77.0.11"}


@on_cluster
@pytest.mark.parametrize("mpi", BOTH)
def test_a_rank_fails_on_three_nodes_of_debian(cluster: Cluster, mpi: RootMpi) -> None:
    check_failed(srun(cluster, mpi, "-N3 -n3", PROGRAMS / "fails.py", 1, 7))


@on_cluster
@pytest.mark.parametrize(("option", "mpi", "problem"), [
    (None, OPEN_MPI, "no-pmix"), (None, MPICH, "no-pmix"), ("pmi2", OPEN_MPI, "pmi-unsupported"),
    ("pmix", MPICH, "pmi-unsupported"), ("cray_shasta", OPEN_MPI, "pmi-unsupported"),
    ("cray_shasta", MPICH, "pmi-unsupported")],
    ids=lambda value: value.name if isinstance(value, RootMpi) else value)
def test_srun_that_offers_nothing_fitting_on_debian(
        cluster: Cluster, option: str | None, mpi: RootMpi, problem: str) -> None:
    """Slurm's plugin cray_shasta sets PMI_RANK and PMI_SIZE from 24.11 on, which MPICH's mpiexec has."""
    options = [f"--mpi={option}"] if option else []
    done = cluster.run("srun", *options, "-N2", "-n2", str(mpi.python), "-m", "mpiddp", str(HELLO),
                       timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
    check_refused(done, problem)
    assert f"use srun --mpi={mpi.pmi}" in done.stderr
    assert re.search("this Slurm has --mpi=.*cray_shasta", done.stderr)


def check_failed(done: Done) -> None:
    """Fail unless a job was reported to have failed once, by rank 1's status 7, and MPI_Abort printed nothing."""
    check(done, 7)
    (who,) = re.findall(r"^mpiddp: failed: (rank \d) on", done.stderr, re.MULTILINE)
    assert who == "rank 1"
    assert "MPI_ABORT was invoked" not in done.stderr
