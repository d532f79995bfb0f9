"""Ranks whose agent is the first process of a container; rank 1 does what the argument says."""

import ctypes
import os
import sys
import time

import torch.distributed as dist

how, rank = sys.argv[1], dist.get_rank()
assert os.getppid() == 1
dist.barrier()
if how == "crash" and rank == 1:
    ctypes.string_at(0)
if how == "stuck" and rank == 1:
    ctypes.PyDLL(None).sleep(600)  # which holds the interpreter
if how == "stuck" and rank == 2:
    time.sleep(0.5)
    raise ValueError("seven")
if how != "end":
    time.sleep(600)
print("done")
