"""How fast a rank copies memory: its host's, its device's, and between the two. In B/s."""

from __future__ import annotations

import time
from typing import Any

import torch

from .compute import best_rate, settle

HOST_BYTES = 2**26  # of each of two buffers; those of a node's ranks together are more than its caches
DEVICE_BYTES = 2**29
PINNED_BYTES = 2**26
LEAST = 3  # copies of which the best counts


def host(budget_s: float) -> float | None:
    """Return the bandwidth of a copy within the host's memory, None where the budget is too short for a few.

    What is read and what is written both count, as STREAM's Copy has it. The threads are torch's.
    """
    end = time.perf_counter() + budget_s
    one = torch.ones(HOST_BYTES, dtype=torch.uint8)
    other = torch.ones(HOST_BYTES, dtype=torch.uint8)  # written to, so that it has pages
    times: list[float] = []
    while time.perf_counter() < end or 0 < len(times) < LEAST:
        began = time.perf_counter()
        other.copy_(one)
        times.append(time.perf_counter() - began)
    return 2.0 * HOST_BYTES / min(times) if times else None


def device(where: torch.device, budget_s: float) -> dict[str, float]:
    """Return an accelerator's figures, by their names in OWN: its memory's bandwidth, and that of copies.

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
