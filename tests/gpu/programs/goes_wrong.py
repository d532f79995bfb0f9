"""Reduce numbers on and on, until something goes wrong: `goes_wrong.py killed|stopped|sleeps|memory|waits`.

The last rank is killed in an all-reduce, stopped there, sleeps outside of it, or asks for more memory than a GPU has.
With `waits` each rank's GPU is busy for longer than a collective may take.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

how = sys.argv[1]
last = dist.get_rank() == dist.get_world_size() - 1
numbers = torch.ones(2**24, device="cuda")
dist.all_reduce(numbers)
torch.cuda.synchronize()
print(f"READY {time.time()}\n", end="", flush=True)
if last and how in ("killed", "stopped"):
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
if how == "waits":
    torch.cuda._sleep(10**12)  # cycles
for step in range(10**9):
    if step == 10 and last and how == "sleeps":
        time.sleep(10**6)
    if step == 10 and last and how == "memory":
        torch.empty(2**50, device="cuda")
    dist.all_reduce(numbers)
    torch.cuda.synchronize()
