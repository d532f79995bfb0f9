"""Spawn one's own ranks from a single process, as torch's tutorials do."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def demo(rank, world_size, port):
    """Be one rank of the script's own world."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"spawned {rank} of {int(total)}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as server:
        free = server.getsockname()[1]
    mp.spawn(demo, args=(2, free), nprocs=2, join=True)
