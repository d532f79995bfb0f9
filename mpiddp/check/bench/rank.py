"""All benchmarks of a single rank, within a time budget."""

from __future__ import annotations

import itertools
import os
import time
from typing import NamedTuple

import torch

from ...base.timeline import begun_stages
from . import kernels, machine, storage
from .machine import Throttling
from .timeouts import DEVICE_TIMEOUT_S, run_on_device

# Shares of the budget. Copies are only measured on accelerators; on CPUs, the folders get the rest.
MATRIX, MEMORY, COPIES, FOLDERS, MIN_FOLDERS = 0.5, 0.15, 0.2, 0.35, 0.1
MIN_MATRIX_S = kernels.WARM_UP_S + kernels.WINDOW_S + 0.01
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
            run_on_device(device, limit_s, lambda: kernels.start_device(device))
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

    measured = {"device-free": kernels.free_memory(device) if device.type != "cpu" else None}
    measured["matrix"] = kernels.measure_matmul(device, max(budget_s * MATRIX, min(budget_s, MIN_MATRIX_S)))
    check_timeout()
    reports += machine.gpu_faults(device)
    if device.type != "cpu":
        values |= kernels.measure_accelerator(device, budget_s * COPIES)
        kernels.release_memory(device)
    check_timeout()
    measured["memory"] = kernels.measure_host_memory(budget_s * MEMORY)
    measured["throttled"] = throttling.share() if measured["matrix"] is not None else None
    values |= {name: value for name, value in measured.items() if value is not None}
    return time.perf_counter() - start


def torch_import_s() -> float | None:
    """Return how long this process took to import torch, None if mpiddp did not import it."""
    return next(((end - start) / 1e9 for (stage, start), (_, end) in itertools.pairwise(begun_stages)
                 if stage == "import torch"), None)
