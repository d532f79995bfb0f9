"""Reduce a number that lies on a GPU which several ranks share, and tell the sum and the backend."""

import torch
import torch.distributed as dist

total = torch.ones(1, device="cuda")
dist.all_reduce(total)
print(f"rank {dist.get_rank()}: {dist.get_backend()} sum {int(total.item())}\n", end="", flush=True)
