"""The hardware of a rank: its kind and switch, CPU throttling, faults that its GPU's driver reports."""

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
from ...discovery.gpus import Gpu, open_nvml
from ...discovery.process import list_cgroups
from ...discovery.runtime import hostname
from ..stats.schema import RankInfo
from .timeouts import ask_device

ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
CPU_STATS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # in seconds; of cgroup v2 and v1
# Bits of nvmlDeviceGetCurrentClocksEventReasons() (nvml.h) that no program causes; the first one that is set counts.
CLOCK_REASONS = ((0x40, "hardware thermal slowdown"), (0x80, "hardware power brake"), (0x08, "hardware slowdown"),
                 (0x20, "software thermal slowdown"))
UNCORRECTED, VOLATILE = 0x1, 0x0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC


def describe_rank(position: RankPosition | JobEnv, device: torch.device) -> RankInfo:
    """Return this rank's description; its kind is the type of its device if the model is unknown."""
    threads = torch.get_num_threads()  # of this thread
    kind = ask_device(device, lambda: rank_kind(device, threads), device.type)
    return RankInfo(hostname(), position.node_rank, position.local_rank, str(device), kind, network_switch(os.environ))


def rank_kind(device: torch.device, threads: int) -> str:
    """Return the hardware by which ranks are compared: the GPU's model, or "8 cores of AMD EPYC 7763"."""
    if device.type != "cpu":
        return describe_gpu(device).name or device.type
    return f"{threads} core{'s' * (threads != 1)} of {processor_model()}"


def processor_model() -> str:
    """Return the model of this machine's processor, or its architecture if unknown."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split()) or platform.machine()
    return platform.machine()


def network_switch(environ: Mapping[str, str]) -> str:
    """Return this node's switch, empty if unknown.

    SLURM_TOPOLOGY_ADDR is like s0.s4.s8.tux1, from the top down, and SLURM_TOPOLOGY_ADDR_PATTERN like
    switch.switch.switch.node (man srun); without a topology it is "node".
    """
    kinds = environ.get(PATTERN, "").split(".")
    parts = environ.get(ADDRESS, "").split(".", max(0, len(kinds) - 1))  # a node's name may have dots, too
    return parts[-2] if len(parts) == len(kinds) > 1 and kinds[-1] == "node" else ""


class Throttling:
    """The CPU time that the limits of this process's cgroups take away from now on."""

    def __init__(self) -> None:
        self._files = [file for file in (f"{folder}/cpu.stat" for folder in list_cgroups("cpu"))
                       if any(name in read_text(file) for name in CPU_STATS)]
        self._throttled_s, self._start = sum(map(_throttled_s, self._files)), time.monotonic()

    def share(self) -> float | None:
        """Return the share of CPU time taken away, from 0 to 1; None if no cgroup counts it.

        The kernel adds the time of each CPU on which the cgroup is throttled (cgroup-v2.rst, cpu.stat): it is divided
        by the number of CPUs that torch's threads use. Ranks in one cgroup all get their sum, at most 1.
        """
        if not self._files:
            return None
        cpu_s = (time.monotonic() - self._start) * min(len(os.sched_getaffinity(0)), torch.get_num_threads())
        return min(1.0, (sum(map(_throttled_s, self._files)) - self._throttled_s) / cpu_s)


def _throttled_s(path: str) -> float:
    # the sum over all CPUs, by a cgroup's cpu.stat
    for line in read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name in CPU_STATS and value.isdigit():
            return int(value) * CPU_STATS[name]
    return 0.0


def gpu_faults(device: torch.device) -> list[str]:
    """Return lines about the faults of a rank's GPU; nothing if NVML is not available.

    Call it while the GPU computes or just after: an idle GPU does not reduce its clocks.
    """
    if device.type != "cuda":
        return []
    with open_nvml() as nvml:
        if nvml is None:
            return []
        gpu = describe_gpu(device)
        handle = find_handle(nvml, gpu)
        label = f"GPU {gpu.pci}" if gpu.pci else str(device)
        return [f"{label}: {fault}" for fault in find_faults(nvml, handle)] if handle is not None else []


def describe_gpu(device: torch.device) -> Gpu:
    """Return torch's description of an accelerator."""
    module = getattr(torch, device.type)
    return read_gpu(module, module.current_device() if device.index is None else device.index)


def find_handle(nvml: Any, gpu: Gpu) -> Any:
    """Return NVML's handle of a GPU, None if it has none."""
    uuid = gpu.uuid if gpu.uuid.startswith(("GPU-", "MIG-")) else f"GPU-{gpu.uuid}"
    for query, name in ((nvml.nvmlDeviceGetHandleByPciBusId, gpu.pci), (nvml.nvmlDeviceGetHandleByUUID, uuid)):
        handle = _query_nvml(nvml, functools.partial(query, name)) if name else None
        if handle is not None:
            return handle
    return None


def _query_nvml(nvml: Any, query: Callable[[], Any]) -> Any:
    try:
        return query()
    except (nvml.NVMLError, AttributeError):  # the driver, the GPU or the package does not support it
        return None


def find_faults(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield a GPU's faults."""
    if errors := _query_nvml(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, UNCORRECTED, VOLATILE)):
        yield f"{errors:,} uncorrectable memory errors since the driver was loaded"
    if _query_nvml(nvml, lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)):
        yield "memory pages are pending retirement (reset the GPU)"
    _, _, is_pending, has_failed = _query_nvml(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (0, 0, 0, 0)
    if is_pending:
        yield "memory rows are pending remapping (reset the GPU)"
    if has_failed:
        yield "remapping of a memory row has failed"
    reasons = _query_nvml(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:  # a driver or a package before 535
        reasons = _query_nvml(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    if reason := next((reason for bit, reason in CLOCK_REASONS if reasons & bit), ""):
        yield f"clocks are reduced ({reason})"
