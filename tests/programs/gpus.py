"""Plan the GPUs of a real Slurm step: the GPUs are made up, and Slurm decides which of them each rank is shown.

    srun --mpi=pmix python gpus.py [--cgroup]

With --cgroup a rank can use no other GPUs than those it is shown. Prints the map, and the warnings.
"""

import os
import socket
import sys

from mpi4py import MPI

from mpiddp.base.config import LaunchConfig
from mpiddp.bootstrap.prepare import find_seat
from mpiddp.discovery.devices import DeviceFacts
from mpiddp.discovery.gpus import CUDA_VISIBLE, Gpu, select_visible
from mpiddp.discovery.host import read_host_facts
from mpiddp.discovery.mpi import find_node
from mpiddp.planning.environment import Endpoint
from mpiddp.planning.job import PostTorchFacts, plan_post_torch, plan_pre_torch
from mpiddp.reporting.map import format_map

comm, host = MPI.COMM_WORLD, socket.gethostname()
GPUS = tuple(Gpu(f"GPU-{at}{host}", f"GPU-{at}{host}", "NVIDIA H100 80GB HBM3") for at in range(4))


def everyone(facts: object, plan: object) -> object:
    """Return this rank's part of rank 0's plan."""
    found = comm.gather(facts, root=0)
    return comm.scatter(plan(found) if comm.rank == 0 else None, root=0)


node, whole = find_node(comm)
shown = select_visible(GPUS, os.environ)
seen = read_host_facts(os.environ, comm.rank, node, whole, None, "", with_gpus=False)
seen = seen._replace(visible_gpus=shown, gpus=shown if "--cgroup" in sys.argv else GPUS)
host_plan = everyone(seen, lambda facts: plan_pre_torch(facts, LaunchConfig()))
os.environ.update({"OMP_NUM_THREADS": "1", **host_plan.settings})
after = shown if "--cgroup" in sys.argv else select_visible(GPUS, os.environ)
torch = DeviceFacts("2.13.0", "2.27.3", "cuda", after, {"cuda": "nccl"}, {"nccl": ("cuda",)})
ready = PostTorchFacts(host_plan.place, torch, {}, find_seat(host_plan, frozenset({0})), host_plan.choice)
names = comm.bcast(comm.gather(host, root=0), root=0)
plan = everyone(ready, lambda facts: plan_post_torch(
    facts, names, LaunchConfig(), Endpoint("10.77.0.11", 1, "", ""), dict.fromkeys(range(comm.size), ("eth0", ""))))
if comm.rank == 0:
    print(*format_map(plan.placements), *plan.warnings, sep="\n")
print(f"rank {comm.rank} of Slurm's {os.environ['SLURM_LOCALID']}: {plan.device} is {after[int(plan.device[5:])].uuid} "
      f"of {os.environ.get(CUDA_VISIBLE)}\n", end="", flush=True)
