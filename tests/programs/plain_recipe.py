"""Set torch's variables from MPI by hand, as recipes for plain mpirun do, then run a script."""

import os
import runpy
import socket
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
with socket.socket() as probe:
    probe.bind(("", 0))
    port = probe.getsockname()[1]
os.environ.update(
    RANK=str(world.rank), WORLD_SIZE=str(world.size), MASTER_ADDR=world.bcast(socket.gethostname()),
    MASTER_PORT=str(world.bcast(port)),
)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
