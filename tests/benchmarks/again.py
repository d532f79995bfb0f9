"""Fail once on the last rank, and tell when that is, and when the next attempt makes its first step."""

import os
import sys
import time

import torch
import torch.distributed as dist

if not dist.is_initialized():  # as under torchrun
    dist.init_process_group()
is_last = dist.get_rank() == dist.get_world_size() - 1
dist.all_reduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if is_last:
        print(f"FAULT {time.time()}", file=sys.stderr, flush=True)
        raise ValueError("seven")
    dist.all_reduce(torch.ones(1))
if is_last:
    print(f"AGAIN {time.time()}", file=sys.stderr, flush=True)
