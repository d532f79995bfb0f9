"""Run work on a device that may hang: no rank waits for it without a timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ...base.timeouts import run_with_timeout
from ...discovery.devices import use_device

DEVICE_TIMEOUT_S = 10.0  # of an accelerator that has started, in addition to the budget

Result = TypeVar("Result")


def run_on_device(device: torch.device, limit_s: float, work: Callable[[], Result]) -> Result:
    """Return the result of `work` on a device; raise TimeoutError if an accelerator takes longer.

    On a CPU the work runs in this thread, without a timeout: it cannot hang in a driver.
    """
    if device.type == "cpu":
        return work()

    def select_and_work() -> Result:
        use_device(str(device))  # a new thread has device 0
        return work()

    return run_with_timeout(limit_s, select_and_work)


def ask_device(device: torch.device, ask: Callable[[], Result], default: Result) -> Result:
    """Return the result of a query of a device, or `default` if it fails or hangs: the benchmarks report that."""
    try:
        return run_on_device(device, DEVICE_TIMEOUT_S, ask)
    except (RuntimeError, AssertionError, OSError):  # torch's, of a driver; TimeoutError is an OSError
        return default
