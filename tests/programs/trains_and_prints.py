"""Train by DDP and print numbered lines; at the file `go` in a FOLDER come to an END: normal, raise or kill of a RANK.

Each line is noted in a file before it is printed, with its time. Numbers are written in letters, because lines that
differ in digits alone are folded.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, STEP_S, WAIT_S = 100, 0.02, 0.05
DIGITS = str.maketrans("0123456789", "abcdefghij")


def say(record, rank):
    """Print the next line."""
    say.number += 1
    record.write(f"{say.number} {time.time()}\n")
    record.flush()
    print(f"<{rank}:{say.number}>".translate(DIGITS), flush=True)


folder, end, failing = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = dist.get_rank()
torch.manual_seed(1)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
say.number = 0
with (folder / f"lines.{rank}").open("w") as record:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        say(record, rank)
        time.sleep(STEP_S)
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    (folder / f"weights.{rank}").write_text(hashlib.sha256(weights).hexdigest())
    while not (folder / "go").exists():
        say(record, rank)
        time.sleep(WAIT_S)
    dist.barrier()
    if rank == failing and end == "raise":
        raise ValueError("seven")
    if rank == failing and end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    say(record, rank)
