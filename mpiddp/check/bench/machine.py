"""The hardware of a rank: its kind, switch and peak rates, CPU throttling, faults that its GPU's driver reports."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from ...base.files import list_names, read_text
from ...base.ranks import JobEnv, RankPosition
from ...discovery.devices import read_gpu
from ...discovery.gpus import DRIVER_FILE, Gpu
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

NETWORK, INFINIBAND, PCI = "/sys/class/net", "/sys/class/infiniband", "/sys/bus/pci/devices"
CPUS = "/sys/devices/system/cpu"

# Patterns of torch's names for GPUs, dense bfloat16 FLOP/s, B/s of the memory; the first match counts.
GPUS = (
    (r"\bMIG\b", 0.0, 0.0), (r"\bB200", 2250e12, 8.0e12), (r"\bGH200", 989e12, 4.0e12), (r"\bH200", 989e12, 4.8e12),
    (r"\bH100 PCIe", 756e12, 2.0e12), (r"\bH100 NVL", 835e12, 3.9e12), (r"\bH100", 989e12, 3.35e12),
    (r"\bA100-SXM.*80GB", 312e12, 2.04e12), (r"\bA100 80GB", 312e12, 1.94e12), (r"\bA100", 312e12, 1.56e12),
    (r"\bL40S", 362e12, 864e9), (r"\bL40", 181e12, 864e9), (r"\bL4\b", 121e12, 300e9), (r"\bA40\b", 150e12, 696e9),
    (r"\bA30\b", 165e12, 933e9), (r"\bA10\b", 125e12, 600e9), (r"\bMI300X", 1307e12, 5.3e12),
)
# Patterns of processors: B/s of a socket's memory, as channels * 8 bytes * transfers per second.
PROCESSORS = (
    (r"EPYC 7\w\w1\b", 8 * 8 * 2.666e9), (r"EPYC 7\w\w[23]\b", 8 * 8 * 3.2e9), (r"EPYC 9\w\w4\b", 12 * 8 * 4.8e9),
    (r"EPYC 9\w\w5\b", 12 * 8 * 6.0e9), (r"Xeon.* (Gold|Platinum) [568]1\d\d", 6 * 8 * 2.666e9),
    (r"Xeon.* (Gold|Platinum) [568]2\d\d", 6 * 8 * 2.933e9), (r"Xeon.* (Gold|Platinum) [568]3\d\d", 8 * 8 * 3.2e9),
    (r"Xeon.* (Gold|Platinum) [568]4\d\d", 8 * 8 * 4.8e9), (r"Xeon.* (Gold|Platinum) [568]5\d\d", 8 * 8 * 5.6e9),
)


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
    with suppress(OSError), open("/proc/cpuinfo") as file:
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
        gpu = describe_gpu(device)
        handle = find_handle(nvml, gpu)
        label = f"GPU {gpu.pci}" if gpu.pci else str(device)
        return [] if handle is None else [f"{label}: {fault}" for fault in find_faults(nvml, handle)]
    finally:
        nvml.nvmlShutdown()


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


def claimed_rates(device: torch.device, backend: str, environ: Mapping[str, str]) -> dict[str, float]:
    """Return the known peak rates by metric; `large` is that of the node's links, `memory` that of the whole node."""
    sockets = {read_text(f"{CPUS}/{cpu}/topology/physical_package_id") for cpu in list_names(CPUS, "cpu")} - {""}
    rates = {"large": link_rate(backend, environ), "memory": memory_rate(processor_model(), len(sockets))}
    if device.type == "cuda":
        gpu = describe_gpu(device)
        rates["matrix"], rates["device-memory"] = gpu_rates(gpu.name)
        rates["to-device"] = rates["from-device"] = pci_rate(gpu.pci)
    return {name: rate for name, rate in rates.items() if rate > 0}


def gpu_rates(name: str) -> tuple[float, float]:
    """Return a GPU's FLOP/s and its memory's B/s, 0 if unknown."""
    return next(((compute, memory) for pattern, compute, memory in GPUS if re.search(pattern, name)), (0.0, 0.0))


def memory_rate(model: str, sockets: int) -> float:
    """Return the B/s of the memory of sockets with a processor, 0 if unknown."""
    return sockets * next((rate for pattern, rate in PROCESSORS if re.search(pattern, model)), 0.0)


def pci_rate(address: str) -> float:
    """Return the B/s of a device's PCIe link in one direction, at its full width and speed; 0 if sysfs has none."""
    link = f"{PCI}/{address.lower()}/max_link"
    gigabits, lanes = _first_number(read_text(f"{link}_speed")), _first_number(read_text(f"{link}_width"))
    return gigabits * 1e9 * lanes / 8 * 128 / 130  # from PCIe 3 on, 130 bits carry 128


def link_rate(backend: str, environ: Mapping[str, str]) -> float:
    """Return the B/s of this node's links: of its active InfiniBand ports, else of the backend's interface.

    A rank sends over one port. The rate of an interface without a device, as in a container, is not the hardware's.
    """
    if backend == "nccl" and (ports := [f"{INFINIBAND}/{card}/ports/{port}" for card in list_names(INFINIBAND)
                                        for port in list_names(f"{INFINIBAND}/{card}/ports")]):
        active = [port for port in ports if "ACTIVE" in read_text(f"{port}/state")]
        rates = [_first_number(read_text(f"{port}/rate")) * 1e9 / 8 for port in active]
        return sum(sorted(rates)[-int(environ.get("LOCAL_WORLD_SIZE", "1")):])
    interface = environ.get("GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME", "").split(",")[0]
    if not interface or not os.path.exists(f"{NETWORK}/{interface}/device"):
        return 0.0
    return max(0.0, _first_number(read_text(f"{NETWORK}/{interface}/speed"))) * 1e6 / 8


def _first_number(line: str) -> float:
    match = re.match(r"-?\d+(\.\d+)?", line.strip())
    return float(match[0]) if match else 0.0
