"""Which GPU of its node each rank gets, and how a script finds it at cuda:LOCAL_RANK."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..base.errors import LaunchError
from ..base.text import folded
from ..discovery.gpus import Gpu
from .advice import NO_ADVICE, Advice


class RankGpus(NamedTuple):
    """The GPUs of a rank: `seen` are those that it sees, in torch's order, `reachable` those that it may be shown.

    `near` are the NUMA nodes of the rank's cores, `away` those on other sockets.
    """

    rank: int
    seen: tuple[Gpu, ...]
    reachable: tuple[Gpu, ...] = ()
    near: tuple[int, ...] = ()
    away: tuple[int, ...] = ()


class GpuChoice(NamedTuple):
    """A rank's GPU; `ordinal` is the GPU's index in torch.

    `visible` are the UUIDs that CUDA_VISIBLE_DEVICES must name for this; None leaves that variable as it is.
    """

    gpu: Gpu
    ordinal: int
    visible: tuple[str, ...] | None = None


def choose_gpus(
    node: Sequence[RankGpus], host: str, share: bool = False, virtual: bool = False, advice: Advice = NO_ADVICE
) -> list[GpuChoice]:
    """Return the choice for each rank of a node, in the order of local ranks.

    If all ranks see the same GPUs, local rank k gets GPU k, unless that is on another socket or NUMA node than its
    cores and another order of them is nearer. Otherwise each rank gets a GPU that no other rank gets, near its cores
    if possible. If all ranks may use all chosen GPUs, each GPU is then moved to the index of its local rank.
    `share` lets several ranks have one GPU. `virtual` shows each rank only its own GPU, at index 0.
    Raises LaunchError `too-few-gpus` or `duplicate-gpu`.
    """
    taken = assign_node_gpus(node, host, share, advice)
    if virtual or any(gpu.is_slice for gpu in taken):  # a process can use only one MIG instance
        return [isolate_gpu(sight, gpu) for sight, gpu in zip(node, taken, strict=True)]
    found = [GpuChoice(gpu, sight.seen.index(gpu)) for sight, gpu in zip(node, taken, strict=True)]
    wanted = set(taken)
    if (all(one.ordinal == local for local, one in enumerate(found)) or len(wanted) < len(taken)
            or not all(wanted.issubset(sight.reachable) for sight in node)):
        return found
    union = tuple(gpu.uuid for gpu in taken)
    return [GpuChoice(gpu, local, union) for local, gpu in enumerate(taken)]


def isolate_gpu(sight: RankGpus, gpu: Gpu) -> GpuChoice:
    """Return the choice of a GPU that shall be the only one its rank sees."""
    if sight.seen == (gpu,) or gpu not in sight.reachable:
        return GpuChoice(gpu, sight.seen.index(gpu))
    return GpuChoice(gpu, 0, (gpu.uuid,))


def assign_node_gpus(node: Sequence[RankGpus], host: str, share: bool, advice: Advice) -> list[Gpu]:
    """Return a GPU for each rank of a node; raise LaunchError if there are too few."""
    first = node[0].seen
    if len(first) >= len(node) and all(sight.seen == first for sight in node):
        straight = list(first[:len(node)])
        if count_far_gpus(node, straight) == (0, 0) or not all(set(first).issubset(sight.reachable) for sight in node):
            return straight
        nearest = [one for one in match_gpus(node) if one is not None]
        return nearest if count_far_gpus(node, nearest) < count_far_gpus(node, straight) else straight
    found = match_gpus(node)
    if None in found:
        if not share or not all(sight.seen for sight in node):
            raise make_shortage_error(node, host, advice)
        found = [sight.seen[local % len(sight.seen)] for local, sight in enumerate(node)]
    return [one for one in found if one is not None]


def count_far_gpus(node: Sequence[RankGpus], taken: Sequence[Gpu]) -> tuple[int, int]:
    """Return how many ranks of a node have a GPU on another socket than their cores, and how many on another NUMA node.

    Where the NUMA nodes of the GPUs or of the cores are not known, none is far.
    """
    pairs = [(sight, gpu.numa) for sight, gpu in zip(node, taken, strict=True) if sight.near and gpu.numa >= 0]
    return sum(numa in sight.away for sight, numa in pairs), sum(numa not in sight.near for sight, numa in pairs)


def match_gpus(node: Sequence[RankGpus]) -> list[Gpu | None]:
    """Return a GPU for each rank, None for a rank that gets none.

    Each rank gets a GPU that it sees, and no two ranks get the same one. As many ranks as possible get one on the
    socket of their cores, and of these as many as possible one on their NUMA node.
    """
    if all(len(sight.seen) == 1 for sight in node):
        only = [sight.seen[0] for sight in node]
        return [gpu if only.index(gpu) == local else None for local, gpu in enumerate(only)]
    all_gpus = list(dict.fromkeys(gpu for sight in node for gpu in sight.seen))
    number = {gpu: at for at, gpu in enumerate(all_gpus)}
    found = match_numbers(tuple(
        tuple((number[gpu], gpu.numa in sight.away, gpu.numa in sight.near) for gpu in sight.seen) for sight in node))
    return [None if at is None else all_gpus[at] for at in found]


@functools.lru_cache
def match_numbers(sights: tuple[tuple[tuple[int, bool, bool], ...], ...]) -> list[int | None]:
    """Return the number of a GPU for each rank, None for a rank that gets none, as match() says.

    `sights` has, for each rank, of each GPU that it sees the number, and whether that is away from its cores and near
    them. The nodes of a job are mostly alike.
    """
    gpus = 1 + max((gpu for sight in sights for gpu, _, _ in sight), default=-1)
    costs = [[10**12] * (gpus + len(sights)) for _ in sights]  # a column more for each rank that may get none
    for local, sight in enumerate(sights):
        for at, (gpu, is_away, is_near) in enumerate(sight):
            order = (at - local)**2  # among equals, the order of local ranks; less than 10**6 of 100 ranks
            costs[local][gpu] = 10**9 * is_away + 10**6 * (not is_near) + order
    chosen = solve_assignment(costs)
    return [gpu if costs[local][gpu] < 10**12 else None for local, gpu in enumerate(chosen)]


def solve_assignment(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return a column for each row, no two the same, such that the sum of their costs is the least.

    There are at least as many columns as rows. The shortest augmenting paths of R. Jonker and A. Volgenant, Computing
    38 (1987), in O(rows² columns): scipy and networkx have them, too, and take longer to import than a start may.
    """
    columns = len(costs[0])
    row_of = [-1] * columns
    row_prices, column_prices = [0.0] * len(costs), [0.0] * columns
    for first in range(len(costs)):
        row, at = first, -1
        open_columns, way = set(range(columns)), [-1] * columns
        distance, distances = 0.0, [math.inf] * columns
        while row >= 0:
            for column in open_columns:
                further = distance + costs[row][column] - row_prices[row] - column_prices[column]
                if further < distances[column]:
                    distances[column], way[column] = further, at
            at = min(open_columns, key=distances.__getitem__)
            distance = distances[at]
            open_columns.remove(at)
            row = row_of[at]
        row_prices[first] += distance
        for column in set(range(columns)) - open_columns - {at}:
            row_prices[row_of[column]] += distance - distances[column]
            column_prices[column] -= distance - distances[column]
        while at >= 0:
            row_of[at] = first if way[at] < 0 else row_of[way[at]]
            at = way[at]
    return [row_of.index(row) for row in range(len(costs))]


def make_shortage_error(node: Sequence[RankGpus], host: str, advice: Advice) -> LaunchError:
    """Return the error for a node whose ranks cannot have a GPU each."""
    owner: dict[Gpu, int] = {}
    if len(node) > 1 and all(len(sight.seen) == 1 for sight in node):
        for sight in node:
            other = owner.setdefault(sight.seen[0], sight.rank)
            if other != sight.rank:
                return make_duplicate_error(other, sight.rank, sight.seen[0], host, advice)
    union = {gpu for sight in node for gpu in sight.seen}
    return LaunchError(
        "too-few-gpus",
        found=f"{len(node)} ranks on {host}, which see {len(union)} GPU{'s' * (len(union) != 1)}",
        needed="one GPU for each rank of a node",
        do=f"start as many ranks a node as it has GPUs{advice.words('ranks_per_node', max(1, len(union)))}, "
        f"or ask for more{advice.words('gpus', len(node))};\n"
        "--share-gpus lets ranks share one, with gloo",
    )


def make_duplicate_error(rank: int, other: int, gpu: Gpu, host: str, advice: Advice) -> LaunchError:
    """Return the error for two ranks that see the same GPU and no other."""
    return LaunchError(
        "duplicate-gpu",
        found=f"ranks {rank} and {other} on {host} both see only the GPU {gpu.uuid}",
        needed="a GPU of its own for each rank",
        do=f"show every rank all GPUs of its node{advice.words('all_gpus')}, "
        f"or each its own{advice.words('own_gpu')};\n"
        "look for a CUDA_VISIBLE_DEVICES that is the same for all; --share-gpus lets ranks share one, with gloo",
    )


def has_shared_gpu(choices: Iterable[GpuChoice]) -> bool:
    """Tell whether a GPU is chosen for more than one rank."""
    uuids = [choice.gpu.uuid for choice in choices]
    return len(set(uuids)) < len(uuids)


def warn_isolated_gpus(ranks: Iterable[tuple[str, bool]], advice: Advice = NO_ADVICE) -> list[str]:
    """Return the warning `isolated-gpus` if a rank's device is not cuda:LOCAL_RANK.

    `ranks` holds for each rank its host, and True if its device is another one.
    """
    away = {host for host, elsewhere in ranks if elsewhere}
    line = ("isolated-gpus: on @ ranks are shown only some GPUs each, so that a rank's device is not cuda:LOCAL_RANK "
            f"and peer access may be lost; let the launcher show all GPUs of a node to all{advice.words('all_gpus')}, "
            "or take --virtual-local-rank, which sets LOCAL_RANK=0, for scripts that go by it")
    return [line.replace("@", folded(away))] if away else []


def distinguish_gpus(node: Sequence[Sequence[Gpu]], host: str, first: int) -> list[tuple[Gpu, ...]]:
    """Return the GPUs that each rank of a node sees, with a UUID each by which they differ; `first` is its first rank.

    Some drivers tell no UUID, or the same one for several GPUs. Then a GPU is known by its PCI address, and without
    one by its index: if a rank sees only one such GPU, no other rank is taken to have it, and if ranks see several,
    those are taken to be the same ones for all.
    """
    by_uuid = is_unambiguous([[(gpu.uuid, gpu.pci) for gpu in seen] for seen in node])
    by_pci = is_unambiguous([[(gpu.pci, gpu.pci) for gpu in seen] for seen in node])
    if by_uuid:
        return [tuple(seen) for seen in node]
    found = []
    for rank, seen in enumerate(node, start=first):
        at = [f"rank {rank}'s"] if len(seen) == 1 else [f"number {index}" for index in range(len(seen))]
        names = [f"{host}, {gpu.pci if by_pci else name}" for gpu, name in zip(seen, at, strict=True)]
        found.append(tuple(gpu._replace(uuid=name, board=name) for gpu, name in zip(seen, names, strict=True)))
    return found


def is_unambiguous(node: Sequence[Sequence[tuple[str, str]]]) -> bool:
    """Tell whether the names of GPUs, each with its PCI address, tell them apart: none is empty, or of two GPUs."""
    pairs = {pair for seen in node for pair in seen}
    return len({name for name, _ in pairs} - {""}) == len(pairs) and all(len(set(seen)) == len(seen) for seen in node)
