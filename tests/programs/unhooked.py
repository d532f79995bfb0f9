"""A program with its own main() that prints what a job has left behind in its process (mpiddp/hooks.md)."""

import _posixsubprocess
import _signal
import _thread
import atexit
import builtins
import faulthandler
import gc
import inspect
import multiprocessing.util
import os
import posix
import signal
import subprocess
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddp

MODULES = (os, posix, sys, builtins, signal, _signal, _thread, threading, atexit, subprocess, _posixsubprocess,
           multiprocessing.util, faulthandler, inspect, dist, dist.distributed_c10d)


def state():
    """Return what mpiddp may replace or set in a process."""
    names = {f"{module.__name__}.{name}": value for module in MODULES for name, value in vars(module).items()
             if callable(value)}
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        **names, "blocked": signals_in(status["SigBlk"]), "caught": signals_in(status["SigCgt"]),
        "wakeup_fd": wakeup_fd, "faulthandler": faulthandler.is_enabled(),
        "gc": (gc.isenabled(), gc.get_freeze_count()), "getframeinfo": inspect.getframeinfo.__defaults__,
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "threads": threading.enumerate(), "meta_path": [*sys.meta_path], "path": [*sys.path], "environ": {**os.environ},
        "streams": [(stream, stream.line_buffering, Path(f"/proc/self/fd/{number}").readlink())
                    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr))],
    }


def signals_in(mask):
    """Return the signals of a mask as /proc has it."""
    return {number for number in signal.valid_signals() if int(mask, 16) >> number - 1 & 1}


before = state()
with mpiddp.process_group():
    mpiddp.should_stop()
    dist.all_reduce(torch.ones(1))
    during = state()
after = state()
changed, left = ({name for name in before if before[name] != other[name]} for other in (during, after))
if "sys.excepthook" in left and sys.excepthook.__module__.startswith("torch."):
    left.remove("sys.excepthook")  # torch's own, which it leaves there
if "caught" in left and after["caught"] <= before["caught"]:
    left.remove("caught")  # MPICH's handler of SIGUSR1 is not put back
if MPI.COMM_WORLD.rank == 0:
    print("replaced", *sorted(changed - {"handlers", "environ"}))
print("left", *(f"{name}={after[name]!r}" for name in sorted(left)), flush=True)
