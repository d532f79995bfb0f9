"""The cores of this node: which a rank may run on, and how they belong together."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import NamedTuple

CPUS, NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"


class Topology(NamedTuple):
    """How a node's CPUs (hardware threads, as Linux counts them) belong together.

    `cores` are the physical cores, each with its CPUs, those of one NUMA node after the other;
    `numa` says of each core the number of its NUMA node.
    """

    cores: tuple[tuple[int, ...], ...]
    numa: tuple[int, ...]


def allowed() -> frozenset[int]:
    """Return the CPUs that this process could run on if nobody had bound it: those of its cgroup.

    The kernel cuts an affinity down to them (man 2 sched_setaffinity).
    """
    given = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(given)
    finally:
        os.sched_setaffinity(0, given)


def topology(cpus: Collection[int]) -> Topology:
    """Return how CPUs belong together; where the kernel does not tell, each is a core, all of one NUMA node."""
    numa = numa_nodes()
    cores: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            siblings = sorted(set(read_list(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list")) & set(cpus)) or [cpu]
            seen.update(siblings)
            cores[tuple(siblings)] = numa.get(cpu, 0)
    ordered = sorted(cores, key=lambda core: (cores[core], core))
    return Topology(tuple(ordered), tuple(cores[core] for core in ordered))


def numa_nodes() -> dict[int, int]:
    """Return each CPU's NUMA node."""
    try:
        nodes = [int(name[4:]) for name in os.listdir(NODES) if name.startswith("node") and name[4:].isdigit()]
    except OSError:
        return {}
    return {cpu: node for node in nodes for cpu in read_list(f"{NODES}/node{node}/cpulist")}


def read_list(path: str) -> Iterable[int]:
    """Return the numbers in a file of the kernel such as "0-3,8", none where there is no such file."""
    try:
        with open(path) as file:
            parts = [part.split("-") for part in file.read().strip().split(",") if part]
    except OSError:
        return []
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
