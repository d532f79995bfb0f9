"""Hang as KIND says in the fourth step of a training, on rank 1 if on one alone: zoo.py KIND [FOLDER]."""

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
PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207  # (sys/ptrace.h)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000  # (linux/sched.h, sys/mount.h)


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
    left_s = 600
    while left_s:  # a signal ends C's sleep()
        left_s = ctypes.CDLL(None).sleep(left_s)


def sleep_in_native_code() -> None:
    while True:
        ctypes.PyDLL(None).sleep(600)  # it keeps the interpreter (the GIL)


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
    """Read from a file system that does not answer, as root: nobody reads what the kernel asks of /dev/fuse."""
    library = ctypes.CDLL(None, use_errno=True)
    stuck = Path(FOLDER, "stuck")
    stuck.mkdir()
    options = f"fd={os.open('/dev/fuse', os.O_RDWR)},rootmode=40000,user_id=0,group_id=0".encode()
    for done in (library.unshare(CLONE_NEWNS), library.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
                 library.mount(b"stuck", bytes(stuck), b"fuse", 0, options)):
        assert done == 0, os.strerror(ctypes.get_errno())
    (stuck / "file").read_text()


def ask() -> None:
    reading, _ = os.pipe()  # a terminal at which nobody sits
    os.dup2(reading, 0)
    input("continue? ")


def compute() -> None:
    while True:
        pass


def stop_network() -> None:
    """Stop the thread by which gloo sends and receives, of this process alone: its network answers no more."""
    pid = os.getpid()
    ready, told = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        library = ctypes.CDLL(None, use_errno=True)
        (thread,) = (int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()
                     if (one / "comm").read_text() == "gloo_tcp_loop\n")
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            assert library.ptrace(request, thread, None, None) == 0, os.strerror(ctypes.get_errno())
        os.write(told, b"!")
        signal.pause()
    os.read(ready, 1)


def reduce_in_unlike_order() -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups if RANK == 1 else groups[::-1]:
        dist.all_reduce(torch.ones(1), group=group)


EVERYWHERE: dict[str, Callable[[], None]] = {"order": reduce_in_unlike_order}
KINDS: dict[str, Callable[[], None]] = {
    "python": sleep_in_python, "c": sleep_in_c, "mismatch": broadcast, "left": leave, "lock": lock_against_each_other,
    "fork": fork_with_lock, "pool": lose_pool_worker, "stop": stop, "disk": read_from_stuck_file, "input": ask,
    "slow": compute, "native": sleep_in_native_code, "network": stop_network,
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
            if KIND in EVERYWHERE:
                EVERYWHERE[KIND]()
        dist.all_reduce(torch.ones(1))


def validate() -> None:
    dist.barrier()


train()
validate()
