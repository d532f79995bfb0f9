"""How fast a rank multiplies matrices, and how often a piece of work is done in a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

WINDOW_S = 0.2  # two periods of a cgroup's quota (100 ms): in a shorter one, a rank may be lucky or unlucky
WARM_S = 0.05
FILLING = 8192  # rows of matrices that keep a GPU busy for some ms
ROWS = ((4, 512), (16, 1024), (10**9, 2048))  # of a CPU's matrices, for so many threads at most


def product(device: torch.device, budget_s: float) -> float | None:
    """Return the FLOP/s of a product of square matrices, None where the budget is less than a window.

    It is float32 on the threads that torch has here, bfloat16 on accelerators that compute with it. Each window lasts
    for 0.2 s of wall time; the best one counts, so that what others do for a moment does not, and what slows the rank
    all the time does.
    """
    if budget_s < WARM_S + WINDOW_S:
        return None
    rows = next(size for most, size in ROWS if torch.get_num_threads() <= most) if device.type == "cpu" else FILLING
    kind = kind_of(device)
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
