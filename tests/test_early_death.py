"""A rank that dies in its start: its agent says so, and the job ends at once, with that status."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import EACH_MPI, Mpi, first_of, mpiexec, need, on_path

pytestmark = [pytest.mark.mpi, pytest.mark.light]

# Python imports this before anything else; the rank, which has an agent, dies when it imports torch.
DIES = """
import os, sys
class Dies:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and os.environ.get("{rank}") == "1":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Dies())
"""
RANKS = {"openmpi4": "OMPI_COMM_WORLD_RANK", "openmpi5": "OMPI_COMM_WORLD_RANK", "mpich": "PMI_RANK",
         "impi": "PMI_RANK"}


@pytest.mark.parametrize("mpi", first_of([EACH_MPI[2], *EACH_MPI[:2], EACH_MPI[3]]))
@pytest.mark.parametrize(("number", "words"), [(9, "killed by SIGKILL"), (11, "killed by SIGSEGV")])
def test_a_rank_that_dies_in_its_start(mpi: Mpi, number: int, words: str, tmp_path: Path) -> None:
    need(mpi.missing())
    (tmp_path / "sitecustomize.py").write_text(DIES.format(rank=RANKS[mpi.name], number=number))
    done = mpiexec(mpi, 2, "-c", "pass", env=on_path(tmp_path))
    assert f": {words}" in done.stderr, done.stderr
    assert "during startup" in done.stderr
    assert done.returncode in (128 + number, 9), done.stderr  # MPICH
