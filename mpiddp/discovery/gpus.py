"""The GPUs of this node and which of them a rank may use, seen before torch and CUDA start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.files import list_names, read_number, read_text

DRIVER = "/proc/driver/nvidia/version"
DRM, DRI = "/sys/class/drm", "/dev/dri"
DEV = "/dev"
VISIBLE = "CUDA_VISIBLE_DEVICES"
ROCR, HIP = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
INTEGRATED = "0000:00:02.0"  # where Intel's processors have their own graphics
DISPLAY_OTHER = "0x0380"  # the beginning of the PCI class of what drives no display (pci.ids, class 03, subclass 80)


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

    @property
    def is_slice(self) -> bool:
        """Tell whether this is a MIG instance."""
        return self.uuid != self.board


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that this process may open, in the order of nvidia-smi; none if NVML does not answer.

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
            Gpu(nvml.nvmlDeviceGetUUID(one), board, nvml.nvmlDeviceGetName(one), pci, numa_node(pci))
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
        except nvml.NVMLError:  # there is none of this number, but there may be one of a higher number
            continue
    return found


def from_kernel(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return AMD's GPUs that this process is shown, by their PCI addresses, as the kernel tells of them.

    Their UUID is what ROCm makes of the kernel's unique_id. ROCm's variables are lists as CUDA_VISIBLE_DEVICES is,
    which HIP takes where its own is not set; it counts in what ROCR_VISIBLE_DEVICES has left.
    """
    return visible(list_rocr_gpus(environ), environ, choose_hip_list(environ))


def list_rocr_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return AMD's GPUs that this process may open and that ROCR_VISIBLE_DEVICES names, as the kernel tells of them."""
    boards = []
    for device in list_cards("amdgpu"):
        pci, unique = os.path.basename(device), read_text(f"{device}/unique_id")
        uuid = f"GPU-{unique}" if unique else f"GPU at {pci}"
        boards.append(Gpu(uuid, uuid, "", pci, read_number(f"{device}/numa_node")))
    return visible(sorted(boards, key=lambda gpu: gpu.pci), environ, ROCR)


def choose_hip_list(environ: Mapping[str, str]) -> str:
    """Return the name of the variable by which HIP selects GPUs (ROCm, "HIP environment variables")."""
    return HIP if HIP in environ else VISIBLE


def describe_clash(environ: Mapping[str, str]) -> str:
    """Return in words how AMD's two lists of visible GPUs together leave none, empty where they do not.

    HIP's list counts among the GPUs that ROCR_VISIBLE_DEVICES leaves (torch.cuda, _parse_visible_devices). Slurm sets
    ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES to the same numbers unless gres.conf says otherwise (man gres.conf,
    "Flags"). Where a list names no GPU, the user wants none.
    """
    second = choose_hip_list(environ)
    if not all(names_gpu(environ.get(name, "")) for name in (ROCR, second)):
        return ""
    left = list_rocr_gpus(environ)
    if not left or visible(left, environ, second):
        return ""
    return (f"{ROCR}={environ[ROCR]} leaves {len(left)} GPU{'s' * (len(left) > 1)}, numbered from 0, and "
            f"{second}={environ[second]} selects none of these")


def names_gpu(value: str) -> bool:
    """Tell whether a list of visible GPUs names any: an empty one does not, nor do "-1" and Slurm's "NoDevFiles"."""
    first = value.split(",")[0].strip()
    return first.isdecimal() or first.startswith(("GPU-", "MIG-"))


def describe_openable() -> str:
    """Return in words the GPUs for computing that this process may open, by their device files; empty for none.

    Cards that may be there for a display alone do not count: of AMD's those without a unique_id, such as those inside
    a processor, and of Intel's those that can drive a display. A device file that a cgroup denies does not count
    (access(2) asks the cgroup, too).
    """
    files = [f"{DEV}/{name}" for name in sorted(list_names(DEV, "nvidia")) if name[6:].isdigit()]
    nvidia = [file for file in files if os.access(file, os.R_OK | os.W_OK)]
    has_kfd = os.access(f"{DEV}/kfd", os.R_OK | os.W_OK)  # by which ROCm computes
    amd = [device for device in list_cards("amdgpu") if has_kfd and read_text(f"{device}/unique_id")]
    intel = [device for device in list_cards("i915", "xe")
             if read_text(f"{device}/class").startswith(DISPLAY_OTHER) and os.path.basename(device) != INTEGRATED]
    for vendor, present in (("NVIDIA", nvidia), ("AMD", amd), ("Intel", intel)):
        if present:
            several = len(present) > 1
            return f"{len(present)} {vendor} GPU{'s' * several} ({os.path.basename(present[0])}{', …' * several})"
    return ""


def list_cards(*drivers: str) -> list[str]:
    """Return the folders in /sys of the graphics cards with one of these drivers that this process may open."""
    cards = sorted(list_names(DRM, "card"))
    devices = [os.path.realpath(f"{DRM}/{card}/device") for card in cards if card[4:].isdigit()]
    return [device for device in devices
            if os.path.basename(os.path.realpath(f"{device}/driver")) in drivers and can_open(device)]


def can_open(device: str) -> bool:
    """Tell whether this process may open a GPU of the kernel's: a scheduler may keep it from some."""
    for node in list_names(f"{device}/drm"):
        if node.startswith("renderD"):
            try:
                os.close(os.open(f"{DRI}/{node}", os.O_RDWR | os.O_CLOEXEC))
            except OSError:
                return False
    return True


def address(domain: int, bus: int, device: int) -> str:
    """Return a PCI address as the kernel writes it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def numa_node(pci: str) -> int:
    """Return the NUMA node of a PCI device, -1 if the kernel knows none."""
    return read_number(f"/sys/bus/pci/devices/{pci}/numa_node")


def visible(reachable: Sequence[Gpu], environ: Mapping[str, str], variable: str = VISIBLE) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES, or a variable like it, names, in its order; all if it is not set.

    The first invalid entry ends the list; a GPU that is named twice empties it (CUDA Programming Guide,
    5.2.1). Of several MIG instances CUDA shows a process only the first; all are returned here.
    """
    if variable not in environ:
        return tuple(reachable)
    found = []
    for entry in environ[variable].split(","):
        named = by_name(reachable, entry.strip())
        if named is None:
            break
        found.append(named)
    return tuple(found) if len(set(found)) == len(found) else ()


def by_name(reachable: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names, None if it names none."""
    if entry.isdecimal():
        boards = list(dict.fromkeys((one.board, one.pci) for one in reachable))
        wanted = boards[int(entry)] if int(entry) < len(boards) else None
        return next((one for one in reachable if (one.board, one.pci) == wanted), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    return next((one for one in reachable if one.uuid.startswith(entry)), None)
