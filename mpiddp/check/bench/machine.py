"""The machine below a rank: its kernel, its cgroup, what hangs, and what the driver says of its GPU."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from ...base.files import read_text
from ...discovery.devices import read_gpu
from ...discovery.gpus import DRIVER_FILE, Gpu
from ...discovery.process import list_cgroups, read_boot_id

# What nvmlDeviceGetCurrentClocksEventReasons() has a bit for (nvml.h), of what is no program's own doing.
SLOWED = ((0x40, "by the hardware, for its temperature"), (0x80, "by the power supply's brake"),
          (0x08, "by the hardware"), (0x20, "by the driver, for its temperature"))


def told(where: torch.device) -> list[str]:
    """Return in words what is bad about a rank's GPU; nothing where NVML is not there or does not tell.

    Ask while the GPU computes or just after that: an idle one has no clocks to lower.
    """
    if where.type != "cuda" or not os.path.exists(DRIVER_FILE):
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
        gpu = read_gpu(torch.cuda, torch.cuda.current_device() if where.index is None else where.index)
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


ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
STATS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # in seconds; as cgroup v2 and v1 have it


def machine() -> str:
    """Return what tells this machine from others, empty where that is hidden.

    Nodes that are containers on one machine have the same, and measure one after the other.
    """
    return read_boot_id()


def kind(device: torch.device, threads: int) -> str:
    """Return what a rank is compared by: its GPU's model, or as in "8 cores of AMD EPYC 7763"."""
    if device.type != "cpu":
        module = getattr(torch, device.type)
        return read_gpu(module, module.current_device() if device.index is None else device.index).name or device.type
    return f"{threads} core{'s' * (threads != 1)} of {processor()}"


def processor() -> str:
    """Return the model of this machine's processor, its architecture where the kernel tells no model."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split()) or platform.machine()
    return platform.machine()


def switch(environ: Mapping[str, str]) -> str:
    """Return the switch next to this node, empty where Slurm tells none.

    SLURM_TOPOLOGY_ADDR is as in s0.s4.s8.tux1, from the top down, and SLURM_TOPOLOGY_ADDR_PATTERN says what each part
    is, as in switch.switch.switch.node (man srun); a site without a topology has "node" alone.
    """
    kinds = environ.get(PATTERN, "").split(".")
    parts = environ.get(ADDRESS, "").split(".", max(0, len(kinds) - 1))  # a node's name may have dots, too
    return parts[-2] if len(parts) == len(kinds) > 1 and kinds[-1] == "node" else ""


class Throttling:
    """How long the limits of this process's cgroups take its CPUs away, from now on."""

    def __init__(self) -> None:
        """Begin to count."""
        self._files = tuple(stats())
        self._throttled_s, self._began = sum(map(throttled_s, self._files)), time.monotonic()

    def share(self) -> float | None:
        """Return the share of the time since the beginning, from 0 to 1; None where no cgroup counts it.

        The kernel adds up the time of each CPU on which the cgroup has work (cgroup-v2.rst, cpu.stat), so that it is
        divided by those that torch's threads keep busy. Where several ranks are in one cgroup, all have the sum of
        theirs, 1 at most.
        """
        if not self._files:
            return None
        passed_s = (time.monotonic() - self._began) * min(len(os.sched_getaffinity(0)), torch.get_num_threads())
        return min(1.0, (sum(map(throttled_s, self._files)) - self._throttled_s) / passed_s)


def stats() -> Iterator[str]:
    """Yield the cpu.stat of this process's cgroup and of all above it, where these tell of limits."""
    for file in (f"{folder}/cpu.stat" for folder in list_cgroups("cpu")):
        if any(name in read_text(file) for name in STATS):
            yield file


def throttled_s(path: str) -> float:
    """Return how long a cgroup has been throttled, by its cpu.stat, over all CPUs."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name in STATS and value.isdigit():
            return int(value) * STATS[name]
    return 0.0
