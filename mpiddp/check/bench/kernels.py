"""How fast a rank multiplies matrices and copies memory: its host's, its device's, and between the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WINDOW_S = 0.2  # two periods of a cgroup's quota (100 ms): in a shorter one, a rank may be lucky or unlucky
WARM_S = 0.05
FILLING = 8192  # rows of matrices that keep a GPU busy for some ms
HOST_BYTES = 2**26  # of each of two buffers; those of a node's ranks together are more than its caches
DEVICE_BYTES = 2**29
PINNED_BYTES = 2**26
LEAST_COPIES = 3
ROWS = ((4, 512), (16, 1024), (10**9, 2048))  # of a CPU's matrices, for so many threads at most


def product(device: torch.device, budget_s: float) -> float | None:
    """Return the FLOP/s of a product of square matrices, None where the budget is less than a window.

    It is float32 on the threads that torch has here, bfloat16 on accelerators that compute with it. Each window lasts
    for 0.2 s of wall time, and the best one counts.
    """
    if budget_s < WARM_S + WINDOW_S:
        return None
    rows = next(size for most, size in ROWS if torch.get_num_threads() <= most) if device.type == "cpu" else FILLING
    kind = kind_of(device)
    small = torch.ones(64, 64, device=device, dtype=kind)
    torch.mm(small, small)  # what the library keeps for its work has memory of its own, not a part of the matrices'
    random = torch.Generator(device).manual_seed(0)  # the script's own numbers stay as they are
    one, other = (torch.randn(rows, rows, device=device, generator=random).to(kind) for _ in range(2))
    result = torch.empty_like(one)
    return 2.0 * rows**3 * best_rate(lambda: torch.mm(one, other, out=result), device, budget_s)


def kind_of(device: torch.device) -> torch.dtype:
    """Return the kind of numbers that a device is measured with."""
    if device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.version.hip:
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    try:
        torch.ones(1, 1, device=device, dtype=torch.bfloat16).mm(torch.ones(1, 1, device=device, dtype=torch.bfloat16))
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.bfloat16


def best_rate(work: Callable[[], object], device: torch.device, budget_s: float, window_s: float = WINDOW_S) -> float:
    """Return how often a piece of work is done in a second, in the best of the windows that the budget has room for.

    The work is done for some time before that: clocks rise, and libraries choose what to run.
    """
    end = time.perf_counter() + budget_s
    number, took = 1, elapsed(work, device, 1)
    began = time.perf_counter()
    while time.perf_counter() < began + min(WARM_S, budget_s / 5):
        took = elapsed(work, device, number)
        number = max(1, int(number * min(10.0, 0.01 / took)))  # in a row, as programs do: about 10 ms of it
    best = rate(work, device, number, window_s)
    while time.perf_counter() + window_s <= end:
        best = max(best, rate(work, device, number, window_s))
    return best


def rate(work: Callable[[], object], device: torch.device, number: int, window_s: float) -> float:
    """Return how often work is done in a second, within a window, by so many in a row at a time."""
    done, took = 0, 0.0
    began = time.perf_counter()
    while took < window_s:
        elapsed(work, device, number)
        done, took = done + number, time.perf_counter() - began
    return done / took


def elapsed(work: Callable[[], object], device: torch.device, number: int) -> float:
    """Return the seconds until a device has done so much work."""
    began = time.perf_counter()
    for _ in range(number):
        work()
    settle(device)
    return max(time.perf_counter() - began, 1e-9)


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        getattr(torch, device.type, getattr(torch, "accelerator", None)).synchronize(device)  # type: ignore[union-attr]


def host_memory(budget_s: float) -> float:
    """Return the bandwidth of a copy within the host's memory, in a few copies at least.

    What is read and what is written both count, as STREAM's Copy has it. The threads are torch's.
    """
    end = time.perf_counter() + budget_s
    one = torch.ones(HOST_BYTES, dtype=torch.uint8)
    other = torch.ones(HOST_BYTES, dtype=torch.uint8)  # written to, so that it has pages
    times: list[float] = []
    while time.perf_counter() < end or len(times) < LEAST_COPIES:
        began = time.perf_counter()
        other.copy_(one)
        times.append(time.perf_counter() - began)
    return 2.0 * HOST_BYTES / min(times)


def device_memory(where: torch.device, budget_s: float) -> dict[str, float]:
    """Return an accelerator's figures, by the metrics' names: its memory's bandwidth, and that of copies.

    A copy within its memory counts as on the host: what is read, and what is written. The host's side of copies to
    and from it is pinned.
    """
    size = min(DEVICE_BYTES, int(free(where) or DEVICE_BYTES) // 8)
    one = torch.ones(size, dtype=torch.uint8, device=where)
    other = torch.ones_like(one)
    share_s = budget_s / 3
    found = {"device-memory": 2.0 * size * best_rate(lambda: other.copy_(one), where, share_s, share_s / 4)}
    size = min(PINNED_BYTES, size)
    pinned, there = torch.ones(size, dtype=torch.uint8).pin_memory(), one[:size]
    found["to-device"] = size * best_rate(lambda: there.copy_(pinned, non_blocking=True), where, share_s, share_s / 4)
    found["from-device"] = size * best_rate(lambda: pinned.copy_(there, non_blocking=True), where, share_s, share_s / 4)
    return found


def start(where: torch.device) -> None:
    """Start an accelerator, and what multiplies its matrices."""
    one = torch.ones(64, 64, device=where)
    torch.mm(one, one)
    settle(where)


def free(where: torch.device) -> float | None:
    """Return an accelerator's free memory in bytes, None where torch does not tell."""
    for module in (getattr(torch, where.type, None), getattr(torch, "accelerator", None)):
        for name in ("mem_get_info", "get_memory_info"):
            if hasattr(module, name):
                return float(getattr(module, name)(where)[0])
    return None


def release(where: torch.device) -> None:
    """Give an accelerator's memory back, which torch would keep for later."""
    settle(where)
    module: Any = getattr(torch, where.type, None)
    if hasattr(module, "empty_cache"):
        module.empty_cache()
