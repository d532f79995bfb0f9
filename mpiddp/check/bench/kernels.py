"""How fast a rank multiplies matrices and copies memory: its host's, its device's, and between the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WINDOW_S = 0.2  # two periods of a cgroup's quota (100 ms): in a shorter window a rank may be lucky or unlucky
WARM_UP_S = 0.05
GPU_ROWS = 8192  # of matrices that keep a GPU busy for some ms
CPU_ROWS = ((4, 512), (16, 1024), (10**9, 2048))  # for at most so many threads
HOST_BYTES = 2**26  # of each of two buffers; those of a node's ranks together exceed its caches
DEVICE_BYTES = 2**29
PINNED_BYTES = 2**26
MIN_COPIES = 3
BATCH_S = 0.01  # of work that is given to a device before it is waited for


def measure_matmul(device: torch.device, budget_s: float) -> float | None:
    """Return the FLOP/s of a product of square matrices, the best of the budget's windows; None if it has no window.

    It is float32 on a CPU, on the threads that torch has here, and bfloat16 on accelerators that compute with it.
    """
    if budget_s < WARM_UP_S + WINDOW_S:
        return None
    rows = GPU_ROWS
    if device.type == "cpu":
        rows = next(size for threads, size in CPU_ROWS if torch.get_num_threads() <= threads)
    dtype = matmul_dtype(device)
    small = torch.ones(64, 64, device=device, dtype=dtype)
    torch.mm(small, small)  # so that the library's workspace is not taken from the matrices' memory
    generator = torch.Generator(device).manual_seed(0)  # the script's random state stays as it is
    left, right = (torch.randn(rows, rows, device=device, generator=generator).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return 2.0 * rows**3 * best_rate(lambda: torch.mm(left, right, out=result), device, budget_s)


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the type of numbers that a device is measured with."""
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.version.hip:
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    try:
        number = torch.ones(1, 1, device=device, dtype=torch.bfloat16)
        torch.mm(number, number)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.bfloat16


def best_rate(work: Callable[[], object], device: torch.device, budget_s: float, window_s: float = WINDOW_S) -> float:
    """Return how often per second work is done in the best window of the budget.

    Before that the work is done for a while: clocks rise, and libraries choose algorithms.
    """
    end = time.perf_counter() + budget_s
    batch, duration_s = 1, elapsed(work, device, 1)
    start = time.perf_counter()
    while time.perf_counter() < start + min(WARM_UP_S, budget_s / 5):
        duration_s = elapsed(work, device, batch)
        batch = max(1, int(batch * min(10.0, BATCH_S / duration_s)))
    best = rate_in_window(work, device, batch, window_s)
    while time.perf_counter() + window_s <= end:
        best = max(best, rate_in_window(work, device, batch, window_s))
    return best


def rate_in_window(work: Callable[[], object], device: torch.device, batch: int, window_s: float) -> float:
    """Return how often per second work is done in a window, in batches."""
    count, duration_s = 0, 0.0
    start = time.perf_counter()
    while duration_s < window_s:
        elapsed(work, device, batch)
        count, duration_s = count + batch, time.perf_counter() - start
    return count / duration_s


def elapsed(work: Callable[[], object], device: torch.device, batch: int) -> float:
    """Return the seconds until a device has done a batch of work."""
    start = time.perf_counter()
    for _ in range(batch):
        work()
    synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type != "cpu":
        getattr(torch, device.type, getattr(torch, "accelerator", None)).synchronize(device)  # type: ignore[union-attr]


def measure_host_memory(budget_s: float) -> float:
    """Return the bandwidth in B/s of copies in the host's memory, on torch's threads.

    Bytes read and bytes written both count, as in STREAM's Copy.
    """
    end = time.perf_counter() + budget_s
    source = torch.ones(HOST_BYTES, dtype=torch.uint8)
    target = torch.ones(HOST_BYTES, dtype=torch.uint8)  # written, so that its pages exist
    times: list[float] = []
    while time.perf_counter() < end or len(times) < MIN_COPIES:
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2.0 * HOST_BYTES / min(times)


def measure_accelerator(device: torch.device, budget_s: float) -> dict[str, float]:
    """Return the B/s of copies in an accelerator's memory, and of copies to and from pinned host memory, by metric.

    In its memory bytes read and bytes written both count.
    """
    size = min(DEVICE_BYTES, int(free_memory(device) or DEVICE_BYTES) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    pinned = torch.ones(min(PINNED_BYTES, size), dtype=torch.uint8).pin_memory()
    part = source[:len(pinned)]

    def bandwidth(size: int, work: Callable[[], object]) -> float:
        return size * best_rate(work, device, budget_s / 3, budget_s / 12)

    return {"device-memory": bandwidth(2 * size, lambda: target.copy_(source)),
            "to-device": bandwidth(len(pinned), lambda: part.copy_(pinned, non_blocking=True)),
            "from-device": bandwidth(len(pinned), lambda: pinned.copy_(part, non_blocking=True))}


def start_device(device: torch.device) -> None:
    """Start an accelerator and its matrix library."""
    small = torch.ones(64, 64, device=device)
    torch.mm(small, small)
    synchronize(device)


def free_memory(device: torch.device) -> float | None:
    """Return an accelerator's free memory in bytes, None if torch does not say."""
    for module in (getattr(torch, device.type, None), getattr(torch, "accelerator", None)):
        for name in ("mem_get_info", "get_memory_info"):
            if hasattr(module, name):
                return float(getattr(module, name)(device)[0])
    return None


def release_memory(device: torch.device) -> None:
    """Give back the accelerator's memory that torch caches."""
    synchronize(device)
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
