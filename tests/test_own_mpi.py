"""MPI programs that a rank starts, and workers that import mpi4py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import MPICH_FIRST, ROOT, Mpi, check, mpiexec, on_path

STARTS = """
import os, subprocess, sys
from tests.support import MPIS
env = {name: value for name, value in os.environ.items()
       if not name.startswith(("PMI", "HYD", "MPI_", "OMPI", "PRTE", "PRRTE", "OPAL", "I_MPI_"))}
env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
if os.environ["RANK"] == "0":
    mpi = MPIS[sys.argv[1]]
    command = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); print('size', MPI.COMM_WORLD.size)"
    subprocess.run([mpi.mpiexec, *mpi.options, "-n", "2", sys.executable, "-c", command], env=env, check=True)
"""
WORKERS = """
import multiprocessing, os, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
def look():
    from mpi4py import MPI
    return MPI.Is_initialized()
def look_at_programs():
    return os.environ.get("MPI4PY_RC_INITIALIZE")
if __name__ == "__main__" and os.environ["RANK"] == "0":
    for method in ("fork", "spawn", "forkserver"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            print(method, pool.submit(look).result(), pool.submit(look_at_programs).result(), flush=True)
"""


@pytest.mark.light
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_rank_starts_an_mpi_program_by_a_launcher_of_its_own(mpi: Mpi, tmp_path: Path) -> None:
    """It has taken the variables of its own launcher out of the program's."""
    script = tmp_path / "script.py"
    script.write_text(STARTS)
    done = check(mpiexec(mpi, 2, script, mpi.name, env=on_path(ROOT)))
    assert done.stdout.splitlines() == ["size 2"] * 2, done.stderr


@pytest.mark.light
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_workers_import_mpi4py(mpi: Mpi, tmp_path: Path) -> None:
    """A forked one finds MPI as it was; the others would abort in an MPI_Init of their own."""
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    done = check(mpiexec(mpi, 2, script))
    assert done.stdout.splitlines() == ["fork True None", "spawn False None", "forkserver False None"], done.stderr
