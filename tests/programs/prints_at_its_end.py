"""Rank 0 prints a hundred lines that no other rank prints, and all ranks end."""

import time

import torch.distributed as dist

if dist.get_rank() == 0:
    for number in range(100):
        print(f"line {number}", flush=True)
        time.sleep(0.01)
dist.barrier()
