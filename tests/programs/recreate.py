"""Take the group that is there, destroy and re-create it many times, as a script for torchrun may do it."""

import sys

import torch
import torch.distributed as dist

times = int(sys.argv[1])
ours = dist.group.WORLD
for turn in range(times):
    if turn == 0 and ours:
        dist.init_process_group()
        assert dist.group.WORLD is ours
    else:
        dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + turn)])
    dist.all_reduce(value)
    size = dist.get_world_size()
    assert value.item() == size * (size - 1) / 2 + size * turn, value
    dist.destroy_process_group()
print(f"{times} groups\n", end="", flush=True)
