"""A check's ranks take a step, in which rank 0 waits, without MPI, until the others have worked."""

import sys
import time
from pathlib import Path

from mpi4py import MPI

from mpiddp.check.steps import Ranks

comm, folder = MPI.COMM_WORLD.Dup(), Path(sys.argv[1])


def work(deadline, step):
    """Write a file; as rank 0 wait for those of the others."""
    (folder / f"{step}-{comm.rank}").touch()
    while comm.rank == 0 and len(list(folder.glob(f"{step}-*"))) < comm.size:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)
    return True


ranks = Ranks(comm)
for number in range(2):
    seen = ranks.step(work, dict.fromkeys(range(comm.size), (number,)), 10, "the work")
    assert seen.done == {*range(comm.size)}, (seen, ranks.lost)
