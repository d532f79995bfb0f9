"""Train a small convolutional network on scikit-learn's digits with DistributedDataParallel.

The 1,797 images of handwritten digits come with scikit-learn. A fifth of them is held out. With
--checkpoint the run writes its state after every epoch, and in the middle of an epoch if it has to stop
because the walltime is near or another job takes its nodes. After a restart it continues from there
and ends with the same weights as a run that was never stopped.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import mpiddp

GLOBAL_BATCH = 60


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer; more make a bigger model")
    parser.add_argument("--checkpoint", type=Path, help="file on a file system that all nodes share")
    return parser.parse_args()


def load_data():
    """Return the training and the held-out images, 1 x 8 x 8 in [0, 1], with their digits."""
    images, digits = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, digits, test_size=0.2, stratify=digits, random_state=0)
    train_x, test_x, train_y, test_y = map(torch.as_tensor, parts)
    shape = (-1, 1, 8, 8)
    return (
        TensorDataset(train_x.float().reshape(shape), train_y),
        TensorDataset(test_x.float().reshape(shape), test_y),
    )


def make_model(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )


def train_epoch(model, optimizer, loader, device, done):
    """Train an epoch after the first `done` steps; return how many are done, and the last loss."""
    model.train()
    loss = torch.tensor(float("nan"))
    for step, (images, digits) in enumerate(loader):
        if step < done:
            continue
        if mpiddp.should_stop():
            return step, loss.item()
        loss = nn.functional.cross_entropy(model(images.to(device)), digits.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return len(loader), loss.item()


@torch.no_grad()
def accuracy(model, data, device):
    """Return the fraction of correct answers; each rank evaluates its part of the data."""
    model.eval()
    part = range(dist.get_rank(), len(data), dist.get_world_size())
    images, digits = data[list(part)]
    right = (model(images.to(device)).argmax(1) == digits.to(device)).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def save(path, epoch, step, model, optimizer):
    """Write a checkpoint; the old file stays complete until the new one replaces it."""
    state = {"epoch": epoch, "step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    temporary = path.with_suffix(".new")
    torch.save(state, temporary)
    temporary.replace(path)


def main():
    options = parse_arguments()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    train_data, test_data = load_data()
    sampler = DistributedSampler(train_data, seed=0)
    loader = DataLoader(train_data, batch_size=max(1, GLOBAL_BATCH // world_size), sampler=sampler)
    model = make_model(options.width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    first = done = 0
    if options.checkpoint and options.checkpoint.exists():
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done = state["epoch"], state["step"]
        if rank == 0:
            print(f"resumed in epoch {first} after {done} steps", flush=True)
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    # DDP sorts gradients into buckets at its first backward pass, and sums them in that order from the second pass
    # on. With one pass before the training, a continued run computes the same steps, to the bit.
    model(train_data[:1][0].to(device)).sum().backward()
    optimizer.zero_grad()

    steps, start = 0, time.perf_counter()
    epochs = tqdm(range(first, options.epochs), desc="epochs", disable=rank != 0)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        reached, loss = train_epoch(model, optimizer, loader, device, done)
        epochs.set_postfix(loss=f"{loss:.3f}")
        steps, done, stopped = steps + reached - done, 0, reached < len(loader)
        if options.checkpoint and rank == 0:
            save(options.checkpoint, *((epoch, reached) if stopped else (epoch + 1, 0)), model, optimizer)
        if stopped:
            mpiddp.stop_for_requeue()

    seconds = time.perf_counter() - start
    share = accuracy(model, test_data, device)
    if rank == 0:
        print(f"{steps / seconds:.1f} steps per second")
        print(f"held-out accuracy {share:.4f} with {world_size} ranks", flush=True)


if __name__ == "__main__":
    main()
