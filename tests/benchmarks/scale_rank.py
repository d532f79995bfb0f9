"""A rank of `scale.py`: makes groups by mpiddp, by env:// and as for NCCL in turn; rank 0 prints what each took.

    mpiexec -n RANKS python scale_rank.py TURNS

Seconds are those of the slowest rank, from MPI ready to the end of a first all-reduce, with torch and
mpiddp imported before; the first turn does not count. Operations are what a rank asks of rank 0's store to make
the group, the ranks' average, counted in turns of their own. "nccl" ends with what NCCL asks of the store in the
place of gloo's mesh: the identifier that rank 0 makes (torch's ProcessGroupNCCL, broadcastUniqueNCCLID).
"""

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddp
from mpiddp.base.config import LaunchConfig
from mpiddp.bootstrap import store as rendezvous
from mpiddp.bootstrap.store import KeySpaces
from mpiddp.launch import join

world = MPI.COMM_WORLD
asked = 0


class Counting(dist.Store):
    """A store that counts what is asked of another."""

    def __init__(self, store):
        super().__init__()
        self.store = store


def counted(name):
    def call(self, *arguments):
        global asked
        asked += name not in LOCAL
        return getattr(self.store, name)(*arguments)

    return call


LOCAL = ("set_timeout", "has_extended_api")  # what a store answers by itself
for name in ("set", "get", "add", "wait", "check", "compare_set", "delete_key", "num_keys", "multi_get", "multi_set",
             "append", *LOCAL):
    setattr(Counting, name, counted(name))


class CountedSpaces(KeySpaces):
    """The parts of a job's store, counted."""

    def __init__(self, store, token):
        super().__init__(store, token)
        self.job, self.groups = Counting(self.job), KeySpaces(store, token)

    def fresh(self, world_size):
        return Counting(self.groups.fresh(world_size))


def by_mpiddp(wrapped):
    rendezvous.KeySpaces = CountedSpaces if wrapped else KeySpaces
    mpiddp.init_process_group(backend="gloo")
    yield
    mpiddp.destroy_process_group()


def by_env(wrapped):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(world.bcast(port)))
    world.Barrier()
    if wrapped:
        store = wrapped(dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world.size, world.rank == 0))
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    else:
        dist.init_process_group("gloo")
    yield
    world.Barrier()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def by_nccl(wrapped):
    rendezvous.KeySpaces = CountedSpaces if wrapped else KeySpaces
    job = join(world, LaunchConfig(backend="gloo", binding="launcher"))
    store = job.membership.groups.keys.fresh(world.size)
    if world.rank == 0:
        store.set("0", "identifier")
    store.get("0")
    yield
    job.leave_over_mpi(None)
    job.restore()


ways = {"mpiddp": by_mpiddp, "env": by_env, "nccl": by_nccl}
found = {how: [] for how in ways}
for _ in range(int(sys.argv[1]) + 1):
    for how, make in ways.items():
        world.Barrier()
        start = time.perf_counter()
        group = make(None)
        next(group)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))
        found[how].append(world.reduce(time.perf_counter() - start, MPI.MAX))
        next(group, None)
told = {how: {"seconds": seconds[1:]} for how, seconds in found.items()}
for how, make in ways.items():
    asked = 0
    group = make(Counting)
    next(group)
    told[how]["operations"] = world.allreduce(asked) / world.size
    next(group, None)
if world.rank == 0:
    print(json.dumps(told), flush=True)
world.Barrier()
MPI.Finalize()
os._exit(0)
