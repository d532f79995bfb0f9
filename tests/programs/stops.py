"""Work in steps until it is time to stop: `stops.py [--workers] [--uneven] [--seconds S]`.

Each rank prints its process id, and at the end the step at which it stopped. With --workers the steps take
data from a DataLoader with two forked workers. With --uneven rank 1 calls should_stop() once more at its end.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import mpiddp

rank = os.environ.get("RANK", "0")
seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 60
data = TensorDataset(torch.zeros(10_000, 4))
batches = iter(DataLoader(data, num_workers=2 if "--workers" in sys.argv else 0))
if dist.is_initialized():
    dist.all_reduce(torch.ones(1))  # wait until every rank is here
step, start = 0, time.monotonic()
mpiddp.should_stop()
print(f"pid {os.getpid()}\nREADY\n", end="", flush=True)
stopped = False
while True:
    next(batches)
    time.sleep(0.02 * (1 + int(rank)) / 2)
    over = torch.tensor(float(time.monotonic() > start + seconds))
    if dist.is_initialized():
        dist.all_reduce(over)  # the ranks end together, if nothing stops them before
    step += 1
    stopped = mpiddp.should_stop()
    if stopped or over:
        break
if "--uneven" in sys.argv and rank == "1":
    mpiddp.should_stop()
print(f"rank {rank} {'stopped' if stopped else 'came to the end'} at step {step}, "
      f"restart {mpiddp.restart_count} {os.environ.get('TORCHELASTIC_RESTART_COUNT')}\n", end="", flush=True)
sys.exit(mpiddp.REQUEUE if stopped else 0)
