"""Work with DataLoader workers and a child process, until rank 1 fails if that is asked for: `busy.py [SECONDS]`."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

start = time.monotonic()
subprocess.Popen(["sleep", "1000"])
loader = DataLoader(TensorDataset(torch.arange(10**6)), batch_size=4, num_workers=4)
total = torch.ones(1)
for step, _ in enumerate(loader):
    dist.all_reduce(total)
    total.fill_(1)
    if step == 3:
        dist.barrier()
        print("READY\n", end="", flush=True)
    if len(sys.argv) > 1 and os.environ["RANK"] == "1" and time.monotonic() - start > float(sys.argv[1]):
        raise ValueError("seven")
