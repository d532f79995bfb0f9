"""`mpiddp -n 2 train.py` on a machine of the user's own; elsewhere it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mpiddp.base.errors import LaunchError
from mpiddp.bootstrap.local_start import find_own_launcher
from mpiddp.cli import LocalStart, read_config
from mpiddp.discovery.launchers import read_launch_facts
from mpiddp.discovery.schedulers import find_scheduler
from mpiddp.planning.compatibility import check_no_batch_job, check_not_nested
from tests import processes
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPICH_FIRST,
    MPIS,
    ROOT,
    Mpi,
    check_hello,
    mpiexec_command,
    need,
    single_node_environ,
)
from tests.test_compatibility import CRAY, HYDRA, MPICH, MPIRUN, OPEN_MPI_5, STEP_PMIX, Library

pytestmark = pytest.mark.light


@pytest.mark.parametrize("given", [
    ["-n", "2"], ["-n=2"], ["-np", "2"], ["-n2"], ["-n", "7", "-n", "2"], ["--prefix", "-n", "2"],
    ["--log-dir=logs", "-n", "2"]])
def test_the_ranks_get_all_other_arguments(given: list[str]) -> None:
    start = read_config([*given, "train.py", "-n", "7", "--lr=1"], {})
    others = tuple(word for word in given if word not in ("-n", "-np", "2", "7", "-n=2", "-n2"))
    assert start == LocalStart(2, (*others, "train.py", "-n", "7", "--lr=1"))


@pytest.mark.parametrize(("environ", "name", "do"), [
    (MPIRUN, "nested-launcher", "Open MPI's mpirun sets"),
    (HYDRA, "nested-launcher", "MPICH's or Intel MPI's mpiexec sets"),
    (STEP_PMIX, "nested-launcher", "srun sets"),
    ({"SLURM_JOB_ID": "7"}, "in-batch-job", "srun --mpi=pmix"),
    ({"PBS_JOBID": "7.server"}, "in-batch-job", "mpirun --hostfile $PBS_NODEFILE -x PATH"),
    ({"_CONDOR_PROCNO": "0"}, "in-batch-job", "mpirun")])
def test_where_a_start_is_refused(environ: Mapping[str, str], name: str, do: str) -> None:
    """With the command of the scheduler, or of the launcher around it."""
    with pytest.raises(LaunchError, match=name) as caught:
        check_not_nested(2, read_launch_facts(environ))
        check_no_batch_job(2, find_scheduler(environ), OPEN_MPI_5)
    assert do in caught.value.do


def test_the_launcher_of_a_library(tmp_path: Path) -> None:
    """Above the library, by its own name first, then in PATH."""
    library = OPEN_MPI_5._replace(path=f"{tmp_path}/usr/lib/x/libmpi.so.40")
    (bin_folder := tmp_path / "usr/bin").mkdir(parents=True)
    path = {"PATH": f"{tmp_path}/other"}
    for name, folder in (("mpirun", tmp_path / "other"), ("mpirun", bin_folder), ("mpirun.openmpi", bin_folder)):
        folder.mkdir(exist_ok=True)
        (folder / name).touch(mode=0o755)
        assert find_own_launcher(library, path) == f"{folder}/{name}"


@pytest.mark.parametrize("library", [MPICH._replace(path="/nowhere/lib/libmpi.so.12"), CRAY])
def test_a_library_without_a_launcher(library: Library) -> None:
    with pytest.raises(LaunchError, match="no-mpiexec") as caught:
        find_own_launcher(library, {"PATH": "/nowhere"})
    assert str(library) in caught.value.actual


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_start_without_a_launcher(mpi: Mpi) -> None:
    """Of more ranks than cores."""
    need(mpi.missing())
    done = processes.run(str(mpi.python), "-m", "mpiddp", "-n", "3", "--threads=1", str(EXAMPLES / "hello_world.py"),
                         timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
    check_hello(done, 3)
    assert done.stderr.splitlines()[0] == message(
        "launch/local_start", launcher=mpi.mpiexec, python=mpi.python,
        arguments=f"--threads=1 {EXAMPLES}/hello_world.py")


@pytest.mark.mpi
def test_a_start_inside_ranks_is_refused_once() -> None:
    need((mpi := MPIS["mpich"]).missing())
    done = processes.run(*mpiexec_command(mpi, 2, "-m", "mpiddp", "-n", 2, EXAMPLES / "hello_world.py"),
                         timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: nested-launcher") == 1
