"""What torch finds for a rank: the kind of accelerator, how many, and the backends that can serve it."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.files import read_text
from . import schedulers
from .gpus import DRIVER, HIP, ROCR, VISIBLE, Gpu, address, describe_openable, names_gpu, numa_node

if TYPE_CHECKING:
    import torch

SLURM_GPUS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")  # man srun, "OUTPUT ENVIRONMENT VARIABLES"


class Unseen(NamedTuple):
    """GPUs that a rank should have and torch does not see.

    `given` says in words what tells of them. `built_for` is what torch was built for, as in "CUDA 12.8", empty for
    the CPU alone; `says` is its own reason, empty for none. `driver` is the version of the GPUs' driver, empty
    without one.
    """

    given: str
    built_for: str
    says: str
    driver: str


class DeviceFacts(NamedTuple):
    """The devices a rank sees; `error` says why torch could not be imported, None if it could.

    `kind` is a device type of torch, "cpu" if there is no accelerator. `gpus` are the accelerators in
    torch's order. `default_backends` maps a device type to torch's default backend for it. `backends`
    maps each backend of this torch to the device types that it serves. `nccl_version` is empty if
    this torch has no NCCL. `unseen` tells of GPUs that torch should see, None where it sees any, or none is there.
    `unlimited_stack` is true where `ulimit -s` is unlimited.
    """

    torch_version: str = ""
    nccl_version: str = ""
    kind: str = "cpu"
    gpus: tuple[Gpu, ...] = ()
    default_backends: Mapping[str, str] = {}
    backends: Mapping[str, tuple[str, ...]] = {}
    error: str | None = None
    unseen: Unseen | None = None
    unlimited_stack: bool = False


def torch_error() -> str | None:
    """Import torch and return why that failed, None if it worked."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None if dist.is_available() else f"torch {torch.__version__} was built without torch.distributed"


def device_facts(cpu_only: bool = False) -> DeviceFacts:
    """Return what torch finds; with `cpu_only`, do not look for accelerators."""
    import torch
    import torch.distributed as dist

    kind, count = ("cpu", 0) if cpu_only else accelerator(torch)
    return DeviceFacts(
        torch_version=str(torch.__version__),
        nccl_version=nccl_version(),
        kind=kind,
        gpus=tuple(described(getattr(torch, kind, None), index) for index in range(count)),
        default_backends=dict(dist.Backend.default_device_backend_map),
        backends={
            name: tuple(devices) for name, devices in dist.Backend.backend_capability.items()
            if dist.is_backend_available(name)
        },
        unseen=None if cpu_only or count else find_unseen(torch, os.environ),
        unlimited_stack=resource.getrlimit(resource.RLIMIT_STACK)[0] == resource.RLIM_INFINITY,
    )


def find_unseen(torch: Any, environ: Mapping[str, str]) -> Unseen | None:
    """Return which GPUs a rank should have although torch sees none, None if nothing tells of any."""
    given = find_evidence(environ)
    if not given:
        return None
    versions = {name: getattr(torch.version, name.lower(), None) for name in ("CUDA", "HIP", "XPU")}
    built_for = next((f"{name} {version}" for name, version in versions.items() if version), "")
    says = ask_reason(torch.xpu if versions["XPU"] else torch.cuda) if built_for else ""
    return Unseen(given, built_for, says, read_driver())


def find_evidence(environ: Mapping[str, str]) -> str:
    """Return in words what tells of GPUs for this process: Slurm, device files, or a list of visible GPUs.

    Flux and PBS set CUDA_VISIBLE_DEVICES. In a job of which Slurm says nothing of GPUs, a list is what the user has in
    all jobs. Empty where nothing tells of any, and where a list hides all of them.
    """
    lists = {name: environ[name] for name in (VISIBLE, ROCR, HIP) if name in environ}
    if not all(map(names_gpu, lists.values())):
        return ""
    given = max(schedulers.slurm_gpus_on_node(environ), schedulers.slurm_gpus_of_task(environ))
    if given:
        return f"{given} GPU{'s' * (given > 1)} given by Slurm"
    if openable := describe_openable():
        return openable
    if schedulers.find_scheduler(environ) is schedulers.SLURM and not any(map(environ.get, SLURM_GPUS)):
        return ""
    return next((f"{name}={value}" for name, value in lists.items()), "")


def ask_reason(module: Any) -> str:
    """Return the first sentence of what torch says when it shall use GPUs that it does not see; empty for nothing."""
    try:
        module.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition(". ")[0].partition("\n")[0]
    return ""


def read_driver() -> str:
    """Return the name and version of the driver of NVIDIA's or AMD's GPUs, empty without one."""
    nvidia = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", read_text(DRIVER))
    amd = read_text("/sys/module/amdgpu/version")
    return f"NVIDIA {nvidia[1]}" if nvidia else f"amdgpu {amd}" if amd else ""


def nccl_version() -> str:
    """Return the version of torch's NCCL, empty if this torch has none."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def described(module: Any, index: int) -> Gpu:
    """Return what torch tells of a device; `module` is torch.cuda, or torch's module for another device type."""
    told: Any = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
    uuid, pci = str(getattr(told, "uuid", "")), ""
    if hasattr(told, "pci_bus_id"):
        pci = address(told.pci_domain_id, told.pci_bus_id, told.pci_device_id)
    return Gpu(uuid, uuid, str(getattr(told, "name", "")), pci, numa_node(pci) if pci else -1)


def accelerator(torch: Any) -> tuple[str, int]:
    """Return the type and number of the accelerators that torch can use, ("cpu", 0) without one.

    `torch.accelerator` came with torch 2.6; with an older torch, torch.cuda and torch.xpu are asked.
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
