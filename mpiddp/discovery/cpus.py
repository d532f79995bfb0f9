"""The CPUs of this node: which a rank may run on, their cores, NUMA nodes and sockets."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ..base.files import list_names, read_number, read_text
from ..systems.schedulers import PE_HOSTFILE
from .schedulers import find_job, find_scheduler

CPUS, NODE_ROOT = "/sys/devices/system/cpu", "/sys/devices/system/node"


class Topology(NamedTuple):
    """The physical cores, NUMA nodes and sockets of a node's CPUs (hardware threads, as Linux counts them).

    `cores` holds the CPUs of each core; the cores of one NUMA node follow each other. `numa` holds the number of each
    core's NUMA node, `sockets` that of its socket. `nodes` pairs every NUMA node of the machine with its socket.
    `sockets` and `nodes` are empty if the kernel does not report it.
    """

    cores: tuple[tuple[int, ...], ...]
    numa: tuple[int, ...]
    sockets: tuple[int, ...] = ()
    nodes: tuple[tuple[int, int], ...] = ()


class CpuGrant(NamedTuple):
    """The number of this node's CPUs that a scheduler gave the job with the number `job`.

    If `each` is true, it gave them to each process of the job.
    """

    cpus: int
    each: bool
    job: int


def read_grant(environ: Mapping[str, str], host: str, by_mpirun: bool) -> CpuGrant | None:
    """Return how many CPUs the scheduler gave the job on this host, None if it sets no such variable.

    SLURM_CPUS_ON_NODE counts the CPUs of the Slurm step around this process. Under mpirun that is the step of mpirun's
    daemon, which may have fewer CPUs than the job: then the variable is read last.
    """
    scheduler = find_scheduler(environ)
    job = re.match(r"\d+", find_job(environ)[0])
    if scheduler is None or job is None:
        return None
    for name in reversed(scheduler.cpus) if by_mpirun else scheduler.cpus:
        value = environ.get(name, "")
        if cpus := count_hostfile_slots(value, host) if name == PE_HOSTFILE else parse_cpu_count(value, host):
            return CpuGrant(cpus, name == scheduler.each, int(job[0]))
    return None


def parse_cpu_count(value: str, host: str) -> int:
    """Return a host's CPUs from "16", "16(x3)" (16 on each of 3 nodes) or "n1 16 n2 8"; 0 from any other text."""
    words = value.split()
    if len(words) > 1:
        by_host = {name.partition(".")[0]: cpus for name, cpus in zip(words[::2], words[1::2], strict=False)}
        value = by_host.get(host.partition(".")[0], "")
    cpus, _, rest = value.partition("(x")
    return int(cpus) if cpus.isdecimal() and "," not in rest else 0


def count_hostfile_slots(path: str, host: str) -> int:
    """Return a host's slots from SGE's file: a line has a host, its slots, a queue and processors (man sge_pe)."""
    fields = [line.split() for line in read_text(path).splitlines()]
    return sum(int(line[1]) for line in fields if len(line) > 1 and line[1].isdecimal()
               and line[0].partition(".")[0] == host.partition(".")[0])


def list_allowed_cpus() -> frozenset[int]:
    """Return the CPUs of this process's cgroup, on which it could run if it were not bound.

    The process asks for all CPUs for a moment: the kernel grants those of the cgroup (man 2 sched_setaffinity).
    """
    given = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, set(read_number_list(f"{CPUS}/possible")) or range(os.cpu_count() or 1))
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(given)
    finally:
        os.sched_setaffinity(0, given)


def is_whole_node(cpus: Collection[int]) -> bool:
    """Return whether these are all CPUs of the node, so that no cgroup confines a process that may run on them."""
    return len(cpus) == (len(set(read_number_list(f"{CPUS}/online"))) or os.cpu_count())


def read_topology(cpus: Collection[int]) -> Topology:
    """Return the topology of CPUs; if the kernel does not report it, each CPU is a core, all of one NUMA node."""
    numa = read_numa_nodes()
    cores: dict[tuple[int, ...], int] = {}
    grouped: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in grouped:
            siblings = set(read_number_list(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list")) & set(cpus) or {cpu}
            grouped.update(siblings)
            cores[tuple(sorted(siblings))] = numa.get(cpu, 0)
    ordered = sorted(cores, key=lambda core: (cores[core], core))
    cpu_of_node = {cores[core]: core[0] for core in ordered}  # a NUMA node lies in one socket
    sockets = {node: read_socket(cpu) for node, cpu in cpu_of_node.items()}
    is_known = -1 not in sockets.values()
    return Topology(tuple(ordered), tuple(cores[core] for core in ordered),
                    tuple(sockets[cores[core]] for core in ordered) if is_known else (), read_node_sockets(numa))


def read_node_sockets(numa: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return each NUMA node with its socket, empty if that is unknown; `numa` holds each CPU's NUMA node."""
    cpu_of_node = {node: cpu for cpu, node in sorted(numa.items(), reverse=True)}
    sockets = tuple((node, read_socket(cpu)) for node, cpu in sorted(cpu_of_node.items()))
    return () if any(number == -1 for _, number in sockets) else sockets


def read_socket(cpu: int) -> int:
    """Return the number of a CPU's socket, -1 if the kernel does not report it."""
    return read_number(f"{CPUS}/cpu{cpu}/topology/physical_package_id")


def read_numa_nodes() -> dict[int, int]:
    """Return each CPU's NUMA node."""
    nodes = [int(name[4:]) for name in list_names(NODE_ROOT, "node") if name[4:].isdigit()]
    return {cpu: node for node in nodes for cpu in read_number_list(f"{NODE_ROOT}/node{node}/cpulist")}


def read_number_list(path: str) -> Iterable[int]:
    """Return the numbers in a file of the kernel that lists them as in "0-3,8"; none if there is no such file."""
    parts = [part.split("-") for part in read_text(path).split(",") if part]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
