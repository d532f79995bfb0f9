"""Plan the cores of a real Slurm job on nodes of eight CPUs: these are made up, and Slurm tells how many it has given.

    srun --mpi=pmix python eight_cores.py [--threads]

With --threads they are the hardware threads of four cores. Each rank prints its job and its CPUs.
"""

import os
import sys
import time

from mpi4py import MPI

from mpiddp.base.config import LaunchConfig
from mpiddp.discovery.cpus import Topology
from mpiddp.discovery.host import read_host_facts
from mpiddp.discovery.mpi import find_node
from mpiddp.planning.job import plan_pre_torch

ALL = frozenset(range(8))
CORES = Topology(tuple((cpu,) for cpu in range(8)), (0,) * 8)
THREADS = Topology(tuple((core, core + 4) for core in range(4)), (0,) * 4)

comm = MPI.COMM_WORLD
node, whole = find_node(comm)
facts = read_host_facts(os.environ, comm.rank, node, whole, None, "", with_gpus=False)
facts = facts._replace(cpus=ALL, allowed=ALL)
if comm.rank == node:
    facts = facts._replace(topology=THREADS if "--threads" in sys.argv else CORES)
found = comm.gather(facts, root=0)
plan = comm.scatter(plan_pre_torch(found, LaunchConfig()) if comm.rank == 0 else None, root=0)
cpus = sorted(plan.cpus or ALL)
print(f"job {os.environ['SLURM_JOB_ID']} rank {comm.rank} {','.join(map(str, cpus))} "
      f"threads {plan.defaults['OMP_NUM_THREADS']}\n", end="", flush=True)
time.sleep(float(os.environ.get("STAYS_S", "0")))
