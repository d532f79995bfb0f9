"""Work that may hang: in a thread that is abandoned at a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...discovery.devices import use_device

DEVICE_TIMEOUT_S = 10.0  # of an accelerator that has started, in addition to the time that measuring takes

Result = TypeVar("Result")


def run_with_timeout(limit_s: float, work: Callable[[], Result]) -> Result:
    """Return what `work` returns or raise what it raises; raise TimeoutError if it takes longer."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome[:] = (True, work())
        except BaseException as error:
            outcome[:] = (False, error)

    thread = threading.Thread(target=run, daemon=True, name="mpiddp-timeout")
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise TimeoutError
    has_returned, result = outcome
    try:
        if not has_returned:
            raise result
        return result  # type: ignore[no-any-return]
    finally:
        outcome.clear()  # an error refers to this frame: without the cycle, what `work` held is freed now
        del result


def run_on_device(device: torch.device, limit_s: float, work: Callable[[], Result]) -> Result:
    """Return what `work` on a device returns; raise TimeoutError if an accelerator takes longer.

    On a CPU the work is done in this thread, without a timeout: it cannot hang in a driver.
    """
    if device.type == "cpu":
        return work()

    def select_and_work() -> Result:
        use_device(str(device))  # a new thread has device 0
        return work()

    return run_with_timeout(limit_s, select_and_work)


def ask_device(device: torch.device, ask: Callable[[], Result], default: Result) -> Result:
    """Return what a device says about itself, or `default` if it fails or hangs: measuring reports that."""
    try:
        return run_on_device(device, DEVICE_TIMEOUT_S, ask)
    except (RuntimeError, AssertionError, OSError):  # torch's, of a driver; TimeoutError is an OSError
        return default
