"""The cores of each rank, and how many threads it shall use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ..facts.cpus import Topology
from ..facts.host import HostFacts
from .words import folded

AUTO, NONE, LAUNCHER = "auto", "none", "launcher"


class Share(NamedTuple):
    """What a rank gets of its node: the CPUs that it runs on, the number of its threads, the NUMA nodes of its CPUs."""

    cpus: frozenset[int]
    threads: int
    numa: tuple[int, ...] = (0,)


def shares(facts: Sequence[HostFacts], policy: str = AUTO, near: Sequence[int] = ()) -> list[Share]:
    """Return each rank's share of its node, in rank order.

    `policy` AUTO keeps what the launcher gave where each rank has cores of its own, more than one or
    all that there are for it; ranks that share their cores, or were bound to a single one of many as
    Open MPI does, split them evenly. LAUNCHER keeps what the launcher gave in any case, NONE lets all
    ranks run on all that the node allows. Slurm's --cpus-per-task is a number of threads that the user
    chosen. `near` has the NUMA node of each rank's device, -1 for none, and is empty where no rank has one.
    """
    near = near or [-1] * len(facts)
    nodes: dict[int, list[int]] = {}
    for rank, one in enumerate(facts):
        nodes.setdefault(one.node, []).append(rank)
    found: dict[int, Share] = {}
    alike: dict[tuple[object, ...], list[Share]] = {}
    for ranks in nodes.values():
        node = [facts[rank] for rank in ranks]
        numa = tuple(near[rank] for rank in ranks)
        key = (node[0].topology, numa, *((one.cpus, one.allowed, one.cpus_per_task, one.alone) for one in node))
        if key not in alike:
            alike[key] = of_node(node, policy, numa)
        found.update(zip(ranks, alike[key], strict=True))
    return [found[rank] for rank in range(len(facts))]


def of_node(node: Sequence[HostFacts], policy: str, near: Sequence[int]) -> list[Share]:
    """Return the shares of one node's ranks, in the order of their local ranks.

    Parts of the node go to ranks in the order of their devices' NUMA nodes.
    """
    assert node[0].topology
    topology = node[0].topology
    masks = [one.allowed if policy == NONE else one.cpus for one in node]
    if policy == AUTO and not is_kept(node, topology):
        alike = len(node) > 1 and len(set(masks)) == 1 and cores_in(masks[0], topology) >= len(node)
        together = masks[0] if alike else frozenset().union(*(one.allowed for one in node))
        order = sorted(range(len(node)), key=lambda local: near[local])
        parts = dict(zip(order, split(together, len(node), topology), strict=True))
        masks = [parts[local] for local in range(len(node))]
    return [Share(mask, one.cpus_per_task or threads(mask, masks, topology), numa_of(mask, topology))
            for one, mask in zip(node, masks, strict=True)]


def is_kept(node: Sequence[HostFacts], topology: Topology) -> bool:
    """Tell whether the launcher gave each rank of a node cores of its own, and enough of them."""
    if node[0].alone:
        return True
    if sum(len(one.cpus) for one in node) > len(frozenset().union(*(one.cpus for one in node))):
        return False
    part = cores_in(frozenset().union(*(one.allowed for one in node)), topology) // len(node)
    return all(
        cores_in(one.cpus, topology) >= min(2, part) or len(one.cpus) >= (one.cpus_per_task or len(one.cpus) + 1)
        for one in node
    )


def split(cpus: frozenset[int], ranks: int, topology: Topology) -> list[frozenset[int]]:
    """Return even parts of CPUs, one for each rank: whole cores, neighbours, of one NUMA node where that goes.

    With more ranks than cores, hardware threads are split; with more ranks than those, all share all.
    """
    units = [frozenset(core) & cpus for core in topology.cores if cpus.intersection(core)]
    if len(units) < ranks:
        units = [frozenset({cpu}) for core in topology.cores for cpu in core if cpu in cpus]
    if len(units) < ranks:
        return [cpus] * ranks
    bounds = [len(units) * rank // ranks for rank in range(ranks + 1)]
    return [frozenset().union(*units[start:end]) for start, end in pairwise(bounds)]


def threads(mask: frozenset[int], masks: Sequence[frozenset[int]], topology: Topology) -> int:
    """Return the number of threads for a rank: its cores, divided among the ranks that run on them too."""
    sharers = sum(bool(mask & other) for other in masks)
    return max(1, cores_in(mask, topology) // sharers)


def numa_of(mask: frozenset[int], topology: Topology) -> tuple[int, ...]:
    """Return the NUMA nodes that CPUs belong to."""
    return tuple(sorted({node for core, node in zip(topology.cores, topology.numa, strict=True)
                         if not mask.isdisjoint(core)}))


def cores_in(cpus: frozenset[int], topology: Topology) -> int:
    """Return the number of physical cores that CPUs belong to."""
    return sum(1 for core in topology.cores if not cpus.isdisjoint(core))


def warnings(facts: Sequence[HostFacts], policy: str) -> list[str]:
    """Return the warnings `one-core` and `shared-cores` where ranks of a node have to take turns on a core.

    The first is for nodes that have fewer cores than ranks, the second for a launcher that uses fewer.
    """
    ranks: dict[int, int] = {}
    used: dict[int, set[int]] = {}
    for one in facts:
        ranks[one.node] = ranks.get(one.node, 0) + 1
        used.setdefault(one.node, set()).update(one.cpus)
    found: dict[str, list[HostFacts]] = {}
    for one in facts:
        if one.topology and len(one.topology.cores) < ranks[one.node]:
            found.setdefault(f"one-core: {ranks[one.node]} ranks have {len(one.topology.cores)} cores on @; "
                             "ask for more (--cpus-per-task), or start fewer ranks", []).append(one)
        elif one.topology and policy == LAUNCHER and len(used[one.node]) < ranks[one.node]:
            found.setdefault(f"shared-cores: {ranks[one.node]} ranks were given {len(used[one.node])} of "
                             f"{len(one.allowed)} CPUs on @; let the launcher bind them to more, or leave it to "
                             "--bind=auto", []).append(one)
    return [line.replace("@", folded(one.hostname for one in some)) for line, some in found.items()]
