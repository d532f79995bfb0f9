"""What a rank's hardware claims to do at best: by sysfs, and by its makers' data sheets where a table has it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

from ...base.files import list_names, read_text
from ...discovery.devices import read_gpu
from .machine import processor

NETWORK, VERBS, PCI = "/sys/class/net", "/sys/class/infiniband", "/sys/bus/pci/devices"
PACKAGES = "/sys/devices/system/cpu"

# Patterns of torch's names for GPUs, the first that fits: dense bfloat16 FLOP/s, and B/s of their memory.
GPUS = (
    (r"\bMIG\b", 0.0, 0.0), (r"\bB200", 2250e12, 8.0e12), (r"\bGH200", 989e12, 4.0e12), (r"\bH200", 989e12, 4.8e12),
    (r"\bH100 PCIe", 756e12, 2.0e12), (r"\bH100 NVL", 835e12, 3.9e12), (r"\bH100", 989e12, 3.35e12),
    (r"\bA100-SXM.*80GB", 312e12, 2.04e12), (r"\bA100 80GB", 312e12, 1.94e12), (r"\bA100", 312e12, 1.56e12),
    (r"\bL40S", 362e12, 864e9), (r"\bL40", 181e12, 864e9), (r"\bL4\b", 121e12, 300e9), (r"\bA40\b", 150e12, 696e9),
    (r"\bA30\b", 165e12, 933e9), (r"\bA10\b", 125e12, 600e9), (r"\bMI300X", 1307e12, 5.3e12),
)
# Patterns of processors: B/s of a socket's memory, which is channels times 8 bytes times transfers a second.
PROCESSORS = (
    (r"EPYC 7\w\w1\b", 8 * 8 * 2.666e9), (r"EPYC 7\w\w[23]\b", 8 * 8 * 3.2e9), (r"EPYC 9\w\w4\b", 12 * 8 * 4.8e9),
    (r"EPYC 9\w\w5\b", 12 * 8 * 6.0e9), (r"Xeon.* (Gold|Platinum) [568]1\d\d", 6 * 8 * 2.666e9),
    (r"Xeon.* (Gold|Platinum) [568]2\d\d", 6 * 8 * 2.933e9), (r"Xeon.* (Gold|Platinum) [568]3\d\d", 8 * 8 * 3.2e9),
    (r"Xeon.* (Gold|Platinum) [568]4\d\d", 8 * 8 * 4.8e9), (r"Xeon.* (Gold|Platinum) [568]5\d\d", 8 * 8 * 5.6e9),
)


def claims(device: torch.device, backend: str, environ: Mapping[str, str]) -> dict[str, float]:
    """Return what this rank's hardware claims, by the metrics' names; nothing for what is not known.

    `large` is of the node's links to others, and `memory` of the whole node.
    """
    found = {"large": link_rate(backend, environ), "memory": memory_rate(processor(), sockets())}
    if device.type == "cuda":
        gpu = read_gpu(torch.cuda, torch.cuda.current_device() if device.index is None else device.index)
        found["matrix"], found["device-memory"] = gpu_rates(gpu.name)
        found["to-device"] = found["from-device"] = pci_rate(gpu.pci)
    return {name: rate for name, rate in found.items() if rate > 0}


def gpu_rates(name: str) -> tuple[float, float]:
    """Return a GPU's FLOP/s and its memory's B/s, 0 where they are not known."""
    return next(((compute, memory) for pattern, compute, memory in GPUS if re.search(pattern, name)), (0.0, 0.0))


def memory_rate(model: str, count: int) -> float:
    """Return the B/s of the memory of so many sockets with a processor, 0 where it is not known."""
    return count * next((rate for pattern, rate in PROCESSORS if re.search(pattern, model)), 0.0)


def sockets() -> int:
    """Return how many sockets this machine has."""
    cpus = list_names(PACKAGES, "cpu")
    return len({read_text(f"{PACKAGES}/{cpu}/topology/physical_package_id") for cpu in cpus} - {""})


def pci_rate(address: str) -> float:
    """Return the B/s of a device's PCIe link in one direction, at its widest and fastest; 0 where sysfs has none."""
    at = f"{PCI}/{address.lower()}"
    speed, width = first_number(read_text(f"{at}/max_link_speed")), first_number(read_text(f"{at}/max_link_width"))
    return speed * 1e9 * width / 8 * 128 / 130  # transfers of a bit each; encoded, from PCIe 3 on


def link_rate(backend: str, environ: Mapping[str, str]) -> float:
    """Return the B/s of this node's links: of its active InfiniBand ports, or of the interface that is named.

    A rank sends over one port. An interface without a device, as of a container, tells of no hardware.
    """
    if backend == "nccl" and (ports := [f"{VERBS}/{one}/ports/{port}" for one in list_names(VERBS)
                                        for port in list_names(f"{VERBS}/{one}/ports")]):
        rates = [first_number(read_text(f"{port}/rate")) * 1e9 / 8 for port in ports
                 if "ACTIVE" in read_text(f"{port}/state")]
        return sum(sorted(rates)[-int(environ.get("LOCAL_WORLD_SIZE", "1")):])
    interface = environ.get("GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_SOCKET_IFNAME", "").split(",")[0]
    real = bool(interface) and os.path.exists(f"{NETWORK}/{interface}/device")
    return max(0.0, first_number(read_text(f"{NETWORK}/{interface}/speed"))) * 1e6 / 8 if real else 0.0


def first_number(words: str) -> float:
    """Return the number that a text begins with, 0 where it has none."""
    found = re.match(r"-?\d+(\.\d+)?", words.strip())
    return float(found[0]) if found else 0.0
