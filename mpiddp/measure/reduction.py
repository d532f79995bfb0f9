"""An all-reduce over all ranks, timed."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .channels import complete


def all_reduce(size: int, times: int, device: torch.device, deadline: float) -> float:
    """Sum `size` bytes of float32 over all ranks `times` times, and return the seconds that one takes.

    Collective over the default group; the first one of each size is not counted. Raises TimeoutError.
    """
    data = torch.zeros(max(1, size // 4), device=device)
    one(data, deadline)
    began = time.monotonic()
    for _ in range(times):
        one(data, deadline)
    return (time.monotonic() - began) / times


def one(data: torch.Tensor, deadline: float) -> None:
    """Sum once, and wait for it."""
    def start() -> list[dist.Work]:
        work = dist.all_reduce(data, async_op=True)
        assert work is not None
        return [work]

    complete(start, data.device, deadline)
