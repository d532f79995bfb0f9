"""Call init_process_group() in the way that the first argument names, and show what came of it."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import init_process_group as by_another_name

how = sys.argv[1]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
before = dist.group.WORLD

if how == "plain":
    dist.init_process_group()
    assert dist.group.WORLD is before
elif how == "same":
    by_another_name("gloo", init_method="env://", rank=rank, world_size=world_size)
    assert dist.group.WORLD is before
elif how == "ours":
    url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    assert dist.group.WORLD is before
elif how == "timeout":
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    assert dist.group.WORLD is not before
elif how == "backend":
    dist.init_process_group("cpu:gloo,cuda:gloo")
    assert dist.group.WORLD is before
elif how == "address":
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29511"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
elif how == "file":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=world_size)
    assert dist.group.WORLD is not before
elif how == "tcp":
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=world_size)
    assert dist.group.WORLD is not before
elif how == "store":
    store = dist.FileStore(sys.argv[2], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    assert dist.group.WORLD is not before
elif how == "halves":
    half, rank = divmod(rank, world_size // 2)
    world_size //= 2
    os.environ["MASTER_PORT"] = sys.argv[2 + half]
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    assert dist.group.WORLD is not before
elif how == "first":
    if rank + 1 == world_size:
        dist.destroy_process_group()
        sys.exit(0)
    world_size -= 1
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
elif how == "mesh":
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    assert mesh["dp"].size() == 2
elif how == "twice":
    dist.init_process_group()
    try:
        dist.init_process_group()
    except ValueError as error:
        assert str(error) == "trying to initialize the default process group twice!"
    else:
        raise AssertionError("a second initialization passed")
elif how == "bare":
    assert before is None
    dist.init_process_group("gloo")

total = torch.ones(1)
dist.all_reduce(total)
assert dist.get_rank() == rank
print(f"{how} {int(total)} of {dist.get_world_size()}\n", end="", flush=True)
