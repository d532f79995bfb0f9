"""Which GPU of its node each rank gets, and how a script finds it at cuda:LOCAL_RANK."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..errors import LaunchError
from ..facts.gpus import Gpu
from .words import folded


class Sight(NamedTuple):
    """The GPUs of a rank: `seen` are those that it sees, in torch's order, `reachable` those that it may be shown.

    `near` are the NUMA nodes of the rank's cores.
    """

    rank: int
    seen: tuple[Gpu, ...]
    reachable: tuple[Gpu, ...] = ()
    near: tuple[int, ...] = ()


class Choice(NamedTuple):
    """A rank's GPU; `ordinal` is the GPU's index in torch.

    `visible` are the UUIDs that CUDA_VISIBLE_DEVICES must name for this; None leaves that variable as it is.
    """

    gpu: Gpu
    ordinal: int
    visible: tuple[str, ...] | None = None


def choose(node: Sequence[Sight], host: str, share: bool = False, virtual: bool = False) -> list[Choice]:
    """Return the choice for each rank of a node, in the order of local ranks.

    If all ranks see the same GPUs, local rank k gets GPU k. Otherwise each rank gets a GPU that no other
    rank gets, on a NUMA node of its cores if possible. If all ranks may use all chosen GPUs, each GPU is then
    moved to the index of its local rank. `share` lets several ranks have one GPU. `virtual` shows each
    rank only its own GPU, at index 0.
    Raises LaunchError `too-few-gpus` or `duplicate-gpu`.
    """
    taken = assign(node, host, share)
    if virtual or any(gpu.is_slice for gpu in taken):  # a process can use only one MIG instance
        return [alone(sight, gpu) for sight, gpu in zip(node, taken, strict=True)]
    found = [Choice(gpu, sight.seen.index(gpu)) for sight, gpu in zip(node, taken, strict=True)]
    wanted = set(taken)
    if (all(one.ordinal == local for local, one in enumerate(found)) or len(wanted) < len(taken)
            or not all(wanted.issubset(sight.reachable) for sight in node)):
        return found
    union = tuple(gpu.uuid for gpu in taken)
    return [Choice(gpu, local, union) for local, gpu in enumerate(taken)]


def alone(sight: Sight, gpu: Gpu) -> Choice:
    """Return the choice of a GPU that shall be the only one its rank sees."""
    if sight.seen == (gpu,) or gpu not in sight.reachable:
        return Choice(gpu, sight.seen.index(gpu))
    return Choice(gpu, 0, (gpu.uuid,))


def assign(node: Sequence[Sight], host: str, share: bool) -> list[Gpu]:
    """Return a GPU for each rank of a node; raise LaunchError if there are too few."""
    first = node[0].seen
    if len(first) >= len(node) and all(sight.seen == first for sight in node):
        return list(first[:len(node)])
    found = match(node)
    if None in found:
        if not share or not all(sight.seen for sight in node):
            raise refusal(node, host)
        found = [sight.seen[local % len(sight.seen)] for local, sight in enumerate(node)]
    return [one for one in found if one is not None]


def match(node: Sequence[Sight]) -> list[Gpu | None]:
    """Return a GPU for each rank, None for a rank that gets none.

    Each rank gets a GPU that it sees, and no two ranks get the same one. As many ranks as possible get a GPU
    near their cores.
    """
    if all(len(sight.seen) == 1 for sight in node):
        only = [sight.seen[0] for sight in node]
        return [gpu if only.index(gpu) == local else None for local, gpu in enumerate(only)]
    import networkx  # heavy and seldom needed; torch depends on it, too

    graph = networkx.Graph()
    for local, sight in enumerate(node):
        for at, gpu in enumerate(sight.seen):
            far = gpu.numa >= 0 and bool(sight.near) and gpu.numa not in sight.near
            order = (at - local)**2  # among equals, the order of local ranks
            graph.add_edge(local, gpu, weight=10_000 * (1 - far) - order)
    pairs = dict(networkx.max_weight_matching(graph, maxcardinality=True))
    pairs |= {second: first for first, second in pairs.items()}
    return [pairs.get(local) for local in range(len(node))]


def refusal(node: Sequence[Sight], host: str) -> LaunchError:
    """Return the error for a node whose ranks cannot have a GPU each."""
    owner: dict[Gpu, int] = {}
    if len(node) > 1 and all(len(sight.seen) == 1 for sight in node):
        for sight in node:
            other = owner.setdefault(sight.seen[0], sight.rank)
            if other != sight.rank:
                return duplicate(other, sight.rank, sight.seen[0], host)
    union = {gpu for sight in node for gpu in sight.seen}
    return LaunchError(
        "too-few-gpus",
        found=f"{len(node)} ranks on {host}, which see {len(union)} GPU{'s' * (len(union) != 1)}",
        needed="one GPU for each rank of a node",
        do=f"start as many ranks a node as it has GPUs (--ntasks-per-node={max(1, len(union))}), "
        f"or ask for more (--gpus-per-node={len(node)});\n"
        "--share-gpus lets ranks share one, with gloo",
    )


def duplicate(rank: int, other: int, gpu: Gpu, host: str) -> LaunchError:
    """Return the error for two ranks that see the same GPU and no other."""
    return LaunchError(
        "duplicate-gpu",
        found=f"ranks {rank} and {other} on {host} both see only the GPU {gpu.uuid}",
        needed="a GPU of its own for each rank",
        do="srun --gpus-per-node=N --gpu-bind=none shows every rank all GPUs, --gpus-per-task=1 each its own;\n"
        "look at --gpu-bind and for a CUDA_VISIBLE_DEVICES that is the same for all; --share-gpus lets ranks\n"
        "share one, with gloo",
    )


def are_shared(choices: Iterable[Choice]) -> bool:
    """Tell whether a GPU is chosen for more than one rank."""
    uuids = [choice.gpu.uuid for choice in choices]
    return len(set(uuids)) < len(uuids)


def warnings(ranks: Iterable[tuple[str, bool]]) -> list[str]:
    """Return the warning `isolated-gpus` if a rank's device is not cuda:LOCAL_RANK.

    `ranks` holds for each rank its host, and True if its device is another one.
    """
    away = {host for host, elsewhere in ranks if elsewhere}
    line = ("isolated-gpus: on @ ranks are shown only some GPUs each, so that a rank's device is not cuda:LOCAL_RANK "
            "and peer access may be lost; srun --gpu-bind=none shows all, --virtual-local-rank sets LOCAL_RANK=0 "
            "for scripts that go by it")
    return [line.replace("@", folded(away))] if away else []


def told_apart(gpus: Sequence[Gpu], host: str, rank: int) -> tuple[Gpu, ...]:
    """Return GPUs with a UUID each; a name is made up for a GPU whose UUID torch does not tell.

    If a rank sees only one such GPU, no other rank is taken to have it. If a rank sees several, they are taken to
    be the same ones for all ranks of the host.
    """
    names = [f"{host}, rank {rank}'s"] if len(gpus) == 1 else [f"{host}, number {at}" for at in range(len(gpus))]
    return tuple(gpu if gpu.uuid else gpu._replace(uuid=name, board=name)
                 for gpu, name in zip(gpus, names, strict=True))
