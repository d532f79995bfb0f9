"""The peak rates of a rank's hardware, by sysfs and by data sheets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from ...base.files import list_names, read_text
from ...discovery.devices import read_gpu
from .machine import processor_model

NETWORK, INFINIBAND, PCI = "/sys/class/net", "/sys/class/infiniband", "/sys/bus/pci/devices"
CPUS = "/sys/devices/system/cpu"

# Patterns of torch's names for GPUs, of which the first match counts: dense bfloat16 FLOP/s, B/s of the memory.
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


def claimed_rates(device: torch.device, backend: str, environ: Mapping[str, str]) -> dict[str, float]:
    """Return the peak rates that are known, by metric; `large` is of the node's links, `memory` of the whole node."""
    sockets = {read_text(f"{CPUS}/{cpu}/topology/physical_package_id") for cpu in list_names(CPUS, "cpu")} - {""}
    rates = {"large": link_rate(backend, environ), "memory": memory_rate(processor_model(), len(sockets))}
    if device.type == "cuda":
        gpu = read_gpu(torch.cuda, torch.cuda.current_device() if device.index is None else device.index)
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
    gigabits, lanes = first_number(read_text(f"{link}_speed")), first_number(read_text(f"{link}_width"))
    return gigabits * 1e9 * lanes / 8 * 128 / 130  # from PCIe 3 on, 130 bits carry 128


def link_rate(backend: str, environ: Mapping[str, str]) -> float:
    """Return the B/s of this node's links: of its active InfiniBand ports, else of the backend's interface.

    A rank sends over one port. An interface without a device, as in a container, says nothing about hardware.
    """
    if backend == "nccl" and (ports := [f"{INFINIBAND}/{card}/ports/{port}" for card in list_names(INFINIBAND)
                                        for port in list_names(f"{INFINIBAND}/{card}/ports")]):
        active = [port for port in ports if "ACTIVE" in read_text(f"{port}/state")]
        rates = [first_number(read_text(f"{port}/rate")) * 1e9 / 8 for port in active]
        return sum(sorted(rates)[-int(environ.get("LOCAL_WORLD_SIZE", "1")):])
    interface = environ.get("GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME", "").split(",")[0]
    if not interface or not os.path.exists(f"{NETWORK}/{interface}/device"):
        return 0.0
    return max(0.0, first_number(read_text(f"{NETWORK}/{interface}/speed"))) * 1e6 / 8


def first_number(line: str) -> float:
    """Return the number that a line begins with, 0 if there is none."""
    match = re.match(r"-?\d+(\.\d+)?", line.strip())
    return float(match[0]) if match else 0.0
