"""Come to an end of some kind on rank 1, in a program with its own main(): `own_end.py HOW`.

The other ranks sleep meanwhile, or where HOW ends with -through are at the end of their block.
"""

import os
import sys
import time

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
elif how == "with-through":
    with mpiddp.process_group():
        if is_last:
            time.sleep(1)
            raise ValueError("seven")
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
elif how == "order":
    with mpiddp.process_group():
        if is_last:
            sys.exit(0)
        time.sleep(1)
else:
    mpiddp.init_process_group()
    if is_last:
        if how == "raise":
            raise ValueError("seven")
        if how == "hook":
            sys.excepthook = lambda *_: print("hook", file=sys.stderr, flush=True)
            raise ValueError("seven")
        if how == "exit":
            sys.exit(7)
        if how == "_exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), 9)
    if how == "forgotten":
        time.sleep(MPI.COMM_WORLD.rank)
    else:
        wait()
