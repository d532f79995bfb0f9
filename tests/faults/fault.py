"""Train until one rank comes to a bad end: `fault.py KIND MOMENT RANK`, where RANK may be "all"."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

KIND, MOMENT, RANK = sys.argv[1:]
MINE = RANK in ("all", os.environ["RANK"])


def by_signal(number: int) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), number)
    time.sleep(600)


def by_loader() -> None:
    """Fail in a DataLoader's worker."""
    from torch.utils.data import DataLoader, Dataset

    class Broken(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            raise ValueError("seven in a worker")

    list(DataLoader(Broken(), num_workers=2))


def by_memory() -> None:
    """Use more memory than the cgroup allows."""
    hoard = []
    while True:
        hoard.append(bytearray(os.urandom(1 << 20)) * 16)


def by_atexit() -> None:
    """Raise in an atexit function."""
    atexit.register(raise_seven)


def raise_seven() -> None:
    """Raise."""
    raise ValueError("seven")


def by_thread() -> None:
    """Raise SystemExit in a thread, and again in the main thread, which asks for the result."""
    with ThreadPoolExecutor() as pool:
        pool.submit(sys.exit, 7).result()


def interrupt() -> None:
    """Be interrupted as by Ctrl-C, on this rank alone."""
    raise KeyboardInterrupt


KINDS = {
    "raise": raise_seven,
    "exit": lambda: sys.exit(7),
    "message": lambda: sys.exit("seven in words"),
    "thread": by_thread,
    "_exit": lambda: os._exit(7),
    "native-exit": lambda: ctypes.CDLL(None)._exit(7),
    "loader": by_loader,
    "atexit": by_atexit,
    "interrupt": interrupt,
    "memory": by_memory,
    **{name: lambda name=name: by_signal(getattr(signal, name)) for name in (
        "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSTOP")},
}


def at(moment: str) -> None:
    """End as KIND says if this is the rank and the moment."""
    if MINE and moment == MOMENT:
        print(f"FAULT {time.time()}\n", end="", file=sys.stderr, flush=True)
        KINDS[KIND]()


subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # must not outlive the job
at("import")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if KIND == "SIGSTOP":  # the other ranks shall soon notice that one is stopped
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
at("before")
total = torch.ones(1)
for step in range(10**6 if MOMENT == "loop" and KIND != "atexit" else 3):
    if step == 2:
        at("loop")
    dist.all_reduce(total)
    total.fill_(1)
at("end")
