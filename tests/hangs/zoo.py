"""Hang as KIND says, on rank 1, in the fourth step of a training, or on no rank: zoo.py KIND [FOLDER]."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

KIND, FOLDER = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
RANK = int(os.environ["RANK"])


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of which some come from a pipe that nobody writes to."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if KIND == "worker" and RANK == 1 and index >= 6:
            read_sample()
        return torch.ones(2)


def read_sample() -> None:
    Path(FOLDER, "fifo").read_text()


def sleep_in_python() -> None:
    time.sleep(600)


def sleep_in_c() -> None:
    ctypes.CDLL(None).sleep(600)


def broadcast() -> None:
    dist.broadcast(torch.ones(1), 0)


def leave() -> None:
    sys.exit(0)


def lock_against_each_other() -> None:
    first, second = threading.Lock(), threading.Lock()
    barrier = threading.Barrier(2)

    def other() -> None:
        with second:
            barrier.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        barrier.wait()
        take_second(second)


def take_second(second: threading.Lock) -> None:
    second.acquire()


def fork_with_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    if (child := os.fork()) == 0:
        log_in_child(lock)
    os.waitpid(child, 0)


def log_in_child(lock: threading.Lock) -> None:
    lock.acquire()


def lose_pool_worker() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(die)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def read_from_stuck_file() -> None:
    Path(FOLDER, "stuck", "file").read_text()


def ask() -> None:
    reading, _ = os.pipe()  # a terminal at which nobody sits
    os.dup2(reading, 0)
    input("continue? ")


def compute() -> None:
    while True:
        pass


KINDS: dict[str, Callable[[], None]] = {
    "python": sleep_in_python, "c": sleep_in_c, "mismatch": broadcast, "left": leave, "lock": lock_against_each_other,
    "fork": fork_with_lock, "pool": lose_pool_worker, "stop": stop, "disk": read_from_stuck_file, "input": ask,
    "slow": compute,
}


def batches() -> Iterator[Any]:
    """Yield batches for ever; of unequal number, or from workers, where that is what hangs."""
    if KIND == "worker":
        yield from torch.utils.data.DataLoader(Samples(), num_workers=2)
    for number in range(10**9):
        if KIND == "uneven" and RANK == 1 and number == 3:
            return
        yield number


def train() -> None:
    for step, _ in enumerate(batches()):
        if step == 2:
            print("READY\n", end="", flush=True)
        if step == 3:
            if RANK == 1 and KIND in KINDS:
                KINDS[KIND]()
            if KIND == "nobody":
                dist.recv(torch.ones(1))
        dist.all_reduce(torch.ones(1))


def validate() -> None:
    dist.barrier()


train()
validate()
