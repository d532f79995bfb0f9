"""What torch finds for a rank: the kind and number of accelerators, and the backends that serve them."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.files import read_text
from ..systems.schedulers import SLURM
from . import schedulers
from .gpus import (
    CUDA_VISIBLE,
    DRIVER_FILE,
    HIP_VISIBLE,
    ROCR_VISIBLE,
    Gpu,
    describe_openable_gpus,
    format_pci_address,
    is_gpu_list,
    read_numa_node,
)

if TYPE_CHECKING:
    import torch

SLURM_GPUS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")  # man srun, "OUTPUT ENVIRONMENT VARIABLES"


class UnseenGpus(NamedTuple):
    """GPUs that a rank should have and torch does not see.

    `given` names the evidence for them. `built_for` is what torch was built for, such as "CUDA 12.8", empty for CPUs
    only; `reason` is torch's own error, empty for none. `driver` is the version of the GPUs' driver, empty without one.
    """

    given: str
    built_for: str
    reason: str
    driver: str


class DeviceFacts(NamedTuple):
    """The devices that torch sees on a rank; `error` is why torch could not be imported, None if it could.

    `kind` is a device type of torch, "cpu" if there is no accelerator. `gpus` are the accelerators in torch's order.
    `default_backends` maps a device type to torch's default backend for it, `backends` each backend of this torch to
    the device types that it serves. `nccl_version` is empty if this torch has no NCCL. `unseen` are the GPUs that torch
    should see, None if it sees any or there are none. `unlimited_stack` is true if `ulimit -s` is unlimited.
    """

    torch_version: str = ""
    nccl_version: str = ""
    kind: str = "cpu"
    gpus: tuple[Gpu, ...] = ()
    default_backends: Mapping[str, str] = {}
    backends: Mapping[str, tuple[str, ...]] = {}
    error: str | None = None
    unseen: UnseenGpus | None = None
    unlimited_stack: bool = False


def try_import_torch() -> str | None:
    """Import torch and return why that failed, None if it succeeded."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # also of an extension for a device that torch loads, such as torch_npu
        cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
        return f"{type(error).__name__}: {error}{cause}"
    return None if dist.is_available() else f"torch {torch.__version__} was built without torch.distributed"


def read_device_facts(cpu_only: bool = False) -> DeviceFacts:
    """Return what torch finds; with `cpu_only`, do not look for accelerators."""
    import torch
    import torch.distributed as dist

    kind, count = ("cpu", 0) if cpu_only else find_accelerator(torch)
    return DeviceFacts(
        torch_version=str(torch.__version__),
        nccl_version=read_nccl_version(),
        kind=kind,
        gpus=tuple(read_gpu(getattr(torch, kind, None), index) for index in range(count)),
        default_backends=dict(dist.Backend.default_device_backend_map),
        backends={
            name: tuple(devices) for name, devices in dist.Backend.backend_capability.items()
            if dist.is_backend_available(name)
        },
        unseen=None if cpu_only or count else find_unseen_gpus(torch, os.environ),
        unlimited_stack=resource.getrlimit(resource.RLIMIT_STACK)[0] == resource.RLIM_INFINITY,
    )


def find_unseen_gpus(torch: Any, environ: Mapping[str, str]) -> UnseenGpus | None:
    """Return which GPUs a rank should have although torch sees none, None without evidence of any."""
    given = find_gpu_evidence(environ)
    if not given:
        return None
    versions = {name: getattr(torch.version, name.lower(), None) for name in ("CUDA", "HIP", "XPU")}
    built_for = next((f"{name} {version}" for name, version in versions.items() if version), "")
    reason = read_torch_reason(torch.xpu if versions["XPU"] else torch.cuda) if built_for else ""
    return UnseenGpus(given, built_for, reason, read_driver_version())


def find_gpu_evidence(environ: Mapping[str, str]) -> str:
    """Return the evidence in words of GPUs for this process: from Slurm, device files, or a list of visible GPUs.

    Flux and PBS set CUDA_VISIBLE_DEVICES. In a job of Slurm without GPUs, a list is what the user has set for all jobs.
    Empty without evidence, and if a list hides all GPUs.
    """
    lists = {name: environ[name] for name in (CUDA_VISIBLE, ROCR_VISIBLE, HIP_VISIBLE) if name in environ}
    if not all(map(is_gpu_list, lists.values())):
        return ""
    given = max(schedulers.count_slurm_gpus_on_node(environ), schedulers.count_slurm_gpus_of_task(environ))
    if given:
        return f"{given} GPU{'s' * (given > 1)} from {SLURM.name}"
    if openable := describe_openable_gpus():
        return openable
    if schedulers.find_scheduler(environ) is SLURM and not any(map(environ.get, SLURM_GPUS)):
        return ""
    return next((f"{name}={value}" for name, value in lists.items()), "")


def read_torch_reason(module: Any) -> str:
    """Return the first sentence of torch's error when it has to use GPUs that it does not see; empty for none."""
    try:
        module.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition(". ")[0].partition("\n")[0]
    return ""


def read_driver_version() -> str:
    """Return the name and version of the driver of NVIDIA's or AMD's GPUs, empty without one."""
    nvidia = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", read_text(DRIVER_FILE))
    amd = read_text("/sys/module/amdgpu/version")
    return f"NVIDIA {nvidia[1]}" if nvidia else f"amdgpu {amd}" if amd else ""


def read_nccl_version() -> str:
    """Return the version of torch's NCCL, empty if this torch has none."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def read_gpu(module: Any, index: int) -> Gpu:
    """Return a device as torch describes it; `module` is torch.cuda, or torch's module for another device type."""
    properties: Any = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
    uuid, pci = str(getattr(properties, "uuid", "")), ""
    if hasattr(properties, "pci_bus_id"):
        pci = format_pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return Gpu(uuid, uuid, str(getattr(properties, "name", "")), pci, read_numa_node(pci) if pci else -1)


def find_accelerator(torch: Any) -> tuple[str, int]:
    """Return the type and number of the accelerators that torch can use, ("cpu", 0) without one.

    `torch.accelerator` came with torch 2.6; an older torch has torch.cuda and torch.xpu.
    """
    if hasattr(torch, "accelerator"):
        if not torch.accelerator.is_available():
            return "cpu", 0
        return torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
    for module in (torch.cuda, torch.xpu):
        if module.is_available():
            return module.__name__.rpartition(".")[2], module.device_count()
    return "cpu", 0


def use_device(name: str) -> torch.device:
    """Make a device the current one of this process, and return it."""
    import torch

    device = torch.device(name)
    if device.type != "cpu":
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "set_device"):
            module.set_device(device)
        else:
            torch.accelerator.set_device_index(device.index)
    return device
