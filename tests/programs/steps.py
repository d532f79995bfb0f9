"""A check's ranks take steps: in two rank 0 waits, without MPI, until the others have worked, in one it is late."""

import sys
import time
from pathlib import Path

from mpi4py import MPI

from mpiddp.check.steps import REPLY_GRACE_S, Ranks

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


def work_late(deadline):
    """As rank 0, work for longer than the step's limit and the time for replies."""
    if comm.rank == 0:
        time.sleep(max(0.0, deadline - time.monotonic()) + REPLY_GRACE_S + 0.5)
    return True


seen = ranks.step(work_late, dict.fromkeys(range(comm.size), ()), 0.1, "the late work")
assert seen.done == {*range(comm.size)}, (seen, ranks.lost)
