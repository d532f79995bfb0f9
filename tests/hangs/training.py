"""Train on scikit-learn's digits, with everything that may look like a hang: training.py SECONDS PAUSE CHECKPOINT.

Each epoch ends with a validation on rank 0 alone, and a checkpoint; a worker of rank 1's DataLoader sleeps for PAUSE
seconds once in each tenth of the time. Workers are forked once: beside gloo's threads, a worker forked by Python 3.8 to
3.11 may hang for ever (python/cpython#112275).
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SECONDS, PAUSE_S, CHECKPOINT = float(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
PAUSES = 10
START = time.monotonic()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
TRAINED = 1500


class Digits(Dataset):
    """Images and labels; a worker sleeps at the index `stops`."""

    def __len__(self) -> int:
        return TRAINED

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == stops:
            time.sleep(PAUSE_S)
        return images[index], labels[index]


torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
                      nn.Flatten(), nn.Linear(2048, 10))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-3)
stops = torch.tensor(-1).share_memory_()  # -1 for none
sampler = DistributedSampler(Digits())
loader = DataLoader(Digits(), batch_size=50, sampler=sampler, num_workers=1, persistent_workers=True)
paused, epoch = 0, 0
right = torch.zeros(1)
while True:
    over = torch.tensor(float(time.monotonic() - START > SECONDS))
    dist.broadcast(over, 0)
    if over:
        break
    due = time.monotonic() - START > SECONDS * (paused + 0.5) / PAUSES
    sampler.set_epoch(epoch)
    stops.fill_(next(iter(sampler)) if due and dist.get_rank() == 1 else -1)
    paused += due
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean()
        torch.save(model.state_dict(), CHECKPOINT)
    dist.barrier()
    epoch += 1
print(f"rank {dist.get_rank()}: {epoch} epochs, {paused} pauses, {float(right):.3f} right\n", end="", flush=True)
