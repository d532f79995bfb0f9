"""Where a rank sits: which ranks share a node, and the place of each in the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..base.ranks import Place
from ..discovery.gpus import Gpu


class Placement(NamedTuple):
    """Where a rank sits: its node (by number and by hostname), device, CPUs, threads, network interface and process.

    `gpu` is what is known of the device, None for a CPU. `numa` are the NUMA nodes of the CPUs.
    `interface` is empty if torch chooses it.
    """

    rank: int
    node: int
    host: str
    device: str
    gpu: Gpu | None
    cpus: frozenset[int]
    numa: tuple[int, ...]
    threads: int
    interface: str
    pid: int = 0


def locate_ranks(nodes: Sequence[Hashable]) -> list[Place]:
    """Return each rank's place from the key of the node it is on, in rank order.

    Local ranks count the ranks of a node in rank order. Node ranks count the nodes in the order of their
    lowest ranks. So uneven, cyclic and arbitrary placements all come out right.
    """
    local_world_sizes = Counter(nodes)
    node_ranks = {node: i for i, node in enumerate(local_world_sizes)}
    world_size, num_nodes = len(nodes), len(node_ranks)
    seen = dict.fromkeys(node_ranks, 0)
    found = []
    for rank, node in enumerate(nodes):
        local_rank = seen[node]
        seen[node] = local_rank + 1
        found.append(Place(rank, world_size, local_rank, local_world_sizes[node], node_ranks[node], num_nodes))
    return found
