"""Which GPU of its node each rank gets, the checks of that against what torch sees, and the job's backend."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..base.errors import LaunchError
from ..base.text import find_minority, fold_hosts
from ..discovery.devices import DeviceFacts
from ..discovery.gpus import Gpu
from .problems import NO_ADVICE, Advice, check_version

INSTALL_TORCH = "activate an environment with a torch built for these GPUs, or install one (pytorch.org/get-started)"
UPDATE_DRIVER = (
    "run nvidia-smi or rocm-smi there; update the driver, or install a torch for the version it supports;\n"
    "in a container, pass the GPUs in (apptainer --nv or --rocm, docker --gpus all)")


class RankGpus(NamedTuple):
    """The GPUs of a rank: those `visible` to it, in torch's order, and all that it may be shown (`reachable`).

    `near` are the NUMA nodes of the rank's cores, `far` those on other sockets.
    """

    rank: int
    visible: tuple[Gpu, ...]
    reachable: tuple[Gpu, ...] = ()
    near: tuple[int, ...] = ()
    far: tuple[int, ...] = ()


class GpuChoice(NamedTuple):
    """A rank's GPU, and its `ordinal` in torch.

    CUDA_VISIBLE_DEVICES has to name the UUIDs in `visible` for that; None leaves the variable as it is.
    """

    gpu: Gpu
    ordinal: int
    visible: tuple[str, ...] | None = None


def choose_gpus(
    node: Sequence[RankGpus], host: str, share: bool = False, virtual: bool = False, advice: Advice = NO_ADVICE
) -> list[GpuChoice]:
    """Return the choice for each rank of a node, in the order of local ranks.

    If all ranks see the same GPUs, local rank k gets GPU k, unless that is on another socket or NUMA node than its
    cores and another order of them is nearer. Otherwise each rank gets a GPU of its own, near its cores if possible. If
    all ranks may use all chosen GPUs, each GPU is then moved to the index of its local rank.
    `share` lets several ranks have one GPU. `virtual` shows each rank only its own GPU, at index 0.
    Raises LaunchError `too-few-gpus` or `duplicate-gpu`.
    """
    gpus = assign_node_gpus(node, host, share, advice)
    if virtual or any(gpu.is_slice for gpu in gpus):  # a process can use only one MIG instance
        return [isolate_gpu(rank, gpu) for rank, gpu in zip(node, gpus, strict=True)]
    choices = [GpuChoice(gpu, rank.visible.index(gpu)) for rank, gpu in zip(node, gpus, strict=True)]
    if (all(choice.ordinal == local for local, choice in enumerate(choices)) or len(set(gpus)) < len(gpus)
            or not all(set(gpus).issubset(rank.reachable) for rank in node)):
        return choices
    uuids = tuple(gpu.uuid for gpu in gpus)
    return [GpuChoice(gpu, local, uuids) for local, gpu in enumerate(gpus)]


def isolate_gpu(rank: RankGpus, gpu: Gpu) -> GpuChoice:
    """Return the choice of a GPU that shall be the only visible one."""
    if rank.visible == (gpu,) or gpu not in rank.reachable:
        return GpuChoice(gpu, rank.visible.index(gpu))
    return GpuChoice(gpu, 0, (gpu.uuid,))


def assign_node_gpus(node: Sequence[RankGpus], host: str, share: bool, advice: Advice) -> list[Gpu]:
    """Return a GPU for each rank of a node; raise LaunchError if there are too few."""
    first = node[0].visible
    if len(first) >= len(node) and all(rank.visible == first for rank in node):
        in_order = list(first[:len(node)])
        if count_far_gpus(node, in_order) == (0, 0) or not all(set(first).issubset(rank.reachable) for rank in node):
            return in_order
        nearest = [gpu for gpu in match_gpus(node) if gpu is not None]
        return nearest if count_far_gpus(node, nearest) < count_far_gpus(node, in_order) else in_order
    matched = match_gpus(node)
    if None in matched:
        if not share or not all(rank.visible for rank in node):
            raise make_shortage_error(node, host, advice)
        matched = [rank.visible[local % len(rank.visible)] for local, rank in enumerate(node)]
    return [gpu for gpu in matched if gpu is not None]


def count_far_gpus(node: Sequence[RankGpus], gpus: Sequence[Gpu]) -> tuple[int, int]:
    """Return how many ranks of a node have a GPU on a different socket, and how many on a different NUMA node.

    If the NUMA nodes of the GPUs or of the cores are unknown, none is far.
    """
    pairs = [(rank, gpu.numa) for rank, gpu in zip(node, gpus, strict=True) if rank.near and gpu.numa >= 0]
    return sum(numa in rank.far for rank, numa in pairs), sum(numa not in rank.near for rank, numa in pairs)


def match_gpus(node: Sequence[RankGpus]) -> list[Gpu | None]:
    """Return a GPU for each rank, None for a rank that gets none.

    Each rank gets a GPU that it sees, and no two ranks get the same one. As many ranks as possible get one on the
    socket of their cores, and of these as many as possible one on their NUMA node.
    """
    if all(len(rank.visible) == 1 for rank in node):
        only = [rank.visible[0] for rank in node]
        return [gpu if only.index(gpu) == local else None for local, gpu in enumerate(only)]
    gpus = list(dict.fromkeys(gpu for rank in node for gpu in rank.visible))
    number = {gpu: index for index, gpu in enumerate(gpus)}
    matched = match_numbers(tuple(
        tuple((number[gpu], gpu.numa in rank.far, gpu.numa in rank.near) for gpu in rank.visible) for rank in node))
    return [None if index is None else gpus[index] for index in matched]


@functools.lru_cache
def match_numbers(ranks: tuple[tuple[tuple[int, bool, bool], ...], ...]) -> list[int | None]:
    """Return the number of a GPU for each rank, None for a rank that gets none; see match_gpus().

    `ranks` has, for each rank and each GPU that it sees, the GPU's number, whether it is far from the rank's cores, and
    whether it is near. The result is cached, since the nodes of a job are mostly alike.
    """
    gpu_count = 1 + max((gpu for rank in ranks for gpu, _, _ in rank), default=-1)
    costs = [[10**12] * (gpu_count + len(ranks)) for _ in ranks]  # a further column for each rank that may get none
    for local, rank in enumerate(ranks):
        for position, (gpu, is_far, is_near) in enumerate(rank):
            order = (position - local)**2  # among equals, the order of local ranks; less than 10**6 of 100 ranks
            costs[local][gpu] = 10**9 * is_far + 10**6 * (not is_near) + order
    chosen = solve_assignment(costs)
    return [gpu if costs[local][gpu] < 10**12 else None for local, gpu in enumerate(chosen)]


def solve_assignment(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return a column for each row, no two the same, such that the sum of their costs is the least.

    There are at least as many columns as rows. The shortest augmenting paths of R. Jonker and A. Volgenant, Computing
    38 (1987), in O(rows² columns): scipy and networkx have them too, and take longer to import than a start may.
    """
    columns = len(costs[0])
    row_of = [-1] * columns
    row_prices, column_prices = [0.0] * len(costs), [0.0] * columns
    for first in range(len(costs)):
        row, nearest = first, -1
        open_columns, previous = set(range(columns)), [-1] * columns
        distance, distances = 0.0, [math.inf] * columns
        while row >= 0:
            for column in open_columns:
                further = distance + costs[row][column] - row_prices[row] - column_prices[column]
                if further < distances[column]:
                    distances[column], previous[column] = further, nearest
            nearest = min(open_columns, key=distances.__getitem__)
            distance = distances[nearest]
            open_columns.remove(nearest)
            row = row_of[nearest]
        row_prices[first] += distance
        for column in set(range(columns)) - open_columns - {nearest}:
            row_prices[row_of[column]] += distance - distances[column]
            column_prices[column] -= distance - distances[column]
        while nearest >= 0:
            row_of[nearest] = first if previous[nearest] < 0 else row_of[previous[nearest]]
            nearest = previous[nearest]
    return [row_of.index(row) for row in range(len(costs))]


def make_shortage_error(node: Sequence[RankGpus], host: str, advice: Advice) -> LaunchError:
    """Return the error for a node whose ranks cannot have a GPU each."""
    owner: dict[Gpu, int] = {}
    if len(node) > 1 and all(len(rank.visible) == 1 for rank in node):
        for rank in node:
            other = owner.setdefault(rank.visible[0], rank.rank)
            if other != rank.rank:
                return make_duplicate_error(other, rank.rank, rank.visible[0], host, advice)
    count = len({gpu for rank in node for gpu in rank.visible})
    return LaunchError(
        "too-few-gpus",
        actual=f"{len(node)} ranks, but {count} GPU{'s' * (count != 1)} visible on {host}",
        needed="one GPU for each rank of a node",
        do=f"start only as many ranks per node as it has GPUs{advice.words('ranks_per_node', max(1, count))}, "
        f"or ask for more{advice.words('gpus', len(node))};\n"
        "--share-gpus lets ranks share a GPU, with gloo; --device=cpu uses none",
    )


def make_duplicate_error(rank: int, other: int, gpu: Gpu, host: str, advice: Advice) -> LaunchError:
    """Return the error for two ranks that see the same GPU and no other."""
    return LaunchError(
        "duplicate-gpu",
        actual=f"ranks {rank} and {other} on {host} both see only GPU {gpu.uuid}",
        needed="a different GPU for each rank",
        do=f"show every rank all GPUs of its node{advice.words('all_gpus')}, "
        f"or only its own{advice.words('own_gpu')};\n"
        "check for a CUDA_VISIBLE_DEVICES that is the same on all ranks;\n"
        "--share-gpus lets ranks share a GPU, with gloo",
    )


def has_shared_gpu(choices: Iterable[GpuChoice]) -> bool:
    """Return whether a GPU is chosen for more than one rank."""
    uuids = [choice.gpu.uuid for choice in choices]
    return len(set(uuids)) < len(uuids)


def warn_isolated_gpus(ranks: Iterable[tuple[str, bool]], advice: Advice = NO_ADVICE) -> list[str]:
    """Return the warning `isolated-gpus` if a rank's device is not cuda:LOCAL_RANK.

    `ranks` holds for each rank its host, and True if its device is another one.
    """
    hosts = {host for host, is_other in ranks if is_other}
    if not hosts:
        return []
    line = (f"isolated-gpus: on {fold_hosts(hosts)} each rank sees only some of its node's GPUs: its device is not "
            "cuda:LOCAL_RANK, and peer access between GPUs may fail; make the launcher show all GPUs of a node to "
            f"every rank{advice.words('all_gpus')}, or, if the script uses LOCAL_RANK as the device number, add "
            "--virtual-local-rank (sets LOCAL_RANK=0)")
    return [line]


def distinguish_gpus(node: Sequence[Sequence[Gpu]], host: str, first: int) -> list[tuple[Gpu, ...]]:
    """Return the GPUs that each rank of a node sees, each GPU with a UUID of its own; `first` is the first rank.

    Some drivers report no UUID, or the same one for several GPUs. Then a GPU is named by its PCI address, and without
    one by its index: if a rank sees only one such GPU, no other rank is assumed to have it, and if ranks see several,
    these are assumed to be the same for all.
    """
    if is_unambiguous([[(gpu.uuid, gpu.pci) for gpu in gpus] for gpus in node]):
        return [tuple(gpus) for gpus in node]
    by_pci = is_unambiguous([[(gpu.pci, gpu.pci) for gpu in gpus] for gpus in node])
    renamed = []
    for rank, gpus in enumerate(node, start=first):
        labels = [f"rank {rank}'s"] if len(gpus) == 1 else [f"number {index}" for index in range(len(gpus))]
        names = [f"{host}, {gpu.pci if by_pci else label}" for gpu, label in zip(gpus, labels, strict=True)]
        renamed.append(tuple(gpu._replace(uuid=name, board=name) for gpu, name in zip(gpus, names, strict=True)))
    return renamed


def is_unambiguous(node: Sequence[Sequence[tuple[str, str]]]) -> bool:
    """Return whether each name of a GPU, paired with its PCI address, is there and of one GPU."""
    pairs = {pair for gpus in node for pair in gpus}
    return len({name for name, _ in pairs} - {""}) == len(pairs) and all(len(set(gpus)) == len(gpus) for gpus in node)


def check_torch(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> None:
    """Raise LaunchError `torch-unusable` if a rank cannot import torch, `version-skew` if versions differ."""
    failed = [rank for rank, devices in enumerate(facts) if devices.error]
    if failed:
        raise LaunchError(
            "torch-unusable",
            actual=f"{facts[failed[0]].error} (on {fold_hosts(hosts[rank] for rank in failed)})",
            needed="a torch that every rank can import",
            do="run `python -c 'import torch.distributed'` there, in the same environment",
        )
    check_version("torch", [devices.torch_version for devices in facts], hosts)
    check_version("NCCL", [devices.nccl_version for devices in facts], hosts)


def check_device_kinds(
    requested: str | None, facts: Sequence[DeviceFacts], hosts: Sequence[str], advice: Advice = NO_ADVICE
) -> None:
    """Raise LaunchError `device-unavailable` if a rank lacks the kind of device that was requested.

    Raise `mixed-devices` if the user requested no kind and ranks see different ones: these have no backend in common
    for their gradients.
    """
    lacking = [rank for rank, devices in enumerate(facts) if requested and devices.kind != requested]
    if lacking:
        raise LaunchError(
            "device-unavailable",
            actual=f"--device={requested}, but on {fold_hosts(hosts[rank] for rank in lacking)} torch "
            f"{facts[lacking[0]].torch_version} sees {describe_devices(facts[lacking[0]])}",
            needed=f"a {requested} device for every rank",
            do=f"ask for GPUs{advice.words('gpus')}, install a torch for them, or omit --device",
        )
    kinds = [devices.kind for devices in facts]
    common, others = find_minority(kinds)
    if others:
        ranks = next(iter(others.values()))
        raise LaunchError(
            "mixed-devices",
            actual=f"most ranks see {describe_devices(facts[kinds.index(common)])}, but "
            f"{fold_hosts(hosts[rank] for rank in ranks)} has {describe_devices(facts[ranks[0]])}",
            needed="the same kind of device for every rank",
            do=f"ask for GPUs on every node{advice.words('gpus')}, or use none: --device=cpu",
        )


def check_unseen_gpus(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> None:
    """Raise LaunchError `no-gpu-seen` if torch sees no GPU on any rank although there is evidence of some."""
    blind = [rank for rank, devices in enumerate(facts) if devices.unseen]
    if not blind or any(devices.gpus for devices in facts):
        return
    first = facts[blind[0]]
    assert first.unseen
    given, built_for, reason, driver = first.unseen
    build = f"torch {first.torch_version}, built for {built_for or 'CPUs only'},"
    raise LaunchError(
        "no-gpu-seen",
        actual=f"{given} on {fold_hosts(hosts[rank] for rank in blind)}, but {build} sees no GPU"
        + f"\ntorch reports: {reason}" * bool(reason) + f"\ndriver: {driver}" * bool(driver),
        needed="a torch that sees these GPUs",
        do=f"{UPDATE_DRIVER if built_for else INSTALL_TORCH};\n--device=cpu trains on the CPU",
    )


def warn_unlimited_stack(facts: Sequence[DeviceFacts], hosts: Sequence[str]) -> list[str]:
    """Return the warning `unlimited-stack` if NCCL's threads have small stacks because there is no limit.

    GNU libc gives threads 2 MiB then (man pthread_create), too little for NCCL's search of a large NVLink network. NCCL
    2.28 and newer choose the size themselves (NCCL User Guide, "Stack size"; NVIDIA/nccl#2186).
    """
    ranks = [rank for rank, devices in enumerate(facts) if devices.unlimited_stack and is_stack_too_small(devices)]
    if not ranks:
        return []
    hostnames, version = fold_hosts(hosts[rank] for rank in ranks), facts[ranks[0]].nccl_version
    crash = f"NCCL {version} may then crash on large NVLink systems such as GB200"
    return [f"unlimited-stack: ulimit -s is unlimited on {hostnames}; {crash}; set ulimit -s 8192"]


def is_stack_too_small(facts: DeviceFacts) -> bool:
    """Return whether a rank has an NVIDIA GPU and an NCCL that leaves the size of its threads' stacks to GNU libc."""
    version = tuple(int(part) for part in facts.nccl_version.split(".") if part.isdigit())
    return bool(version) and version < (2, 28) and any(not gpu.name.startswith("AMD") for gpu in facts.gpus)


def check_gpu_index(
    choice: GpuChoice, facts: DeviceFacts, rank: int, host: str, virtual: bool, pre_torch: bool, advice: Advice
) -> None:
    """Raise LaunchError `device-unavailable` if torch does not see a rank's GPU at the index planned for it.

    `virtual`: the user requested index 0. `pre_torch`: the GPU was chosen before torch listed any.
    """
    actual = facts.gpus[choice.ordinal] if choice.ordinal < len(facts.gpus) else None
    planned = normalize_uuid(choice.gpu.uuid), normalize_uuid(choice.gpu.board)
    if actual is None or (pre_torch and actual.uuid and normalize_uuid(actual.uuid) not in planned):
        raise LaunchError(
            "device-unavailable",
            actual=f"{choice.gpu.uuid} was chosen for rank {rank} on {host}, but torch sees "
            f"{actual.uuid if actual else 'nothing'} at {facts.kind}:{choice.ordinal}",
            needed="a torch that sees the GPUs named in CUDA_VISIBLE_DEVICES",
            do="find out what sets CUDA_VISIBLE_DEVICES, or starts CUDA, before mpiddp does",
        )
    if virtual and choice.ordinal:
        raise LaunchError(
            "device-unavailable",
            actual=f"--virtual-local-rank, but rank {rank} on {host} sees {len(facts.gpus)} GPUs and cannot hide any",
            needed="NVML, which reports a GPU's UUID before CUDA starts, or only one GPU visible to each rank",
            do=f"pip install nvidia-ml-py, or show each rank only its own GPU{advice.words('own_gpu')}",
        )


def normalize_uuid(uuid: str) -> str:
    """Return a UUID in lower case, without the prefix of NVIDIA's tools."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def choose_backend(
    requested: str | None, facts: Sequence[DeviceFacts], hosts: Sequence[str], shared: bool = False,
    advice: Advice = NO_ADVICE,
) -> str:
    """Return the job's backend: the requested one, or torch's own for the devices.

    `requested` is a name such as "nccl", or torch's form "cpu:gloo,cuda:nccl" with one for each device type. If ranks
    share a device, the default is gloo: NCCL takes only one rank for each GPU. Raises LaunchError
    `backend-unavailable`.
    """
    if shared and "nccl" in (requested or "").lower():
        raise LaunchError(
            "backend-unavailable",
            actual=f"--backend={requested}, but with --share-gpus several ranks share a GPU",
            needed="gloo, or a GPU for each rank: NCCL allows only one rank per GPU",
            do="omit --backend, or start fewer ranks",
        )
    if requested is None:
        return "gloo" if shared else facts[0].default_backends.get(facts[0].kind, "gloo")
    for rank, devices in enumerate(facts):
        for part in requested.lower().split(","):
            name = part.rpartition(":")[2]
            if not set(devices.backends.get(name, ())) & {devices.kind, "cpu"}:
                has = (f"{describe_devices(devices)} and torch {devices.torch_version} (backends: "
                       f"{', '.join(sorted(devices.backends))})")
                raise LaunchError(
                    "backend-unavailable",
                    actual=f"backend {requested}, but rank {rank} on {hosts[rank]} has {has}",
                    needed="a backend that this torch has, for a device that every rank sees",
                    do="omit --backend to use the default, or " + (
                        f"ask for GPUs{advice.words('gpus')}" if name in devices.backends
                        else "install a torch with that backend"),
                )
    return requested.lower()


def describe_devices(facts: DeviceFacts) -> str:
    """Return a rank's devices in words."""
    count = len(facts.gpus)
    return f"{count} {facts.kind} device{'s' * (count > 1)}" if count else "no GPU"
