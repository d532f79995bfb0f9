"""A check's rank 0 has all ranks work, and in its own part waits, without MPI, until the others do."""

import sys
import time
from pathlib import Path

from mpi4py import MPI

from mpiddp.check.rpc import RpcController, worker_loop

comm, folder = MPI.COMM_WORLD.Dup(), Path(sys.argv[1])


def work(deadline):
    """Write a file; as rank 0 wait for those of the others."""
    (folder / str(comm.rank)).touch()
    while comm.rank == 0 and len(list(folder.iterdir())) < comm.size:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)
    return True


works = {"work": work}
if comm.rank:
    worker_loop(comm, works, 0.0)
else:
    controller = RpcController(comm, works, str)
    answers = controller.call("work", dict.fromkeys(range(comm.size), ()), 10, "the work")
    controller.dismiss()
    assert answers == dict.fromkeys(range(comm.size), True), (answers, controller.lost)
