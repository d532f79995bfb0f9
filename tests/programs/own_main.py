"""Use the functions of the package from a program that keeps its own main()."""

import faulthandler
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from mpi4py import MPI

import mpiddp


def total():
    """Return how many ranks the default group has, found by an all-reduce."""
    value = torch.ones(1)
    dist.all_reduce(value)
    return int(value)


how = sys.argv[1]
world = MPI.COMM_WORLD
if how == "with":
    os.environ["RANK"] = "stale"
    with mpiddp.process_group() as env:
        assert (env.rank, env.world_size) == (world.rank, world.size) == (dist.get_rank(), dist.get_world_size())
        assert (env.local_rank, env.local_world_size, env.node_rank, env.num_nodes) == (world.rank, world.size, 0, 1)
        assert (env.backend, env.device) == ("gloo", torch.device("cpu"))
        assert os.environ["MASTER_PORT"] == str(env.master_port)
        assert os.environ["RANK"] == str(world.rank)
        print(f"with {total()}\n", end="", flush=True)
    assert os.environ["RANK"] == "stale"
    assert "MASTER_PORT" not in os.environ
elif how == "again":
    for _ in range(5):
        env = mpiddp.init_process_group()
        try:
            mpiddp.init_process_group()
        except ValueError as error:
            assert "already exists" in str(error)
        else:
            raise AssertionError("a second initialization passed")
        assert total() == world.size
        mpiddp.destroy_process_group()
    print("again\n", end="", flush=True)
elif how == "halves":
    comm = world.Split(world.rank % 2, key=-world.rank)
    with mpiddp.process_group(comm, backend="gloo") as env:
        assert env.rank == comm.rank
        assert total() == comm.size == env.world_size
        ports = world.allgather(env.master_port)
        assert len(set(ports)) == 2
        print(f"halves {env.rank}\n", end="", flush=True)
elif how == "alone":
    with mpiddp.process_group(MPI.COMM_SELF) as env:
        assert total() == env.world_size == 1
        print("alone\n", end="", flush=True)
elif how == "refused":
    try:
        mpiddp.init_process_group(backend="nccl")
    except mpiddp.LaunchError as error:
        print(f"refused {error.name}\n", end="", flush=True)
elif how == "raises":
    try:
        with mpiddp.process_group():
            raise KeyError("lost")
    except KeyError:
        assert not dist.is_initialized()
        print("raises\n", end="", flush=True)
elif how == "as before":
    def state():
        """Return what the launcher changes in a process."""
        handlers = [signal.getsignal(number) for number in range(1, signal.NSIG) if number not in (9, 19, 32, 33)]
        return handlers, sys.exit, os._exit, signal.set_wakeup_fd(-1), faulthandler.is_enabled(), threading.enumerate()

    before, hook = state(), sys.excepthook
    with mpiddp.process_group():
        assert state() != before
    assert state() == before
    assert sys.excepthook == hook or "torch" in sys.excepthook.__module__  # torch leaves one of its own
    print("as before\n", end="", flush=True)
elif how == "adopts":
    before = dist.group.WORLD
    with mpiddp.process_group() as env:
        assert dist.group.WORLD is before
        assert env.world_size == total()
    assert not dist.is_initialized()
    with mpiddp.process_group():
        print(f"adopts {total()}\n", end="", flush=True)
