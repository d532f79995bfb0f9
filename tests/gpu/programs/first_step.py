"""Reduce a number over all GPUs; rank 0 prints when that was done, and each rank its device and its group's."""

import os
import time

import torch
import torch.distributed as dist

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
if not dist.is_initialized():  # under torchrun
    dist.init_process_group("nccl", device_id=device)
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
value = int(total.item())
if dist.get_rank() == 0:
    print(f"done {time.time()}\n", end="", flush=True)
uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
print(f"rank {dist.get_rank()}: {dist.get_backend()} bound to {dist.group.WORLD.bound_device_id} "
      f"on cuda:{torch.cuda.current_device()} {uuid} sum {value}\n", end="", flush=True)
dist.destroy_process_group()
