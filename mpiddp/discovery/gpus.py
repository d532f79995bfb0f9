"""The GPUs of this node and which of them a rank may use, listed before torch and CUDA start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..base.files import list_names, read_number, read_text

DRIVER_FILE = "/proc/driver/nvidia/version"
DRM, DRI = "/sys/class/drm", "/dev/dri"
DEV = "/dev"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
ROCR_VISIBLE, HIP_VISIBLE = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
INTEGRATED_PCI = "0000:00:02.0"  # where Intel's processors have their own graphics
HEADLESS_CLASS = "0x0380"  # the beginning of the PCI class of what drives no display (pci.ids, class 03, subclass 80)


class Gpu(NamedTuple):
    """A GPU, or a MIG instance of one.

    `uuid` is written as NVIDIA's tools do (GPU-…, MIG-…), empty if unknown. `board` is the UUID of the whole GPU, which
    its MIG instances share. `numa` is the number of its NUMA node, -1 if the kernel does not report it.
    """

    uuid: str
    board: str
    name: str = ""
    pci: str = ""
    numa: int = -1

    @property
    def is_slice(self) -> bool:
        """Return whether this is a MIG instance."""
        return self.uuid != self.board


def list_nvidia_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that this process may open, in the order of nvidia-smi; none if NVML does not answer.

    GPUs whose device files a cgroup denies to this process are left out, whatever CUDA_VISIBLE_DEVICES says. CUDA does
    not start. A GPU in MIG mode is replaced by its instances.
    """
    with open_nvml() as nvml:
        if nvml is None:
            return ()
        return tuple(gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in read_nvml_gpus(nvml, index))


@contextmanager
def open_nvml() -> Iterator[Any]:
    """Yield NVML's module while it is initialised; None without NVIDIA's driver, or if NVML does not answer."""
    if not os.path.exists(DRIVER_FILE):
        yield None
        return
    try:
        import pynvml
        pynvml.nvmlInit()
    except Exception:  # no package, or an NVMLError of the driver
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_nvml_gpus(nvml: Any, index: int) -> list[Gpu]:
    """Return a GPU, or its instances if it is in MIG mode; none if this process may not open it."""
    try:
        board_handle = nvml.nvmlDeviceGetHandleByIndex(index)
        handles = list_mig_handles(nvml, board_handle)
        pci_info = nvml.nvmlDeviceGetPciInfo(board_handle)
        pci = format_pci_address(pci_info.domain, pci_info.bus, pci_info.device)
        board = nvml.nvmlDeviceGetUUID(board_handle)
        return [
            Gpu(nvml.nvmlDeviceGetUUID(handle), board, nvml.nvmlDeviceGetName(handle), pci, read_numa_node(pci))
            for handle in ([board_handle] if handles is None else handles)
        ]
    except nvml.NVMLError:
        return []


def list_mig_handles(nvml: Any, board: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG instances, None if it is not in MIG mode."""
    try:
        if nvml.nvmlDeviceGetMigMode(board)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
    except nvml.NVMLError:  # this GPU has no MIG mode
        return None
    handles = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(board)):
        try:
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, index))
        except nvml.NVMLError:  # no instance has this number; a higher one may exist
            continue
    return handles


def list_amd_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return AMD's GPUs that are visible to this process, from the kernel, in the order of their PCI addresses.

    Their UUID is what ROCm makes of the kernel's unique_id. HIP selects by HIP_VISIBLE_DEVICES, or if that is not set
    by CUDA_VISIBLE_DEVICES, among the GPUs that ROCR_VISIBLE_DEVICES leaves.
    """
    return select_visible(list_rocr_gpus(environ), environ, choose_hip_variable(environ))


def list_rocr_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return AMD's GPUs that this process may open and ROCR_VISIBLE_DEVICES names, from the kernel."""
    boards = []
    for device in list_cards("amdgpu"):
        pci, unique = os.path.basename(device), read_text(f"{device}/unique_id")
        uuid = f"GPU-{unique}" if unique else f"GPU at {pci}"
        boards.append(Gpu(uuid, uuid, "", pci, read_number(f"{device}/numa_node")))
    return select_visible(sorted(boards, key=lambda gpu: gpu.pci), environ, ROCR_VISIBLE)


def choose_hip_variable(environ: Mapping[str, str]) -> str:
    """Return the name of the variable by which HIP selects GPUs (ROCm, "HIP environment variables")."""
    return HIP_VISIBLE if HIP_VISIBLE in environ else CUDA_VISIBLE


def describe_hidden_gpus(environ: Mapping[str, str]) -> str:
    """Return in words how AMD's two lists of visible GPUs together leave none, empty if they leave some.

    HIP's list counts among the GPUs that ROCR_VISIBLE_DEVICES leaves (torch.cuda, _parse_visible_devices). Slurm sets
    ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES to the same numbers unless gres.conf says otherwise (man gres.conf,
    "Flags"). If a list names no GPU, the user wants none.
    """
    second = choose_hip_variable(environ)
    if not all(is_gpu_list(environ.get(name, "")) for name in (ROCR_VISIBLE, second)):
        return ""
    left = list_rocr_gpus(environ)
    if not left or select_visible(left, environ, second):
        return ""
    count = f"{len(left)} GPU{'s' * (len(left) > 1)}"
    return (f"{ROCR_VISIBLE}={environ[ROCR_VISIBLE]} leaves {count}, numbered from 0, but {second}={environ[second]} "
            "selects none of them")


def is_gpu_list(value: str) -> bool:
    """Return whether a list of visible GPUs names any.

    An empty one, "-1", Slurm's "NoDevFiles" and HTCondor's "10000" name none.
    """
    first = value.split(",")[0].strip()
    return (first.isdecimal() and first != "10000") or first.startswith(("GPU-", "MIG-"))


def list_openable_gpus() -> dict[str, list[str]]:
    """Return the GPUs for computing that this process may open, by vendor: their device files or folders in /sys.

    Cards that may only drive a display do not count: AMD's without a unique_id, such as those inside a processor, and
    Intel's that can drive one. A device file that a cgroup denies does not count (access(2) asks the cgroup too).
    """
    files = [f"{DEV}/{name}" for name in sorted(list_names(DEV, "nvidia")) if name[6:].isdigit()]
    nvidia = [file for file in files if os.access(file, os.R_OK | os.W_OK)]
    has_kfd = os.access(f"{DEV}/kfd", os.R_OK | os.W_OK)  # ROCm's device
    amd = [device for device in list_cards("amdgpu") if has_kfd and read_text(f"{device}/unique_id")]
    intel = [device for device in list_cards("i915", "xe")
             if read_text(f"{device}/class").startswith(HEADLESS_CLASS) and os.path.basename(device) != INTEGRATED_PCI]
    return {vendor: present for vendor, present in (("NVIDIA", nvidia), ("AMD", amd), ("Intel", intel)) if present}


def describe_openable_gpus() -> str:
    """Return in words the GPUs for computing that this process may open; empty for none."""
    for vendor, present in list_openable_gpus().items():
        plural = len(present) > 1
        return f"{len(present)} {vendor} GPU{'s' * plural} ({os.path.basename(present[0])}{', …' * plural})"
    return ""


def list_cards(*drivers: str) -> list[str]:
    """Return the folders in /sys of the graphics cards with one of these drivers that this process may open."""
    devices = [os.path.realpath(f"{DRM}/{card}/device") for card in sorted(list_names(DRM, "card"))
               if card[4:].isdigit()]
    return [device for device in devices
            if os.path.basename(os.path.realpath(f"{device}/driver")) in drivers and can_open(device)]


def can_open(device: str) -> bool:
    """Return whether this process may open a GPU: a scheduler may deny some."""
    for node in list_names(f"{device}/drm"):
        if node.startswith("renderD"):
            try:
                os.close(os.open(f"{DRI}/{node}", os.O_RDWR | os.O_CLOEXEC))
            except OSError:
                return False
    return True


def format_pci_address(domain: int, bus: int, device: int) -> str:
    """Return a PCI address as the kernel writes it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def read_numa_node(pci: str) -> int:
    """Return the NUMA node of a PCI device, -1 if the kernel does not report it."""
    return read_number(f"/sys/bus/pci/devices/{pci}/numa_node")


def select_visible(
    reachable: Sequence[Gpu], environ: Mapping[str, str], variable: str = CUDA_VISIBLE
) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES, or a variable like it, names, in its order; all if it is not set.

    The first invalid entry ends the list; a GPU that is named twice empties it (CUDA Programming Guide, 5.2.1). All
    named MIG instances are returned, although CUDA shows a process only the first.
    """
    if variable not in environ:
        return tuple(reachable)
    gpus = []
    for entry in environ[variable].split(","):
        gpu = find_gpu(reachable, entry.strip())
        if gpu is None:
            break
        gpus.append(gpu)
    return tuple(gpus) if len(set(gpus)) == len(gpus) else ()


def find_gpu(reachable: Sequence[Gpu], entry: str) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names, None if it names none."""
    if entry.isdecimal():
        boards = list(dict.fromkeys((gpu.board, gpu.pci) for gpu in reachable))
        wanted = boards[int(entry)] if int(entry) < len(boards) else None
        return next((gpu for gpu in reachable if (gpu.board, gpu.pci) == wanted), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    return next((gpu for gpu in reachable if gpu.uuid.startswith(entry)), None)
