"""The cores of this node: which a rank may run on, and how they belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ..base.files import list_names, read_number, read_text
from .schedulers import PE_HOSTFILE, find_job, find_scheduler

CPUS, NODES = "/sys/devices/system/cpu", "/sys/devices/system/node"


class Topology(NamedTuple):
    """How a node's CPUs (hardware threads, as Linux counts them) belong together.

    `cores` holds the CPUs of each physical core; the cores of one NUMA node follow each other. `numa` holds
    the number of each core's NUMA node, `sockets` that of each core's socket. `nodes` has the socket of each
    NUMA node, also of those that have none of these cores. `sockets` and `nodes` are empty if the kernel does
    not tell.
    """

    cores: tuple[tuple[int, ...], ...]
    numa: tuple[int, ...]
    sockets: tuple[int, ...] = ()
    nodes: tuple[tuple[int, int], ...] = ()


class Grant(NamedTuple):
    """How many CPUs of this node a scheduler has given a job; if `each` is true, each process of the job.

    `job` is the job's number; jobs that share a node differ in it.
    """

    cpus: int
    each: bool
    job: int


def grant(environ: Mapping[str, str], host: str, by_mpirun: bool) -> Grant | None:
    """Return what a scheduler says it has given the job on this host, None if none says so.

    SLURM_CPUS_ON_NODE counts the CPUs of the Slurm step that this process is in. Under mpirun that is the
    step of mpirun's daemon, which may have fewer CPUs than the job: the variable is asked last then.
    """
    scheduler = find_scheduler(environ)
    job = re.match(r"\d+", find_job(environ)[0])
    if scheduler is None or job is None:
        return None
    for name in reversed(scheduler.cpus) if by_mpirun else scheduler.cpus:
        value = environ.get(name, "")
        if cpus := count_in_hostfile(value, host) if name == PE_HOSTFILE else count(value, host):
            return Grant(cpus, name == scheduler.each, int(job[0]))
    return None


def count(value: str, host: str) -> int:
    """Return a host's CPUs from "16", "16(x3)" (16 on each of 3 nodes) or "n1 16 n2 8"; 0 from any other text."""
    words = value.split()
    if len(words) > 1:
        by_host = {name.partition(".")[0]: cpus for name, cpus in zip(words[::2], words[1::2], strict=False)}
        value = by_host.get(host.partition(".")[0], "")
    cpus, _, rest = value.partition("(x")
    return int(cpus) if cpus.isdecimal() and "," not in rest else 0


def count_in_hostfile(path: str, host: str) -> int:
    """Return a host's slots from SGE's file: a line has a host, its slots, a queue and processors (man sge_pe)."""
    fields = [line.split() for line in read_text(path).splitlines()]
    return sum(int(line[1]) for line in fields if len(line) > 1 and line[1].isdecimal()
               and line[0].partition(".")[0] == host.partition(".")[0])


def allowed() -> frozenset[int]:
    """Return the CPUs that this process could run on if nobody had bound it: those of its cgroup.

    The process asks for all CPUs for a moment: the kernel grants those of the cgroup (man 2 sched_setaffinity).
    """
    given = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, set(read_list(f"{CPUS}/possible")) or range(os.cpu_count() or 1))
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(given)
    finally:
        os.sched_setaffinity(0, given)


def are_all(cpus: Collection[int]) -> bool:
    """Tell whether these are all CPUs of the node, so that nothing confines a process that may run on them."""
    return len(cpus) == (len(set(read_list(f"{CPUS}/online"))) or os.cpu_count())


def topology(cpus: Collection[int]) -> Topology:
    """Return how CPUs belong together; if the kernel does not tell, each CPU is a core, all of one NUMA node."""
    numa = numa_nodes()
    cores: dict[tuple[int, ...], int] = {}
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            siblings = sorted(set(read_list(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list")) & set(cpus)) or [cpu]
            seen.update(siblings)
            cores[tuple(siblings)] = numa.get(cpu, 0)
    ordered = sorted(cores, key=lambda core: (cores[core], core))
    first = {cores[core]: core[0] for core in ordered}  # a NUMA node lies in one socket
    sockets = {node: socket(cpu) for node, cpu in first.items()}
    known = -1 not in sockets.values()
    return Topology(tuple(ordered), tuple(cores[core] for core in ordered),
                    tuple(sockets[cores[core]] for core in ordered) if known else (), sockets_of_nodes(numa))


def sockets_of_nodes(numa: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return each NUMA node with its socket, empty if the kernel does not tell; `numa` holds each CPU's NUMA node."""
    first = {node: cpu for cpu, node in sorted(numa.items(), reverse=True)}
    found = tuple((node, socket(cpu)) for node, cpu in sorted(first.items()))
    return () if any(number == -1 for _, number in found) else found


def socket(cpu: int) -> int:
    """Return the number of a CPU's socket, -1 if the kernel knows none."""
    return read_number(f"{CPUS}/cpu{cpu}/topology/physical_package_id")


def numa_nodes() -> dict[int, int]:
    """Return each CPU's NUMA node."""
    nodes = [int(name[4:]) for name in list_names(NODES, "node") if name[4:].isdigit()]
    return {cpu: node for node in nodes for cpu in read_list(f"{NODES}/node{node}/cpulist")}


def read_list(path: str) -> Iterable[int]:
    """Return the numbers that a file of the kernel lists as in "0-3,8"; none if there is no such file."""
    parts = [part.split("-") for part in read_text(path).split(",") if part]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]
