"""Say hello from every rank, written for torchrun; runs unchanged under mpiddp."""

import os
import socket

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])

if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")

meeting_point = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
me = f"{socket.gethostname()}:{dist.get_backend()}"
print(f"[{meeting_point}] hello from [{me}] process {rank}/{world_size}\n", end="", flush=True)

dist.destroy_process_group()
