"""Check what torch sees on each rank against the plan, and choose the job's backend."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import LaunchError
from ..base.text import folded, minority
from ..discovery.devices import DeviceFacts
from .advice import NO_ADVICE, Advice
from .gpus import GpuChoice
from .problems import check_version

INSTALL_ADVICE = "activate the environment whose torch is built for these GPUs, or install one (pytorch.org/get-started)"
UPDATE_ADVICE = ("run nvidia-smi or rocm-smi there; update the driver, or install a torch for the version that it supports;\n"
          "in a container, pass the GPUs in (apptainer --nv or --rocm, docker --gpus all)")


def check_torch(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> None:
    """Raise LaunchError `torch-unusable` if a rank cannot import torch, `version-skew` if versions differ."""
    failed = [rank for rank, one in enumerate(facts) if one.error]
    if failed:
        raise LaunchError(
            "torch-unusable",
            found=f"{facts[failed[0]].error} (on {folded(hosts[rank] for rank in failed)})",
            needed="a torch that every rank can import",
            do="run `python -c 'import torch.distributed'` there, in the same environment",
        )
    check_version("torch", [one.torch_version for one in facts], hosts)
    check_version("NCCL", [one.nccl_version for one in facts], hosts)


def check_device_kinds(
    asked: str | None, facts: Sequence[DeviceFacts], hosts: Sequence[str], advice: Advice = NO_ADVICE
) -> None:
    """Raise LaunchError `device-unavailable` if a rank lacks the kind of device that was asked for.

    Raise `mixed-devices` if the user asked for no kind and ranks see different ones: they have no backend in
    common for their gradients.
    """
    lacking = [rank for rank, one in enumerate(facts) if asked and one.kind != asked]
    if lacking:
        raise LaunchError(
            "device-unavailable",
            found=f"--device={asked}, but on {folded(hosts[rank] for rank in lacking)} torch "
            f"{facts[lacking[0]].torch_version} sees {describe_devices(facts[lacking[0]])}",
            needed=f"a {asked} device for every rank",
            do=f"ask for GPUs{advice.words('gpus')}, install a torch for them, or leave --device away",
        )
    common, others = minority([one.kind for one in facts])
    if others:
        ranks = next(iter(others.values()))
        raise LaunchError(
            "mixed-devices",
            found=f"most ranks see {describe_devices(facts[[one.kind for one in facts].index(common)])}, but "
            f"{folded(hosts[rank] for rank in ranks)} has {describe_devices(facts[ranks[0]])}",
            needed="the same kind of device for every rank",
            do=f"ask for GPUs on every node{advice.words('gpus')}, or take none: --device=cpu",
        )


def check_unseen_gpus(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> None:
    """Raise LaunchError `no-gpu-seen` if torch sees no GPU on any rank, and something tells that there are some."""
    blind = [rank for rank, rank_facts in enumerate(facts) if rank_facts.unseen]
    if not blind or any(rank_facts.gpus for rank_facts in facts):
        return
    first = facts[blind[0]]
    assert first.unseen
    given, built_for, says, driver = first.unseen
    hostnames = folded(hosts[rank] for rank in blind)
    build = f"torch {first.torch_version}, built for {built_for or 'CPUs only'},"
    raise LaunchError(
        "no-gpu-seen",
        found=f"{given} on {hostnames}, but {build} sees no GPU"
        + f"\ntorch says: {says}" * bool(says) + f"\ndriver: {driver}" * bool(driver),
        needed="a torch that sees these GPUs",
        do=f"{UPDATE_ADVICE if built_for else INSTALL_ADVICE};\n--device=cpu trains on the CPU",
    )


def warn_unlimited_stack(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> list[str]:
    """Return the warning `unlimited-stack` where NCCL's threads have small stacks because there is no limit.

    GNU libc gives threads 2 MiB then (man pthread_create), too little for NCCL's search of a large NVLink network. NCCL
    2.28 and newer choose the size themselves (NCCL User Guide, "Stack size"; NVIDIA/nccl#2186).
    """
    ranks = [rank for rank, rank_facts in enumerate(facts)
             if rank_facts.unlimited_stack and is_stack_too_small(rank_facts)]
    if not ranks:
        return []
    hostnames, version = folded(hosts[rank] for rank in ranks), facts[ranks[0]].nccl_version
    crash = f"NCCL {version} may crash then on large NVLink systems such as GB200"
    return [f"unlimited-stack: ulimit -s is unlimited on {hostnames}; {crash}; set ulimit -s 8192"]


def is_stack_too_small(facts: DeviceFacts) -> bool:
    """Tell whether a rank has an NVIDIA GPU and an NCCL that leaves the size of its threads' stacks to GNU libc."""
    version = tuple(int(part) for part in facts.nccl_version.split(".") if part.isdigit())
    return bool(version) and version < (2, 28) and any(not gpu.name.startswith("AMD") for gpu in facts.gpus)


def check_gpu_index(
    choice: GpuChoice, facts: DeviceFacts, rank: int, host: str, virtual: bool, early: bool, advice: Advice
) -> None:
    """Raise LaunchError `device-unavailable` if torch does not see a rank's GPU at the index planned for it.

    `virtual` says that the user asked for index 0, `early` that the GPU was chosen before torch told of any.
    """
    at = facts.gpus[choice.ordinal] if choice.ordinal < len(facts.gpus) else None
    if at is None or (early and at.uuid
                      and strip_uuid(at.uuid) not in (strip_uuid(choice.gpu.uuid), strip_uuid(choice.gpu.board))):
        raise LaunchError(
            "device-unavailable",
            found=f"{choice.gpu.uuid} was chosen for rank {rank} on {host}, but torch sees "
            f"{at.uuid if at else 'nothing'} at {facts.kind}:{choice.ordinal}",
            needed="a torch that sees the GPUs which CUDA_VISIBLE_DEVICES names",
            do="look for what sets CUDA_VISIBLE_DEVICES, or starts CUDA, before mpiddp does",
        )
    if virtual and choice.ordinal:
        raise LaunchError(
            "device-unavailable",
            found=f"--virtual-local-rank, but rank {rank} on {host} sees {len(facts.gpus)} GPUs and cannot hide any",
            needed="NVML, which tells a GPU's UUID before CUDA starts, or one GPU in each rank's sight",
            do=f"pip install nvidia-ml-py, or show each rank its own GPU alone{advice.words('own_gpu')}",
        )


def strip_uuid(uuid: str) -> str:
    """Return a UUID without the prefix that NVIDIA's tools write, in lower case."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def choose_backend(
    asked: str | None, facts: Sequence[DeviceFacts], hosts: Sequence[str], shared: bool = False,
    advice: Advice = NO_ADVICE,
) -> str:
    """Return the job's backend: what was asked for, or torch's own for the devices.

    `asked` is a name such as "nccl", or torch's form "cpu:gloo,cuda:nccl" with one for each device type. If
    ranks share a device, the default is gloo: NCCL takes only one rank for each GPU. Raises LaunchError
    `backend-unavailable`.
    """
    if shared and "nccl" in (asked or "").lower():
        raise LaunchError(
            "backend-unavailable",
            found=f"--backend={asked} with --share-gpus, and ranks that share a GPU",
            needed="gloo, or a GPU for each rank: NCCL takes one rank a GPU",
            do="leave --backend away, or start fewer ranks",
        )
    if asked is None and shared:
        return "gloo"
    if asked is None:
        return facts[0].default_backends.get(facts[0].kind, "gloo")
    for rank, one in enumerate(facts):
        for part in asked.lower().split(","):
            name = part.rpartition(":")[2]
            if not set(one.backends.get(name, ())) & {one.kind, "cpu"}:
                raise LaunchError(
                    "backend-unavailable",
                    found=f"backend {asked}, but rank {rank} on {hosts[rank]} has {describe_backends(one)}",
                    needed="a backend that this torch has, for a device that every rank sees",
                    do=f"leave --backend away to get the devices' own, or ask for GPUs{advice.words('gpus')}"
                    if name in one.backends else "leave --backend away to get the devices' own, "
                    "or install a torch with that backend",
                )
    return asked.lower()


def describe_backends(facts: DeviceFacts) -> str:
    """Return a rank's devices and backends in words."""
    return f"{describe_devices(facts)} and torch {facts.torch_version} with {', '.join(sorted(facts.backends))}"


def describe_devices(facts: DeviceFacts) -> str:
    """Return a rank's devices in words."""
    count = len(facts.gpus)
    return f"{count} {facts.kind} device{'s' * (count > 1)}" if count else "no GPU"
