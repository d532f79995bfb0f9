"""All benchmarks of a single rank, within a time budget; those of its device and memory: matrix product and copies."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...base.timeline import begun_stages
from . import machine, storage
from .machine import Throttling
from .timeouts import DEVICE_TIMEOUT_S, run_on_device

# Shares of the budget. Copies are only measured on accelerators; on CPUs, the folders get the rest.
MATRIX, MEMORY, COPIES, FOLDERS, MIN_FOLDERS = 0.5, 0.15, 0.2, 0.35, 0.1
WINDOW_S = 0.2  # two periods of a cgroup's quota (100 ms): a shorter window may miss or overstate throttling
WARM_UP_S = 0.05
GPU_ROWS = 8192  # a matrix product then takes a GPU some milliseconds
CPU_ROWS = ((4, 512), (16, 1024), (10**9, 2048))  # maximum of threads, rows
HOST_BYTES = 2**26  # of each of two buffers; the buffers of a node's ranks exceed its caches
DEVICE_BYTES = 2**29
PINNED_BYTES = 2**26
MIN_COPIES = 3
BATCH_S = 0.01  # of work that is submitted to a device between two synchronizations
MIN_MATRIX_S = WARM_UP_S + WINDOW_S + 0.01
DEVICE_START_TIMEOUT_S = 60.0


class RankResult(NamedTuple):
    """A rank's results: values by metric, lines about faults, whether its device computes."""

    values: dict[str, float]
    reports: list[str]
    computes: bool = True


def measure_rank(device: torch.device, measures_node: bool, budget_s: float) -> RankResult:
    """Measure for about `budget_s` seconds, without an accelerator's start; some metrics take longer.

    The rank that `measures_node` then measures the folders.
    """
    values: dict[str, float] = {}
    reports: list[str] = []
    used_s, computes, limit_s = 0.0, False, DEVICE_START_TIMEOUT_S
    try:
        if device.type != "cpu":
            run_on_device(device, limit_s, lambda: start_device(device))
        limit_s = DEVICE_TIMEOUT_S
        used_s = run_on_device(device, limit_s + budget_s, lambda: measure_device(device, budget_s, values, reports))
        computes = True
    except RuntimeError as error:  # torch's, of a device that is broken, or full
        reports.append(f"{device} cannot compute: {str(error).strip().partition(chr(10))[0]}")
    except TimeoutError:  # the thread may continue, and add to the old objects
        values, reports = dict(values), [*reports, f"{device} did not respond within {limit_s:g} s"]
    if measures_node:
        if (duration_s := torch_import_s()) is not None:
            values["import"] = duration_s  # depends on the node's disk; without enough cores ranks import in turn
        left_s = max(budget_s * MIN_FOLDERS, min(budget_s * FOLDERS, budget_s - used_s))
        for folder in storage.folders(os.environ):
            speeds, faults = storage.measure_folder(folder, left_s / 3)
            values |= speeds
            reports += faults
    return RankResult(values, reports, computes)


def measure_device(device: torch.device, budget_s: float, values: dict[str, float], reports: list[str]) -> float:
    """Add the metrics of the rank's cores and of its accelerator, which has started; return the seconds used.

    Raises RuntimeError if the device does not compute, TimeoutError if the caller no longer waits for the result.
    """
    start, throttling = time.perf_counter(), Throttling()

    def check_timeout() -> None:
        if device.type != "cpu" and time.perf_counter() - start > DEVICE_TIMEOUT_S + budget_s:
            raise TimeoutError

    measured = {"device-free": free_memory(device) if device.type != "cpu" else None}
    measured["matrix"] = measure_matmul(device, max(budget_s * MATRIX, min(budget_s, MIN_MATRIX_S)))
    check_timeout()
    reports += machine.gpu_faults(device)
    if device.type != "cpu":
        values |= measure_accelerator(device, budget_s * COPIES)
        release_memory(device)
    check_timeout()
    measured["memory"] = measure_host_memory(budget_s * MEMORY)
    measured["throttled"] = throttling.share() if measured["matrix"] is not None else None
    values |= {name: value for name, value in measured.items() if value is not None}
    return time.perf_counter() - start


def measure_matmul(device: torch.device, budget_s: float) -> float | None:
    """Return the FLOP/s of a product of square matrices in the best window of the budget; None if none fits.

    It is float32 on a CPU, on torch's threads, and bfloat16 on accelerators that support it.
    """
    if budget_s < WARM_UP_S + WINDOW_S:
        return None
    rows = GPU_ROWS
    if device.type == "cpu":
        rows = next(size for threads, size in CPU_ROWS if torch.get_num_threads() <= threads)
    dtype = _matmul_dtype(device)
    small = torch.ones(64, 64, device=device, dtype=dtype)
    torch.mm(small, small)  # the library allocates its workspace before the matrices
    generator = torch.Generator(device).manual_seed(0)  # leaves the script's random state unchanged
    left, right = (torch.randn(rows, rows, device=device, generator=generator).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return 2.0 * rows**3 * best_rate(lambda: torch.mm(left, right, out=result), device, budget_s)


def _matmul_dtype(device: torch.device) -> torch.dtype:
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
    """Return the executions of work per second in the best window of the budget, after a warm-up.

    In the warm-up clocks rise, and libraries choose algorithms.
    """
    end = time.perf_counter() + budget_s
    batch, duration_s = 1, _elapsed(work, device, 1)
    start = time.perf_counter()
    while time.perf_counter() < start + min(WARM_UP_S, budget_s / 5):
        duration_s = _elapsed(work, device, batch)
        batch = max(1, int(batch * min(10.0, BATCH_S / duration_s)))
    best = 0.0
    while not best or time.perf_counter() + window_s <= end:
        count, duration_s = 0, 0.0
        start = time.perf_counter()
        while duration_s < window_s:
            _elapsed(work, device, batch)
            count, duration_s = count + batch, time.perf_counter() - start
        best = max(best, count / duration_s)
    return best


def _elapsed(work: Callable[[], object], device: torch.device, batch: int) -> float:
    start = time.perf_counter()
    for _ in range(batch):
        work()
    _synchronize(device)
    return max(time.perf_counter() - start, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type, getattr(torch, "accelerator", None)).synchronize(device)  # type: ignore[union-attr]


def measure_host_memory(budget_s: float) -> float:
    """Return the B/s of copies in host memory, on torch's threads; reads and writes count, as in STREAM's Copy."""
    end = time.perf_counter() + budget_s
    source = torch.ones(HOST_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    times: list[float] = []
    while time.perf_counter() < end or len(times) < MIN_COPIES:
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2.0 * HOST_BYTES / min(times)


def measure_accelerator(device: torch.device, budget_s: float) -> dict[str, float]:
    """Return the B/s of copies in an accelerator's memory (reads and writes) and to and from pinned host memory."""
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
    _synchronize(device)


def free_memory(device: torch.device) -> float | None:
    """Return an accelerator's free memory in bytes, None if unknown."""
    for module in (getattr(torch, device.type, None), getattr(torch, "accelerator", None)):
        for name in ("mem_get_info", "get_memory_info"):
            if hasattr(module, name):
                return float(getattr(module, name)(device)[0])
    return None


def release_memory(device: torch.device) -> None:
    """Release the accelerator memory that torch caches."""
    _synchronize(device)
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def torch_import_s() -> float | None:
    """Return how long this process took to import torch, None if mpiddp did not import it."""
    return next(((end - start) / 1e9 for (stage, start), (_, end) in itertools.pairwise(begun_stages)
                 if stage == "import torch"), None)
