"""The NVIDIA GPUs of this node and which of them a rank may use, seen before torch and CUDA start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

DRIVER = "/proc/driver/nvidia/version"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpu(NamedTuple):
    """A GPU, or a MIG instance of one.

    `uuid` is written as NVIDIA's tools do (GPU-…, MIG-…); it is empty if nothing tells it. `board` is the
    UUID of the whole GPU, which its MIG instances share. `numa` is the number of its NUMA node, -1 if the
    kernel knows none.
    """

    uuid: str
    board: str
    name: str = ""
    pci: str = ""
    numa: int = -1
    memory_bytes: int = 0

    @property
    def is_slice(self) -> bool:
        """Tell whether this is a MIG instance."""
        return self.uuid != self.board


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may open, in the order of nvidia-smi; none if NVML does not answer.

    GPUs whose device files a cgroup keeps from this process are left out. CUDA_VISIBLE_DEVICES makes no
    difference. CUDA does not start. A GPU in MIG mode is replaced by its instances.
    """
    if not os.path.exists(DRIVER):
        return ()
    try:
        import pynvml as nvml
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return tuple(one for index in range(nvml.nvmlDeviceGetCount()) for one in parts(nvml, index))
    finally:
        nvml.nvmlShutdown()


def parts(nvml: Any, index: int) -> list[Gpu]:
    """Return a GPU, or its instances if it is in MIG mode; none if this process may not open it."""
    try:
        whole = nvml.nvmlDeviceGetHandleByIndex(index)
        handles = instances(nvml, whole)
        where = nvml.nvmlDeviceGetPciInfo(whole)
        pci = address(where.domain, where.bus, where.device)
        board = nvml.nvmlDeviceGetUUID(whole)
        return [
            Gpu(nvml.nvmlDeviceGetUUID(one), board, nvml.nvmlDeviceGetName(one), pci, numa_node(pci),
                int(nvml.nvmlDeviceGetMemoryInfo(one).total))
            for one in ([whole] if handles is None else handles)
        ]
    except nvml.NVMLError:
        return []


def instances(nvml: Any, whole: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG instances, None if it is not in MIG mode."""
    try:
        if nvml.nvmlDeviceGetMigMode(whole)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
    except nvml.NVMLError:  # this GPU has no MIG mode
        return None
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, index))
        except nvml.NVMLError:  # fewer instances than there could be
            break
    return found


def address(domain: int, bus: int, device: int) -> str:
    """Return a PCI address as the kernel writes it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def numa_node(pci: str) -> int:
    """Return the NUMA node of a PCI device, -1 if the kernel knows none."""
    try:
        with open(f"/sys/bus/pci/devices/{pci}/numa_node") as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


def visible(reachable: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names, in its order; all if it is not set.

    The first invalid entry ends the list; a GPU that is named twice empties it (CUDA Programming Guide,
    5.2.1). Of several MIG instances CUDA shows a process only the first; all are returned here.
    """
    if VISIBLE not in environ:
        return tuple(reachable)
    found = []
    for entry in environ[VISIBLE].split(","):
        named = by_name(reachable, entry.strip())
        if named is None:
            break
        found.append(named)
    return tuple(found) if len(set(found)) == len(found) else ()


def by_name(reachable: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names, None if it names none."""
    if entry.isdigit():
        boards = list(dict.fromkeys(one.board for one in reachable))
        wanted = boards[int(entry)] if int(entry) < len(boards) else ""
        return next((one for one in reachable if one.board == wanted), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    return next((one for one in reachable if one.uuid.startswith(entry)), None)
