"""Each rank's device, and the job's backend."""

from __future__ import annotations

from collections.abc import Sequence

from ..environment import Place
from ..errors import LaunchError
from ..facts.devices import DeviceFacts
from .problems import check_version
from .words import folded, minority


def check_torch(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> None:
    """Raise LaunchError `torch-unusable` where a rank has no torch, `version-skew` where it is another."""
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


def check_kinds(asked: str | None, facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> None:
    """Raise LaunchError `device-unavailable` where a rank lacks the kind of device that was asked for.

    And `mixed-devices` where ranks see different kinds and none was asked for: gradients would meet on
    no common backend.
    """
    lacking = [rank for rank, one in enumerate(facts) if asked and one.kind != asked]
    if lacking:
        raise LaunchError(
            "device-unavailable",
            found=f"--device={asked}, but on {folded(hosts[rank] for rank in lacking)} torch "
            f"{facts[lacking[0]].torch_version} sees {seen(facts[lacking[0]])}",
            needed=f"a {asked} device for every rank",
            do="ask Slurm for GPUs (--gpus-per-node), install a torch for them, or leave --device away",
        )
    common, others = minority([one.kind for one in facts])
    if others:
        ranks = next(iter(others.values()))
        raise LaunchError(
            "mixed-devices",
            found=f"most ranks see {seen(facts[[one.kind for one in facts].index(common)])}, but "
            f"{folded(hosts[rank] for rank in ranks)} has {seen(facts[ranks[0]])}",
            needed="the same kind of device for every rank",
            do="ask Slurm for GPUs on every node (--gpus-per-node), or take none: --device=cpu",
        )


def devices(facts: Sequence[DeviceFacts], places: Sequence[Place], hosts: Sequence[str]) -> list[str]:
    """Return each rank's device, as torch writes it: "cuda:1", or "cpu" without an accelerator.

    A rank that sees at least as many as its node has ranks takes the one of its local rank; a rank
    that sees exactly one (Slurm gave each task its own) takes that. Raises LaunchError `too-few-gpus`.
    """
    found = []
    for one, place, host in zip(facts, places, hosts, strict=True):
        if one.kind == "cpu":
            found.append("cpu")
        elif one.count == 1 or one.count >= place.local_world_size:
            found.append(f"{one.kind}:{0 if one.count == 1 else place.local_rank}")
        else:
            raise LaunchError(
                "too-few-gpus",
                found=f"{place.local_world_size} ranks on {host}, but rank {place.rank} sees {one.count} GPUs",
                needed="one GPU for each rank of a node",
                do=f"start {one.count} ranks a node (--ntasks-per-node={one.count}), "
                f"or ask for more GPUs (--gpus-per-node={place.local_world_size})",
            )
    return found


def backend(asked: str | None, facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> str:
    """Return the job's backend: what was asked for, or torch's own for the devices.

    `asked` is a name such as "nccl", or torch's form "cpu:gloo,cuda:nccl" for one a device type.
    Raises LaunchError `backend-unavailable`.
    """
    if asked is None:
        return facts[0].default_backends.get(facts[0].kind, "gloo")
    for rank, one in enumerate(facts):
        for part in asked.lower().split(","):
            name = part.rpartition(":")[2]
            if not set(one.backends.get(name, ())) & {one.kind, "cpu"}:
                raise LaunchError(
                    "backend-unavailable",
                    found=f"backend {asked}, but rank {rank} on {hosts[rank]} has {usable(one)}",
                    needed="a backend that this torch has, for a device that every rank sees",
                    do="leave --backend away to get the devices' own, or ask for GPUs (srun --gpus-per-task=1)"
                    if name in one.backends else "leave --backend away to get the devices' own, "
                    "or install a torch with that backend",
                )
    return asked.lower()


def usable(facts: DeviceFacts) -> str:
    """Return a rank's devices and backends in words."""
    return f"{seen(facts)} and torch {facts.torch_version} with {', '.join(sorted(facts.backends))}"


def seen(facts: DeviceFacts) -> str:
    """Return a rank's devices in words."""
    return f"{facts.count} {facts.kind} device{'s' * (facts.count > 1)}" if facts.count else "no GPU"
