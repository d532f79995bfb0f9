"""Print as JSON the addresses on which this rank's process listens, and the job's meeting point."""

import json
import os
import socket
import sys
import time

import psutil
import torch.distributed as dist

with_group = "--no-group" not in sys.argv
if with_group and not dist.is_initialized():  # under torchrun and the plain recipe
    dist.init_process_group("gloo")
if with_group:
    dist.barrier()
listening = [c.laddr[:2] for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print(json.dumps({
    "rank": int(os.environ["RANK"]), "listening": listening,
    "meeting": [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])], "host": socket.gethostname(),
}) + "\n", end="", flush=True)
time.sleep(float(os.environ.get("LINGER_S", "0")))
if with_group:
    dist.barrier()
