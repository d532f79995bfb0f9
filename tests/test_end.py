"""The end of a job: exit status, leftovers, waiting for the last rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.support import MPIS, PROGRAMS, Mpi, check, mpiexec, noise, srun

Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Return a function that writes a script and returns its path."""
    def write(*lines: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text("\n".join(("import os, sys, time", "rank = int(os.environ['RANK'])", *lines)) + "\n")
        return path
    return write


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_a_rank_that_fails_gives_the_job_its_status(mpi: Mpi) -> None:
    """The other rank would sleep for ten minutes."""
    start = time.monotonic()
    check(mpiexec(mpi, 2, PROGRAMS / "fails.py", 1, 7), 7)
    assert time.monotonic() - start < 60


def test_an_exception_is_shown_once_and_without_our_frames(quick: Mpi, script: Script) -> None:
    path = script("if rank == 1:", "    raise ValueError('seven')", "time.sleep(600)")
    done = check(mpiexec(quick, 2, path), 1)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: seven" in done.stderr
    assert "mpiddp/" not in done.stderr


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_a_rank_that_fails_ends_the_job_on_three_nodes(mpi: Mpi, cluster: Cluster) -> None:
    """Under pmi2 Slurm kills the ranks before one can give its status: srun's is then 137, 128 + SIGKILL."""
    start = time.monotonic()
    done = srun(cluster, mpi, "-N3 -n3", PROGRAMS / "fails.py", 2, 7)
    check(done, 7 if mpi.pmi == "pmix" else 137)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(("line", "status"), [
    ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit('a word')", 1), ("sys.exit(256 + 3)", 3),
    ("raise KeyboardInterrupt", 130),
])
def test_exit_status_is_as_python_gives_it(quick: Mpi, line: str, status: int, script: Script) -> None:
    done = check(mpiexec(quick, 1, script(line)), status)
    assert ("a word" in done.stderr) == ("a word" in line)


def test_threads_and_atexit_functions_still_have_their_group(quick: Mpi, script: Script) -> None:
    path = script(
        "import atexit, threading",
        "import torch, torch.distributed as dist",
        "from mpi4py import MPI",
        "def add(word):",
        "    total = torch.ones(1)",
        "    dist.all_reduce(total)",
        "    print(f'{word} {int(total)} {MPI.COMM_WORLD.allreduce(1)}\\n', end='', flush=True)",
        "atexit.register(add, 'atexit')",
        "def later():",
        "    time.sleep(1)",
        "    add('thread')",
        "threading.Thread(target=later).start()",
    )
    done = check(mpiexec(quick, 2, path))
    assert done.stdout == "thread 2 2\n" * 2 + "atexit 2 2\n" * 2
    assert noise(done) == []


def test_a_script_that_finalizes_mpi_itself(quick: Mpi, script: Script) -> None:
    done = check(mpiexec(quick, 2, script("from mpi4py import MPI", "MPI.Finalize()", "print('done')")))
    assert done.stdout == "done\n" * 2


def test_the_last_rank_is_waited_for_and_named_at_the_deadline(quick: Mpi, script: Script) -> None:
    path = script("if rank == 1:", "    time.sleep(600)")
    start = time.monotonic()
    done = mpiexec(quick, 2, "--exit-timeout", "3", path)
    assert time.monotonic() - start < 60
    assert done.returncode == 1
    assert "mpiddp: cannot leave the job: waited 3 s for the end of rank 1 on " in done.stderr
