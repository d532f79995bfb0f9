"""Load data by workers of every kind while all processes of a step get signals; a loader can still end its workers."""

import ctypes
import itertools
import os
import time

from torch.utils.data import DataLoader, Dataset

import mpiddp


class Numbers(Dataset):
    """Numbers with the worker's process id; -1 is where a worker holds Python's lock for ever."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        if self.numbers[index] < 0:
            ctypes.PyDLL(None).sleep(600)
        return self.numbers[index], os.getpid()


def end_stuck_worker(method):
    """Terminate a worker in native code, and return its exit status."""
    loader = DataLoader(Numbers([1, -1]), num_workers=1, multiprocessing_context=method, prefetch_factor=1)
    batches = iter(loader)
    next(batches)
    worker, = batches._workers
    time.sleep(0.3)
    worker.terminate()
    worker.join()
    return worker.exitcode


if __name__ == "__main__":
    batches = {
        method: iter(DataLoader(Numbers(range(10**6)), num_workers=2, multiprocessing_context=method))
        for method in ("fork", "spawn", "forkserver")}
    for of_method in batches.values():
        assert len({int(next(of_method)[1]) for _ in range(2)}) == 2  # both workers have started
    assert not mpiddp.should_stop()
    print("READY", flush=True)
    while not mpiddp.should_stop():
        for of_method in batches.values():
            next(of_method)
        time.sleep(0.01)
    time.sleep(0.3)
    for method, of_method in batches.items():
        print(method, len({int(pid) for _, pid in itertools.islice(of_method, 20)}), flush=True)
    print({method: end_stuck_worker(method) for method in batches}, flush=True)
