"""Stop at any step when time is up, and continue from there after a restart.

    mpiexec -n 2 python -m mpiddp --stop-before 60 examples/resume.py checkpoint.pt

Time is up when a rank receives SIGUSR1 or SIGTERM, and 60 seconds before Slurm's walltime.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpiddp

CHECKPOINT = Path(sys.argv[1])  # on a file system that all nodes share


def save(epoch, step):
    """Write the state on rank 0; the old file stays complete until the new one replaces it."""
    if dist.get_rank() == 0:
        state = {"epoch": epoch, "step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        new = CHECKPOINT.with_suffix(".new")
        torch.save(state, new)
        new.replace(CHECKPOINT)


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
numbers = torch.rand(4096, 2)
data = TensorDataset(numbers, numbers.sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=64, sampler=sampler)
model = nn.Linear(2, 1).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

first = (0, 0)  # epoch and step to begin with
if CHECKPOINT.exists():
    state = torch.load(CHECKPOINT, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = (state["epoch"], state["step"])
    print(f"rank {dist.get_rank()} goes on in epoch {first[0]} at step {first[1]}\n", end="", flush=True)
model = DistributedDataParallel(model)

for epoch in range(first[0], 10):
    sampler.set_epoch(epoch)  # each epoch has its own order, the same in every run
    for step, (inputs, sums) in enumerate(loader):
        if (epoch, step) < first:
            continue  # it was done before the stop
        if mpiddp.should_stop():  # on all ranks at the same step
            save(epoch, step)
            mpiddp.stop_for_requeue()  # all ranks end with status 75
        loss = nn.functional.mse_loss(model(inputs.to(device)), sums.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save(epoch + 1, 0)
