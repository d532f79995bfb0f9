"""Make steps and checkpoints as examples/train_digits.py does, without a model: counts.py --epochs N --checkpoint C."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist

import mpiddp

STEPS_PER_EPOCH = 24
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--checkpoint")
options = parser.parse_args()
first = torch.load(options.checkpoint, weights_only=True)["epoch"] if Path(options.checkpoint).exists() else 0
for epoch in range(first, options.epochs):
    for _ in range(STEPS_PER_EPOCH):
        time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
        if mpiddp.should_stop():
            mpiddp.stop_for_requeue()
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch + 1}, options.checkpoint)
    dist.barrier()
