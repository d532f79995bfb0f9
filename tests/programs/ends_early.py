"""Rank 0 ends at once; the others go on to use the store and each other."""

import sys
import time

import torch
import torch.distributed as dist

others = dist.new_group(list(range(1, dist.get_world_size())))
if dist.get_rank() == 0:
    sys.exit(0)
time.sleep(3)
later = dist.new_group(list(range(1, dist.get_world_size())), use_local_synchronization=True)
total = torch.ones(1)
dist.all_reduce(total, group=later)
print(f"{int(total)} went on\n", end="", flush=True)
