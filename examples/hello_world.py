"""Say hello from every rank. There is no set-up code: mpiddp has done everything."""

import os
import socket

import torch.distributed as dist

meeting_point = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
me = f"{socket.gethostname()}:{dist.get_backend()}"
print(f"[{meeting_point}] hello from [{me}] process {dist.get_rank()}/{dist.get_world_size()}\n", end="", flush=True)
