"""Train until a file is there, or for so many steps; print a digest: questioned.py plain|busy FILE|STEPS.

`busy` has DataLoader workers, threads that run Python, allocate and collect garbage, and others that wait in torch.
"""

import gc
import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

KIND, END = sys.argv[1], sys.argv[2]
CHECKED = 10  # steps between two looks whether it is over
COMPUTING, COLLECTING = 6, 2  # threads
torch.manual_seed(7)
torch.set_num_threads(2 if KIND == "busy" else 1)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1)))
optimizer = torch.optim.Adam(model.parameters())
generator = torch.Generator().manual_seed(dist.get_rank())
data = TensorDataset(torch.randn(1000, 20, generator=generator), torch.randn(1000, 1, generator=generator))
over = threading.Event()


def compute() -> None:
    """Make frames of all kinds, and objects."""
    while not over.wait(0.01):
        sorted(range(300), key=lambda one: -one)
        names: dict[str, object] = {}
        exec(compile("def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\nfound = f(8)", "made", "exec"), names)
        torch.ones(64, 64).matmul(torch.ones(64, 64))


def collect() -> None:
    """Collect garbage all the time."""
    while not over.wait(0.05):
        circle: list[object] = []
        circle.append(circle)
        gc.collect(0)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches for ever; workers are forked once, as tests/hangs/training.py says, and before the threads."""
    loader = DataLoader(data, batch_size=50, shuffle=True, generator=generator,
                        num_workers=2 if KIND == "busy" else 0, persistent_workers=KIND == "busy")
    while True:
        yield from loader


def is_over(steps: int) -> bool:
    """Tell on all ranks whether the training is over."""
    if END.isdigit():
        return steps >= int(END)
    if steps % CHECKED:
        return False
    there = torch.tensor(int(Path(END).exists()))
    dist.broadcast(there, 0)
    return bool(there)


steps, threads = 0, []
for inputs, targets in batches():
    if KIND == "busy" and not threads:
        threads = [threading.Thread(target=one) for one in [compute] * COMPUTING + [collect] * COLLECTING]
        for thread in threads:
            thread.start()
    if is_over(steps):
        break
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    if not END.isdigit():
        time.sleep(0.01)  # to have fewer steps to make once more
    steps += 1
over.set()
for thread in threads:
    thread.join()
weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print(f"{steps} steps, {hashlib.sha256(weights).hexdigest()}\n", end="", flush=True)
