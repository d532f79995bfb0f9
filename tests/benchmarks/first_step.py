"""The script that every launcher starts: one all-reduce on the default process group, as torchrun's users write it."""

import os

import torch
import torch.distributed as dist

if "RANK" not in os.environ:  # accelerate launch of one process
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29545")
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"rank {dist.get_rank()} of {int(ones)}\n", end="", flush=True)
dist.destroy_process_group()
