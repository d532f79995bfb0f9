"""Print as JSON the addresses on which this rank's process listens, and the job's meeting point."""

import json
import os
import socket
import time

import psutil
import torch.distributed as dist

dist.barrier()
listening = [c.laddr[:2] for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print(json.dumps({
    "rank": dist.get_rank(), "listening": listening,
    "meeting": [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])], "host": socket.gethostname(),
}) + "\n", end="", flush=True)
time.sleep(float(os.environ.get("LINGER_S", "0")))
dist.barrier()
