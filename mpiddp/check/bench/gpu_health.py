"""What NVIDIA's driver tells of a rank's GPU that is bad by itself: errors of its memory, clocks that it had to lower.

The names are those of NVML's reference (docs.nvidia.com/deploy/nvml-api); none of it needs root.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...facts.devices import described
from ...facts.gpus import DRIVER, Gpu

# What nvmlDeviceGetCurrentClocksEventReasons() has a bit for (nvml.h), of what is no program's own doing.
SLOWED = ((0x40, "by the hardware, for its temperature"), (0x80, "by the power supply's brake"),
          (0x08, "by the hardware"), (0x20, "by the driver, for its temperature"))


def told(where: torch.device) -> list[str]:
    """Return in words what is bad about a rank's GPU; nothing where NVML is not there or does not tell.

    Ask while the GPU computes or just after that: an idle one has no clocks to lower.
    """
    if where.type != "cuda" or not os.path.exists(DRIVER):
        return []
    try:
        import pynvml as nvml
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        gpu = described(torch.cuda, torch.cuda.current_device() if where.index is None else where.index)
        one = handle(nvml, gpu)
        return [] if one is None else [f"{f'GPU {gpu.pci}' if gpu.pci else where}: {line}" for line in words(nvml, one)]
    finally:
        nvml.nvmlShutdown()


def handle(nvml: Any, gpu: Gpu) -> Any:
    """Return NVML's handle of the GPU that torch describes so, None where it finds none."""
    uuid = gpu.uuid if gpu.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{gpu.uuid}"
    for find, name in ((nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci), (nvml.nvmlDeviceGetHandleByUUID, uuid)):
        found = answer(nvml, functools.partial(find, name)) if name else None
        if found is not None:
            return found
    return None


def answer(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return what NVML answers, None where the driver, the GPU or the package has no answer."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def words(nvml: Any, one: Any) -> Iterator[str]:
    """Yield what is bad about a GPU."""
    kinds = (0x1, 0x0)  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
    if errors := answer(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(one, *kinds)):
        yield f"its memory has had {errors:,} uncorrectable errors since the driver was loaded"
    if answer(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(one)):
        yield "pages of its memory wait to be retired, by a reset"
    _, _, waits, failed = answer(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(one)) or (0, 0, 0, 0)
    if waits:
        yield "rows of its memory wait to be remapped, by a reset"
    if failed:
        yield "a row of its memory could not be remapped"
    reasons = answer(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(one))
    if reasons is None:  # a driver before 535, or a package as old
        reasons = answer(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(one)) or 0
    by = next((text for bit, text in SLOWED if reasons & bit), "")
    if by:
        yield f"its clocks are lowered {by}"
