"""All-reduce for ever, with a timeout of five seconds."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group(timeout=timedelta(seconds=5))
total = torch.ones(1)
for step in range(10**9):
    dist.all_reduce(total)
    total.fill_(1)
    if step == 3:
        print("READY\n", end="", flush=True)
