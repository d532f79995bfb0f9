"""Print as JSON what a rank finds: environment, group, MPI, host."""

import json
import os
import socket

import torch
import torch.distributed as dist
from mpi4py import MPI

total = torch.ones(1)
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE",
         "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID",
         "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "GLOO_SOCKET_IFNAME")
print(json.dumps({
    "host": socket.gethostname(),
    "node": os.environ.get("SLURMD_NODENAME", "localhost"),
    "environ": {name: os.environ.get(name) for name in names},
    "group": [dist.get_rank(), dist.get_world_size(), dist.get_backend()],
    "mpi": [MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size],
    "sum": total.item(),
    "library": MPI.Get_library_version(),
    "elastic": dist.is_torchelastic_launched(),
}) + "\n", end="", flush=True)
