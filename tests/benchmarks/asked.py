"""A training that counts its steps in each block of so many seconds: asked.py SECONDS BLOCKS."""

import sys
import time

import torch
import torch.distributed as dist

SECONDS, BLOCKS = float(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
numbers, steps = torch.rand(128, 128), [0] * BLOCKS
found = torch.zeros(1)
dist.barrier()
start = time.time()
if dist.get_rank() == 0:
    print(f"START {start}", flush=True)
while True:
    block = torch.tensor([int((time.time() - start) / SECONDS)])
    dist.broadcast(block, 0)
    if block >= BLOCKS:
        break
    for _ in range(10):
        found = numbers @ numbers
        dist.all_reduce(found)
    steps[int(block)] += 10
if dist.get_rank() == 0:
    print("STEPS", *steps, flush=True)
