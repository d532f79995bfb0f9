"""All that a rank measures by itself, within the time that it is given."""

from __future__ import annotations

import itertools
import os
import time
from typing import NamedTuple

import torch

from ...base.timeline import begun_stages
from . import kernels, machine, storage
from .machine import Throttling
from .timeouts import on_device

# The shares of the time, and the least time in seconds that a rank's own figures need on a CPU.
MATRIX, MEMORY, COPIES, STORAGE = 0.5, 0.15, 0.2, 0.35
START_S, ANSWER_S = 60.0, 10.0  # for an accelerator to start, and over the time that measuring takes
LEAST_S = kernels.WARM_S + kernels.WINDOW_S + 0.01


class Own(NamedTuple):
    """What a rank has measured, by the metrics' names, in words what is bad by itself; whether its device computes."""

    values: dict[str, float]
    told: list[str]
    computes: bool = True


def measure(device: torch.device, leads: bool, budget_s: float) -> Own:
    """Return what this rank measures in about `budget_s` seconds; what there is no time for is left out.

    The rank that `leads` its node measures what belongs to it, too, when no rank computes any more. The time that an
    accelerator takes to start comes on top.
    """
    found: dict[str, float] = {}
    told: list[str] = []
    used_s, computes, limit_s = 0.0, False, START_S
    try:
        if device.type != "cpu":
            on_device(device, START_S, lambda: kernels.start(device))
        limit_s = ANSWER_S
        used_s = on_device(device, ANSWER_S + budget_s, lambda: compute_and_copy(device, budget_s, found, told))
        computes = True
    except RuntimeError as error:  # torch's, of a device that is broken, or full
        told.append(f"{device} does not compute: {str(error).strip().partition(chr(10))[0]}")
    except TimeoutError:
        found, told = dict(found), [*told, f"{device} has not answered within {limit_s:g} s"]  # it may still go on
    if leads and (took_s := import_s()) is not None:
        found["import"] = took_s  # of the node's disk: where cores lack, ranks import one after the other
    if leads:
        left_s = max(budget_s / 10, min(budget_s * STORAGE, budget_s - used_s))
        for folder in storage.folders(os.environ):
            speeds, odd = storage.measure(folder, left_s / 3)
            found |= speeds
            told += odd
    return Own(found, told, computes)


def compute_and_copy(
    device: torch.device, budget_s: float, found: dict[str, float], told: list[str]
) -> float:
    """Add what the rank's own cores and its accelerator do, which has started, and return the seconds that took.

    Raises RuntimeError where it does not compute, TimeoutError where that took so long that nobody waits any more.
    """
    began, limits = time.perf_counter(), Throttling()

    def go_on() -> None:
        if device.type != "cpu" and time.perf_counter() - began > ANSWER_S + budget_s:
            raise TimeoutError

    known = {"device-free": kernels.free(device) if device.type != "cpu" else None}
    known["matrix"] = kernels.product(device, max(budget_s * MATRIX, min(budget_s, LEAST_S)))
    go_on()
    told += machine.told(device)
    if device.type != "cpu":
        found |= kernels.device_memory(device, budget_s * COPIES)
        kernels.release(device)
    go_on()
    known["memory"] = kernels.host_memory(budget_s * MEMORY)
    known["throttled"] = limits.share() if known["matrix"] is not None else None
    found |= {name: value for name, value in known.items() if value is not None}
    return time.perf_counter() - began


def import_s() -> float | None:
    """Return how long this process took to import torch, None where mpiddp has not done it."""
    stages = itertools.pairwise(begun_stages)
    return next(((end - at) / 1e9 for (name, at), (_, end) in stages if name == "import torch"), None)
