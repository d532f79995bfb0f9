"""Ranks whose agents are killed: `WHO` are the ranks (0,1), `HOW` is what rank 1 does afterwards."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

STEPS, STEP_S = 20, 0.1


def kill_agent():
    """Kill this rank's agent: it was forked from this process, and has gone to /."""
    ours = Path("/proc/self/environ").read_bytes()
    for pid in psutil.pids():
        try:
            if pid != os.getpid() and str(Path(f"/proc/{pid}/cwd").readlink()) == "/" \
                    and Path(f"/proc/{pid}/environ").read_bytes() == ours:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


who, how = sys.argv[1:]
rank = dist.get_rank()
if os.fork() == 0:  # it holds what it has inherited for a while
    time.sleep(3)
    os._exit(0)
dist.barrier()
if str(rank) in who.split(","):
    kill_agent()
    if how == "with its rank":
        os.kill(os.getpid(), signal.SIGKILL)
if how == "in native code" and rank == 1:
    ctypes.PyDLL(None).sleep(5)  # which holds the interpreter
for _ in range(STEPS):
    dist.all_reduce(torch.ones(1))
    time.sleep(STEP_S)
if rank == 1:
    if how == "raise":
        raise ValueError("seven")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
print(f"rank {rank} has come to its end\n", end="", flush=True)
