"""What a rank sees of its host: name, cores, network interfaces."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from . import cpus, launchers, runtime, schedulers, software
from .cpus import Grant, Topology
from .gpus import Gpu, describe_clash, from_kernel, gpus, visible
from .script import ScriptFacts

SHM = "/dev/shm"  # noqa: S108 (it is looked at, not written to)


class Interface(NamedTuple):
    """An address of a network interface that is up; `network` is its subnet in CIDR form.

    `speed_mbps` is in Mbit/s, 0 if the system does not know it (psutil.net_if_stats).
    """

    name: str
    address: str
    network: str
    loopback: bool
    speed_mbps: int


class HostFacts(NamedTuple):
    """One rank's host.

    `node` is the lowest rank on the same node. `cpus` are those that this rank was given to run on, `allowed`
    those that its cgroup would let it have, or under Flux the same. `topology` tells how all that the cgroup lets a
    rank have belong together. `alone` is
    true if no launcher started the rank. `cpus_per_task` is what the user asked Slurm for. `interfaces` is
    empty if one node has all ranks. `unaddressed` are the names of further interfaces, which are up and have no
    address but link-local ones of IPv6. `options` are those of LaunchConfig.job_wide_options(). `script` is None if the
    caller keeps its own main(). `prefix` is the folder of Python's environment. `shm_bytes` is the size of
    /dev/shm, `open_files` the number of files that a process may have open. `gpus` are the GPUs that this rank
    could be shown, `seen` those that it is shown; both are empty if only torch can tell. `given_gpus` is the
    number of GPUs that Slurm has given the job on this node, `task_gpus` the number for each task, 0 if Slurm
    does not say. `grant` is what a scheduler has given the job of the node's CPUs, None if none says so or if a
    cgroup keeps the job to its share. `hidden` tells how two lists of visible GPUs leave none together, empty where
    they do not. `stop_in_s` is the time until --stop-before stops the job, None where this rank does not know that.
    Only the lowest rank of a node looks for `topology`, `interfaces` and `grant`; the others have none.
    `launcher` and `scheduler` are the names of what started the rank and of what runs the job, empty for none
    (discovery/launchers.py, discovery/schedulers.py).
    """

    hostname: str
    node: int
    cpus: frozenset[int]
    allowed: frozenset[int]
    topology: Topology | None
    alone: bool
    cpus_per_task: int | None
    interfaces: tuple[Interface, ...]
    script: ScriptFacts | None
    versions: dict[str, str]
    prefix: str
    shm_bytes: int
    open_files: int
    gpus: tuple[Gpu, ...] = ()
    seen: tuple[Gpu, ...] = ()
    given_gpus: int = 0
    task_gpus: int = 0
    grant: Grant | None = None
    unaddressed: tuple[str, ...] = ()
    options: Mapping[str, str] = {}
    launcher: str = ""
    scheduler: str = ""
    hidden: str = ""
    stop_in_s: float | None = None


def host_facts(
    environ: Mapping[str, str], rank: int, node: int, whole: bool, script: ScriptFacts | None, mpi_library: str,
    look_at_gpus: bool,
) -> HostFacts:
    """Return the facts of this rank's host; `whole` says that one node has all ranks, so that no network is needed."""
    found = gpus() if look_at_gpus else ()
    seen = visible(found, environ) if found or not look_at_gpus else from_kernel(environ)
    hidden = describe_clash(environ) if look_at_gpus and not (found or seen) else ""
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    allowed = reachable = cpus.allowed()
    scheduler = schedulers.find_scheduler(environ)
    started_by = launchers.detect(environ)
    by_mpirun = started_by is not None and not started_by.by_srun
    if started_by is not None and started_by.launcher is launchers.FLUX:  # which binds tasks, without a cgroup
        allowed = frozenset(os.sched_getaffinity(0))
    unconfined = rank == node and cpus.are_all(reachable)
    addresses, unaddressed = ((), ()) if whole or rank != node else interfaces()
    return HostFacts(
        hostname=runtime.hostname(),
        node=node,
        cpus=frozenset(os.sched_getaffinity(0)),
        allowed=allowed,
        topology=cpus.topology(reachable) if rank == node else None,
        alone=started_by is None,
        cpus_per_task=int(per_task) if per_task.isdigit() else None,
        interfaces=addresses,
        script=script,
        versions=software.versions(mpi_library),
        prefix=sys.prefix,
        shm_bytes=shm_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=found,
        seen=seen,
        given_gpus=schedulers.slurm_gpus_on_node(environ),
        task_gpus=schedulers.slurm_gpus_of_task(environ),
        grant=cpus.grant(environ, runtime.hostname(), by_mpirun) if unconfined else None,
        unaddressed=unaddressed,
        launcher=started_by.launcher.name if started_by else "",
        scheduler=scheduler.name if scheduler else "",
        hidden=hidden,
    )


def shm_bytes() -> int:
    """Return the size of /dev/shm, 0 where there is none."""
    try:
        shm = os.statvfs(SHM)
    except OSError:
        return 0
    return shm.f_frsize * shm.f_blocks


def why_no_shm() -> str:
    """Return in words why this user can have no shared memory on this host, empty where that is possible."""
    if os.access(SHM, os.W_OK | os.X_OK):
        return ""
    return f"this user cannot write to {SHM}" if os.path.isdir(SHM) else f"there is no {SHM}"


def interfaces() -> tuple[tuple[Interface, ...], tuple[str, ...]]:
    """Return the IPv4 and IPv6 addresses of the interfaces that are up, IPv6's link-local ones left out.

    The names of interfaces that have no others follow.
    """
    import ipaddress

    import psutil

    stats = psutil.net_if_stats()
    found = []
    linked: set[str] = set()
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or entry.netmask is None:
                continue
            address = ipaddress.ip_address(entry.address)
            if address.version == 6 and address.is_link_local:
                linked.add(name)
                continue
            bits = int(ipaddress.ip_address(entry.netmask)).bit_count()
            network = ipaddress.ip_network((entry.address, bits), strict=False)
            found.append(Interface(name, entry.address, str(network), address.is_loopback, stats[name].speed))
    return tuple(found), tuple(sorted(linked - {one.name for one in found}))
