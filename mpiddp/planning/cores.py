"""The cores of each rank, and the number of its threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from ..base.config import Binding
from ..base.text import fold_hosts
from ..discovery.cpus import Topology
from ..discovery.host import HostFacts
from .problems import choose_advice

UNLIMITED = 1_000_000  # more CPUs than a node has


class CpuShare(NamedTuple):
    """The CPUs of its node that a rank runs on, the number of its threads, and the NUMA nodes of its CPUs."""

    cpus: frozenset[int]
    threads: int
    numa: tuple[int, ...] = (0,)


def share_cpus(facts: Sequence[HostFacts], policy: Binding = Binding.AUTO, near: Sequence[int] = ()) -> list[CpuShare]:
    """Return each rank's share of its node, in rank order.

    The `policy` AUTO keeps what the launcher gave if each rank has enough cores of its own: two, or all that there are
    for it. Otherwise (the ranks share their cores, or Open MPI bound each to one core of many) it splits the cores
    evenly. It takes no more CPUs of a node than a scheduler gave the job there. LAUNCHER always keeps what the launcher
    gave. NONE lets all ranks run on all CPUs that the node allows. Slurm's --cpus-per-task sets the number of threads,
    because the user chose it. `near` holds the NUMA node of each rank's device, -1 if unknown; it is empty if no rank
    has a device.
    """
    near = near or [-1] * len(facts)
    nodes: dict[int, list[int]] = {}
    for rank, host in enumerate(facts):
        nodes.setdefault(host.node, []).append(rank)
    shares: dict[int, CpuShare] = {}
    known: dict[tuple[object, ...], list[CpuShare]] = {}
    for ranks in nodes.values():
        node = [facts[rank] for rank in ranks]
        numa = tuple(near[rank] for rank in ranks)
        key = (node[0].topology, node[0].grant, numa,
               *((host.cpus, host.allowed, host.cpus_per_task, host.alone) for host in node))
        if key not in known:
            known[key] = share_node_cpus(node, policy, numa)
        shares.update(zip(ranks, known[key], strict=True))
    return [shares[rank] for rank in range(len(facts))]


def share_node_cpus(node: Sequence[HostFacts], policy: Binding, near: Sequence[int]) -> list[CpuShare]:
    """Return the shares of one node's ranks, in the order of their local ranks."""
    assert node[0].topology
    topology = node[0].topology
    masks = [host.allowed if policy == Binding.NONE else host.cpus for host in node]
    if policy == Binding.AUTO and not is_launcher_binding_good(node, topology):
        is_shared = ((len(node) > 1 or node[0].alone) and len(set(masks)) == 1
                     and count_cores(masks[0], topology) >= len(node))
        available = masks[0] if is_shared else merge_allowed(node)
        limit, job = find_cpu_limit(node), node[0].grant.job if node[0].grant else 0
        parts: dict[int, frozenset[int]] = {}
        for ranks, cpus in group_by_socket(available, near, limit, topology):
            part = choose_window(cpus, limit * len(ranks) // len(node), job, topology)
            parts.update(zip(ranks, split_evenly(part, len(ranks), topology), strict=True))
        masks = [parts[local] for local in range(len(node))]
    return [CpuShare(mask, count_requested_threads(host, mask, topology) or count_threads(mask, masks, topology),
                     list_numa_nodes(mask, topology))
            for host, mask in zip(node, masks, strict=True)]


def count_requested_threads(host: HostFacts, mask: frozenset[int], topology: Topology) -> int:
    """Return the number of threads that --cpus-per-task requests, 0 if it is not set.

    If Slurm counts hardware threads, and gave the rank just as many, the number is that of their cores.
    """
    requested = host.cpus_per_task or 0
    return count_cores(mask, topology) if requested == len(mask) else requested


def is_launcher_binding_good(node: Sequence[HostFacts], topology: Topology) -> bool:
    """Return whether the launcher gave each rank of a node enough cores of its own, and none of another job."""
    given = frozenset().union(*(host.cpus for host in node))
    if count_cores(given, topology) > find_cpu_limit(node):
        return False
    if node[0].alone:
        return True
    if sum(len(host.cpus) for host in node) > len(given):
        return False
    part = min(count_cores(merge_allowed(node), topology), find_cpu_limit(node)) // len(node)
    return all(
        count_cores(host.cpus, topology) >= min(2, part)
        or (host.cpus_per_task is not None and 0 < host.cpus_per_task <= len(host.cpus))
        for host in node
    )


def is_launcher_binding_kept(node: Sequence[HostFacts], policy: Binding) -> bool:
    """Return whether the ranks of a node stay on the cores that their launcher gave them."""
    assert node[0].topology
    return not node[0].alone and (
        policy == Binding.LAUNCHER or (policy == Binding.AUTO and is_launcher_binding_good(node, node[0].topology)))


def merge_allowed(node: Sequence[HostFacts]) -> frozenset[int]:
    """Return the CPUs that the ranks of a node are allowed."""
    return frozenset().union(*(host.allowed for host in node))


def find_cpu_limit(node: Sequence[HostFacts]) -> int:
    """Return how many CPUs a scheduler gave the ranks of a node, UNLIMITED if it gave all, or does not say."""
    grant = node[0].grant
    if grant is None:
        return UNLIMITED
    given = grant.cpus * len(node) if grant.each else grant.cpus
    return given if given < len(merge_allowed(node)) else UNLIMITED


def choose_window(cpus: frozenset[int], most: int, job: int, topology: Topology) -> frozenset[int]:
    """Return at most `most` of the CPUs, neighbours; the next `job` gets the next ones, if there are enough.

    They belong to as many cores as possible: a scheduler's CPU is a core on some clusters and a hardware thread on
    others, and no variable shows which.
    """
    cores = [[cpu for cpu in core if cpu in cpus] for core in topology.cores]
    ordered = [cpu for thread in zip_longest(*cores) for cpu in thread if cpu is not None]
    if most >= len(ordered):
        return cpus
    start = job % (len(ordered) // most) * most
    return frozenset(ordered[start:start + most])


def group_by_socket(
    cpus: frozenset[int], near: Sequence[int], most: int, topology: Topology
) -> list[tuple[list[int], frozenset[int]]]:
    """Return a pair for each socket: the local ranks whose devices are attached to it, and its part of the CPUs.

    Return a single pair of all ranks and all CPUs if a rank's device is near no socket, if a socket has fewer cores
    than ranks, or if there is less than one CPU (`most`) for each rank. Ranks are in the order of their devices' NUMA
    nodes.
    """
    order = sorted(range(len(near)), key=lambda local: near[local])
    sockets = topology.sockets or topology.numa
    socket_of = dict(zip(topology.numa, sockets, strict=True))
    ranks_of: dict[int | None, list[int]] = {}
    for local in order:
        ranks_of.setdefault(socket_of.get(near[local]), []).append(local)
    parts = []
    for socket, ranks in ranks_of.items():
        cores = [core for core, of_socket in zip(topology.cores, sockets, strict=True) if of_socket == socket]
        parts.append((ranks, cpus & {cpu for core in cores for cpu in core}))
    is_enough = most >= len(near) and all(count_cores(part, topology) >= len(ranks) for ranks, part in parts)
    return parts if is_enough else [(order, cpus)]


def split_evenly(cpus: frozenset[int], ranks: int, topology: Topology) -> list[frozenset[int]]:
    """Return an even part of the CPUs for each rank: whole cores, neighbours, of one NUMA node if possible.

    With more ranks than cores, hardware threads are split. With more ranks than these, each rank gets all CPUs.
    """
    units = [frozenset(core) & cpus for core in topology.cores if cpus.intersection(core)]
    if len(units) < ranks:
        units = [frozenset({cpu}) for core in topology.cores for cpu in core if cpu in cpus]
    if len(units) < ranks:
        return [cpus] * ranks
    bounds = [len(units) * rank // ranks for rank in range(ranks + 1)]
    return [frozenset().union(*units[start:end]) for start, end in pairwise(bounds)]


def count_threads(mask: frozenset[int], masks: Sequence[frozenset[int]], topology: Topology) -> int:
    """Return the number of threads for a rank: its cores, divided by the number of ranks that run on them."""
    sharers = sum(bool(mask & other) for other in masks)
    return max(1, count_cores(mask, topology) // sharers)


def list_numa_nodes(mask: frozenset[int], topology: Topology) -> tuple[int, ...]:
    """Return the NUMA nodes that CPUs belong to."""
    return tuple(sorted({node for core, node in zip(topology.cores, topology.numa, strict=True)
                         if not mask.isdisjoint(core)}))


def list_far_numa_nodes(numa: Sequence[int], topology: Topology) -> tuple[int, ...]:
    """Return the NUMA nodes that are on other sockets than those in `numa`."""
    socket_of = dict(topology.nodes) | dict(zip(topology.numa, topology.sockets or topology.numa, strict=True))
    sockets = {socket_of[node] for node in numa}
    return tuple(node for node, socket in socket_of.items() if socket not in sockets)


def count_cores(cpus: frozenset[int], topology: Topology) -> int:
    """Return the number of physical cores that CPUs belong to."""
    return sum(1 for core in topology.cores if not cpus.isdisjoint(core))


def warn_far_gpus(facts: Sequence[HostFacts], shares: Sequence[CpuShare], near: Sequence[int]) -> list[str]:
    """Return the warning `far-gpus` for nodes whose ranks run on a different socket from their devices.

    `near` holds the NUMA node of each rank's device, as in share_cpus().
    """
    topologies = {host.node: host.topology for host in facts if host.topology}
    far_ranks: Counter[int] = Counter()
    far_nodes: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}  # by the node and NUMA nodes of a rank
    for host, share, numa in zip(facts, shares, near, strict=False):
        key = host.node, share.numa
        if key not in far_nodes:
            far_nodes[key] = list_far_numa_nodes(share.numa, topologies[host.node])
        far_ranks[host.node] += numa in far_nodes[key]
    far_ranks = +far_ranks
    if not far_ranks:
        return []
    number, hosts = sum(far_ranks.values()), fold_hosts(facts[node].hostname for node in far_ranks)
    what = (f"1 rank on {hosts} runs on a different socket from its GPU" if number == 1
            else f"{number} ranks on {hosts} run on a different socket from their GPUs")
    cure = f"disable the launcher's binding{choose_advice(facts[0]).words('unbound')}"
    return [f"far-gpus: {what}; {cure}, so that mpiddp can bind ranks near their GPUs"]


def warn_crowded_cores(facts: Sequence[HostFacts], policy: Binding) -> list[str]:
    """Return the warnings `one-core` and `shared-cores` for nodes whose ranks have to take turns on a core.

    `one-core`: the node has fewer cores than ranks. `shared-cores`: the launcher bound the ranks to fewer CPUs than
    there are ranks.
    """
    nodes: dict[int, list[HostFacts]] = {}
    for host in facts:
        nodes.setdefault(host.node, []).append(host)
    lines: dict[str, list[str]] = {}  # the hosts of each line
    for node in nodes.values():
        first, ranks, line = node[0], len(node), ""
        cores = min(count_cores(merge_allowed(node), first.topology), find_cpu_limit(node)) if first.topology else ranks
        used = frozenset().union(*(host.cpus for host in node))
        if cores < ranks:
            line = (f"one-core: {ranks} ranks share {cores} core{'s' * (cores > 1)} on @; "
                    f"request more cores{choose_advice(first).words('cores')}, or start fewer ranks")
        elif policy == Binding.LAUNCHER and len(used) < ranks:
            line = (f"shared-cores: the launcher gave {ranks} ranks {len(used)} of {len(first.allowed)} CPUs on @; "
                    "make it bind them to more CPUs, or use --bind=auto")
        if line:
            lines.setdefault(line, []).append(first.hostname)
    return [line.replace("@", fold_hosts(hosts)) for line, hosts in lines.items()]
