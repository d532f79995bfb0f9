"""A worker that ends abnormally is named before the error by which its rank has noticed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import pytest

from mpiddp.failure.exception import make_report
from mpiddp.failure.workers import find_dead_worker
from mpiddp.runner.signals import HandlerGuard
from tests.messages import find, message
from tests.support import MPICH_FIRST, Mpi, check, first_of, mpiexec

FORK = multiprocessing.get_context("fork")
PIPE = """
import multiprocessing, os, signal, sys, time, torch.distributed as dist
def work(connection):
    connection.close()
    time.sleep(0.5)  # an end takes time
    {end}
if dist.get_rank() == 1:
    ours, its = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=work, args=(its,), name="reader").start()
    its.close()
    ours.recv()
dist.barrier()
"""
LOADER = """
import os, signal, sys, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if dist.get_rank() == 1 and index == 20:
            {end}
        return index
for item in DataLoader(Data(), num_workers=1):
    dist.barrier()
"""
ENDS = {
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", message("launch/killed_by_sigkill")),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)",
              message("launch/killed_by_signal", signal="SIGSEGV", description="Segmentation fault")),
    "exit": ("sys.exit(3)", message("launch/exited", status=3)),
}


@pytest.mark.light
@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize("end", first_of(list(ENDS)))
def test_a_worker_that_ends_is_named(mpi: Mpi, end: str) -> None:
    code, how = ENDS[end]
    done = check(mpiexec(mpi, 2, "-c", PIPE.format(end=code)), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    (dead,) = find("launch/dead_worker", report["cause"], worker="reader", error="EOFError")
    assert dead["how"] == how
    assert bool(find("launch/check_memory", done.stderr)) == (end == "kill"), done.stderr


@pytest.mark.parametrize("end", first_of(["exit", "kill", "crash"]))
def test_a_loaders_worker_that_ends_is_named(quick: Mpi, end: str) -> None:
    """By torch itself, if its handler of SIGCHLD is called before the rank has noticed."""
    code, how = ENDS[end]
    done = check(mpiexec(quick, 2, "-c", LOADER.format(end=code)), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    of_torch = {"exit": "exited unexpectedly with exit code 3", "kill": "is killed by signal: Killed",
                "crash": "is killed by signal: Segmentation fault"}[end]
    assert f") {how} (then " in report["cause"] or of_torch in report["cause"], done.stderr
    assert bool(find("launch/check_memory", done.stderr)) == (end == "kill"), done.stderr


@pytest.fixture
def start() -> Iterator[Callable[..., BaseProcess]]:
    """Return a function that starts a worker, which ends with the test."""
    workers = []

    def start_worker(act: Callable[..., object], *arguments: object) -> BaseProcess:
        worker = FORK.Process(target=act, args=arguments)
        worker.start()
        workers.append(worker)
        return worker

    yield start_worker
    for worker in workers:
        worker.kill()
        worker.join()
        worker.close()  # else a later test may find it


@pytest.mark.process
def test_a_worker_that_its_rank_has_ended_is_not_to_blame(start: Callable[..., BaseProcess]) -> None:
    ended, working = start(time.sleep, 600), start(time.sleep, 600)
    ended.terminate()
    ended.join()
    start(os.getpid).join()
    assert find_dead_worker([ValueError("seven")]) == ""
    assert working.is_alive()


@pytest.mark.process
def test_the_traceback_of_a_worker_says_more_than_its_status(start: Callable[..., BaseProcess]) -> None:
    start(os._exit, 1).join()
    quoted = RuntimeError('Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: seven')
    assert find_dead_worker([quoted]) == ""
    assert find_dead_worker([ValueError("seven")]).endswith(message("launch/exited", status=1))


def raise_in_handler(*_: object) -> None:
    """Raise as torch's handler of SIGCHLD does."""
    raise RuntimeError("a worker has ended")


@pytest.mark.process
def test_a_handler_that_raises_when_a_worker_ends_does_not_hide_it(start: Callable[..., BaseProcess]) -> None:
    ours, its = FORK.Pipe()

    def work() -> None:
        its.close()
        time.sleep(0.5)
        os._exit(3)

    former = signal.signal(signal.SIGCHLD, raise_in_handler)
    try:
        start(work)
        its.close()
        with pytest.raises(EOFError) as error:
            ours.recv()
        guard = HandlerGuard()
        assert f"{message('launch/exited', status=3)} (then EOFError)" in make_report(error.value, 0, "n0").cause
        guard.end()
        assert signal.getsignal(signal.SIGCHLD) is raise_in_handler
    finally:
        signal.signal(signal.SIGCHLD, former)
        ours.close()
