"""Raise on the last rank while the others sleep, as any launcher's script."""

import sys
import time

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == dist.get_world_size() - 1:
    print(f"FAULT {time.time()}\n", end="", file=sys.stderr, flush=True)
    raise ValueError("seven")
time.sleep(300)
