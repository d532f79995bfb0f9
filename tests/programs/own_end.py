"""End the last rank in the way that HOW names, in a program with its own main(): `own_end.py HOW`.

Most often the other ranks sleep meanwhile.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from mpi4py import MPI

import mpiddp

how = sys.argv[1]
is_last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1


def wait():
    """Stay for longer than any test."""
    time.sleep(600)


if how == "with":
    with mpiddp.process_group():
        if is_last:
            raise ValueError("seven")
        wait()
elif how == "with-exit":
    with mpiddp.process_group():
        if is_last:
            raise SystemExit(7)
        wait()
elif how == "with-caught":
    try:
        with mpiddp.process_group():
            if is_last:
                raise ValueError("seven")
            wait()
    except ValueError:
        wait()
elif how == "half":
    comm = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
    if is_last or MPI.COMM_WORLD.rank == 2:
        with mpiddp.process_group(comm):
            if is_last:
                raise ValueError("seven")
            wait()
    wait()
elif how == "requeue":
    with mpiddp.process_group():
        if is_last:
            os.kill(os.getpid(), signal.SIGUSR1) if mpiddp.should_stop() is False else None
        while not mpiddp.should_stop():
            time.sleep(0.01)
        mpiddp.stop_for_requeue()
elif how == "generator":
    def steps():
        """Hold a group as long as there are steps."""
        with mpiddp.process_group():
            yield 1
            yield 2

    for _ in steps():
        break
elif how == "late":
    if is_last:
        wait()
    mpiddp.init_process_group()
elif how == "descriptors":
    open_files = []
    for _ in range(3):
        with mpiddp.process_group():
            pass
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert open_files[1] == open_files[2], open_files
elif how == "order":
    with mpiddp.process_group():
        if is_last:
            sys.exit(0)
        time.sleep(1)
else:
    mpiddp.init_process_group()
    if how == "handled":
        try:
            sys.exit(3)
        except SystemExit:
            sys.exit(0) if is_last else None
    elif how == "finalize":
        MPI.Finalize()
    elif how == "thread":
        thread = threading.Thread(target=mpiddp.destroy_process_group)
        thread.start()
        thread.join()
    elif how == "unsaid" and not is_last:
        torch.distributed.all_reduce(torch.ones(1))
    elif is_last:
        if how == "unsaid":
            raise SystemExit(7)
        if how == "raise":
            raise ValueError("seven")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "exit":
            sys.exit(7)
    if how == "forgotten":
        time.sleep(MPI.COMM_WORLD.rank)
    elif how not in ("handled", "finalize", "thread"):
        wait()
