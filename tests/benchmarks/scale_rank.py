"""A rank of `scale.py`: from MPI ready to group ready, by mpiddp or by env://; rank 0 prints what it took as JSON.

The seconds are those of the slowest rank, to a first all-reduce; the store's operations are the average
of the ranks' in the making of the group.
"""

import json
import os
import socket
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from mpi4py import MPI

world, how = MPI.COMM_WORLD, sys.argv[1]
calls = Counter()


class Counting(dist.Store):
    """A store that counts what is asked of another."""

    def __init__(self, store):
        super().__init__()
        self.store = store


def counted(name):
    def call(self, *arguments):
        calls[name] += 1
        return getattr(self.store, name)(*arguments)

    return call


for name in ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "num_keys", "multi_get", "multi_set",
             "append", "set_timeout", "has_extended_api"):
    setattr(Counting, name, counted(name))


def by_mpiddp():
    import mpiddp
    from mpiddp.act.rendezvous import KeySpaces

    if "--count" in sys.argv:
        fresh = KeySpaces.fresh
        KeySpaces.fresh = lambda keys, size: Counting(fresh(keys, size))
    mpiddp.init_process_group(backend="gloo")


def by_env():
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if "--count" not in sys.argv:
        dist.init_process_group("gloo")
        return
    store = dist.TCPStore("127.0.0.1", port, world.size, is_master=world.rank == 0)
    dist.init_process_group("gloo", store=Counting(store), rank=world.rank, world_size=world.size)


with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
port = world.bcast(port)
world.Barrier()
start = time.perf_counter()
by_mpiddp() if how == "mpiddp" else by_env()
dist.all_reduce(torch.ones(1))
seconds = world.reduce(time.perf_counter() - start, MPI.MAX)
operations = world.reduce(sum(calls.values()))
if world.rank == 0:
    print(json.dumps({"seconds": seconds, "operations": operations / world.size}), flush=True)
world.Barrier()
os._exit(0) if how == "env" and MPI.Finalize() is None else None
