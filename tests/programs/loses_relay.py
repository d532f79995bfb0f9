"""A rank 1 whose relay is killed while it, a thread and a worker write: `HOW` is what rank 1 does at its end."""

import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import torch.distributed as dist

LINES = 50


def kill_relay():
    """Kill the relay of this rank's output: it has what stdout leads to."""
    pipe = Path("/proc/self/fd/1").readlink()
    for process in psutil.process_iter():
        try:
            ends = [one.readlink() for one in Path(f"/proc/{process.pid}/fd").iterdir()]
            if pipe in ends and process.cmdline()[0].startswith("mpiddp: output of rank 1"):
                process.send_signal(signal.SIGSTOP)
                print("unread", flush=True)
                process.kill()
                return
        except (OSError, psutil.Error, IndexError):
            continue
    raise RuntimeError("no relay")


def write(name):
    """Write lines, as a thread and as a worker; more than a pipe holds."""
    for number in range(LINES):
        print(f"{name} {number} {'x' * 2000}", flush=True)
        time.sleep(0.02)


how = sys.argv[1]
dist.barrier()
if dist.get_rank() == 1:
    others = [threading.Thread(target=write, args=("thread",)),
              multiprocessing.get_context("fork").Process(target=write, args=("worker",))]
    for one in others:
        one.start()
    time.sleep(0.3)
    kill_relay()
    for one in others:
        one.join()
    subprocess.run(["echo", "program"], check=True)
    print("own", flush=True)
    print("error", file=sys.stderr, flush=True)
dist.barrier()
if how == "raises" and dist.get_rank() == 1:
    raise ValueError("seven")
