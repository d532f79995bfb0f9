"""What a rank runs on: its kind, machine and switch, its cgroup's CPU limit, the faults that its GPU's driver knows."""

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
from ...base.ranks import JobEnv, RankPosition
from ...discovery.devices import read_gpu
from ...discovery.gpus import DRIVER_FILE, Gpu
from ...discovery.process import list_cgroups, read_boot_id
from ...discovery.runtime import hostname
from ..stats.schema import RankInfo
from .timeouts import ask_device

ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
CPU_STATS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # in seconds; of cgroup v2 and v1
# Bits of nvmlDeviceGetCurrentClocksEventReasons() (nvml.h) that no program causes.
CLOCK_REASONS = ((0x40, "by the hardware, for its temperature"), (0x80, "by the power supply's brake"),
                 (0x08, "by the hardware"), (0x20, "by the driver, for its temperature"))
UNCORRECTED, VOLATILE = 0x1, 0x0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC


def describe_rank(position: RankPosition | JobEnv, device: torch.device) -> RankInfo:
    """Return what this rank is; its kind is the type of its device if that says no more."""
    threads = torch.get_num_threads()  # of this thread
    kind = ask_device(device, lambda: rank_kind(device, threads), device.type)
    return RankInfo(hostname(), position.node_rank, position.local_rank, str(device), kind, network_switch(os.environ))


def machine_id() -> str:
    """Return what nodes that are containers of one machine have in common, empty if unknown: they measure in turns."""
    return read_boot_id()


def rank_kind(device: torch.device, threads: int) -> str:
    """Return what is alike in ranks that are compared: the GPU's model, or "8 cores of AMD EPYC 7763"."""
    if device.type != "cpu":
        module = getattr(torch, device.type)
        return read_gpu(module, module.current_device() if device.index is None else device.index).name or device.type
    return f"{threads} core{'s' * (threads != 1)} of {processor_model()}"


def processor_model() -> str:
    """Return the model of this machine's processor, or its architecture if the kernel does not say."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split()) or platform.machine()
    return platform.machine()


def network_switch(environ: Mapping[str, str]) -> str:
    """Return this node's switch, empty if Slurm does not say.

    SLURM_TOPOLOGY_ADDR is like s0.s4.s8.tux1, from the top down, and SLURM_TOPOLOGY_ADDR_PATTERN like
    switch.switch.switch.node (man srun); without a topology it is "node".
    """
    kinds = environ.get(PATTERN, "").split(".")
    parts = environ.get(ADDRESS, "").split(".", max(0, len(kinds) - 1))  # a node's name may have dots, too
    return parts[-2] if len(parts) == len(kinds) > 1 and kinds[-1] == "node" else ""


class Throttling:
    """How much CPU time the limits of this process's list_cgroups take away, from now on."""

    def __init__(self) -> None:
        self._files = [file for file in (f"{folder}/cpu.stat" for folder in list_cgroups("cpu"))
                       if any(name in read_text(file) for name in CPU_STATS)]
        self._throttled_s, self._start = sum(map(throttled_s, self._files)), time.monotonic()

    def share(self) -> float | None:
        """Return the share of CPU time taken away, from 0 to 1; None if no cgroup counts it.

        The kernel adds up the time of each CPU on which the cgroup has work (cgroup-v2.rst, cpu.stat): it is divided by
        the CPUs that torch's threads use. Ranks in one cgroup all get the sum of theirs, at most 1.
        """
        if not self._files:
            return None
        cpu_s = (time.monotonic() - self._start) * min(len(os.sched_getaffinity(0)), torch.get_num_threads())
        return min(1.0, (sum(map(throttled_s, self._files)) - self._throttled_s) / cpu_s)


def throttled_s(path: str) -> float:
    """Return how long a cgroup has been throttled on all CPUs together, by its cpu.stat."""
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name in CPU_STATS and value.isdigit():
            return int(value) * CPU_STATS[name]
    return 0.0


def gpu_faults(device: torch.device) -> list[str]:
    """Return lines about the faults of a rank's GPU; nothing if NVML is not available.

    Call it while the GPU computes or just after: an idle one has no clocks to lower.
    """
    if device.type != "cuda" or not os.path.exists(DRIVER_FILE):
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
        gpu = read_gpu(torch.cuda, torch.cuda.current_device() if device.index is None else device.index)
        handle = find_handle(nvml, gpu)
        label = f"GPU {gpu.pci}" if gpu.pci else str(device)
        return [] if handle is None else [f"{label}: {fault}" for fault in find_faults(nvml, handle)]
    finally:
        nvml.nvmlShutdown()


def find_handle(nvml: Any, gpu: Gpu) -> Any:
    """Return NVML's handle of a GPU as torch describes it, None if it has none."""
    uuid = gpu.uuid if gpu.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{gpu.uuid}"
    for query, name in ((nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci), (nvml.nvmlDeviceGetHandleByUUID, uuid)):
        handle = query_nvml(nvml, functools.partial(query, name)) if name else None
        if handle is not None:
            return handle
    return None


def query_nvml(nvml: Any, query: Callable[[], Any]) -> Any:
    """Return the result of a query, None if the driver, the GPU or the package does not support it."""
    try:
        return query()
    except (nvml.NVMLError, AttributeError):
        return None


def find_faults(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield a GPU's faults."""
    if errors := query_nvml(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE)):
        yield f"its memory has had {errors:,} uncorrectable errors since the driver was loaded"
    if query_nvml(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)):
        yield "pages of its memory wait to be retired, by a reset"
    _, _, is_pending, has_failed = query_nvml(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    if is_pending:
        yield "rows of its memory wait to be remapped, by a reset"
    if has_failed:
        yield "a row of its memory could not be remapped"
    reasons = query_nvml(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:  # a driver before 535, or a package as old
        reasons = query_nvml(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    if reason := next((reason for bit, reason in CLOCK_REASONS if reasons & bit), ""):
        yield f"its clocks are lowered {reason}"
