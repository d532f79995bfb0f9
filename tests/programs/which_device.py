"""Tell this rank's device, and the backend whose group is bound to it."""

import torch
import torch.distributed as dist

current = torch.accelerator.current_accelerator()
index = torch.get_device_module(current).current_device()
print(f"{dist.get_rank()}: {current}:{index} {dist.get_backend()} {dist.group.WORLD.bound_device_id}\n", end="")
