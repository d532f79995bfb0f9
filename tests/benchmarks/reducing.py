"""Say hello and reduce a number over all ranks, as any launcher's script."""

import os

import torch
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
dist.destroy_process_group()
print(f"rank {os.environ['RANK']} of {one.item():g}\n", end="")
