"""What a rank knows of its host before torch is imported: cores, interfaces, GPUs, limits, script, software."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..base.config import LaunchConfig
from ..base.version import __version__
from . import cpus, launchers, mpi, runtime, schedulers
from .cpus import CpuGrant, Topology
from .gpus import Gpu, describe_hidden_gpus, list_amd_gpus, list_nvidia_gpus, select_visible
from .script import ScriptFacts, read_script_facts

if TYPE_CHECKING:
    from ..base.communicator import Communicator

GIT_TIMEOUT_S = 5.0
SHM_FOLDER = "/dev/shm"  # noqa: S108 (it is only read)


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
    """A rank's host. Only the lowest rank of a node has `topology`, `interfaces` and `grant`.

    `node` is the lowest rank on the same node. `alone` is true if no launcher started the rank. `launcher` and
    `scheduler` are names of rows in systems/, empty for none. The scheduler's job has `job_nodes` nodes, 0 if that is
    unknown or does not matter. `options` are those of LaunchConfig.job_wide_options(). `script` is None if the caller
    keeps its own main(). `prefix` is the folder of Python's environment. `shm_bytes` is the size of /dev/shm,
    `open_files` the limit of open files.

    CPUs: the launcher gave this rank `cpus`; its cgroup allows it `allowed` (under Flux the same as `cpus`), whose
    structure is `topology`. `cpus_per_task` is Slurm's --cpus-per-task. `grant` is what a scheduler gave the job of the
    node's CPUs, None if unknown, or if a cgroup confines the job to its share.

    Network: `interfaces` is empty if one node has all ranks and no option names a network. `unaddressed` are the names
    of further interfaces that are up and have only link-local addresses of IPv6.

    GPUs: CUDA_VISIBLE_DEVICES can name any of `gpus`, and names `visible_gpus` now; both are empty if only torch can
    list them. `hidden` describes how two such lists together leave no GPU, empty if they leave some. Slurm gave the job
    `given_gpus` on this node and `task_gpus` to each task, 0 if unknown.

    `stop_in_s` is the time until --stop-before stops the job, None if this rank does not know it. `site_warnings` are
    those of the site profile `site_file`, `site_options` the defaults of options in it, as written.
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
    visible_gpus: tuple[Gpu, ...] = ()
    given_gpus: int = 0
    task_gpus: int = 0
    grant: CpuGrant | None = None
    unaddressed: tuple[str, ...] = ()
    options: Mapping[str, str] = {}
    launcher: str = ""
    scheduler: str = ""
    job_nodes: int = 0
    hidden: str = ""
    stop_in_s: float | None = None
    site_warnings: tuple[str, ...] = ()
    site_file: str = ""
    site_options: Mapping[str, str] = {}


def collect_host_facts(comm: Communicator, config: LaunchConfig, stop_in_s: float | None = None) -> HostFacts:
    """Return the facts of this rank before torch; --stop-before stops the job in `stop_in_s`, if known. Collective."""
    node, is_only_node = comm.find_node()
    script = read_script_facts(config.script) if config.script else None
    with_gpus = "torch" not in sys.modules and config.device in (None, "cuda")  # CUDA cannot have started
    needs_no_network = is_only_node and not (config.interface or config.master_addr)
    facts = read_host_facts(
        os.environ, comm.rank, node, needs_no_network, script, comm.library, with_gpus)
    return facts._replace(options=config.job_wide_options(), stop_in_s=stop_in_s)


def read_host_facts(
    environ: Mapping[str, str], rank: int, node: int, needs_no_network: bool, script: ScriptFacts | None,
    mpi_library: str, with_gpus: bool,
) -> HostFacts:
    """Return the facts of this rank's host; if the job `needs_no_network`, its interfaces are not read."""
    gpus = list_nvidia_gpus() if with_gpus else ()
    visible_gpus = select_visible(gpus, environ) if gpus or not with_gpus else list_amd_gpus(environ)
    hidden = describe_hidden_gpus(environ) if with_gpus and not (gpus or visible_gpus) else ""
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    allowed = reachable = cpus.list_allowed_cpus()
    scheduler = schedulers.find_scheduler(environ)
    started_by = launchers.read_launch_facts(environ)
    by_mpirun = started_by is not None and not started_by.by_srun
    if started_by is not None and started_by.launcher.binds_without_cgroup:
        allowed = frozenset(os.sched_getaffinity(0))
    is_unconfined = rank == node and cpus.is_whole_node(reachable)
    interfaces, unaddressed = ((), ()) if needs_no_network or rank != node else list_interfaces()
    return HostFacts(
        hostname=runtime.hostname(),
        node=node,
        cpus=frozenset(os.sched_getaffinity(0)),
        allowed=allowed,
        topology=cpus.read_topology(reachable) if rank == node else None,
        alone=started_by is None,
        cpus_per_task=int(per_task) if per_task.isdigit() else None,
        interfaces=interfaces,
        script=script,
        versions=read_versions(mpi_library),
        prefix=sys.prefix,
        shm_bytes=read_shm_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpus,
        visible_gpus=visible_gpus,
        given_gpus=schedulers.count_slurm_gpus_on_node(environ),
        task_gpus=schedulers.count_slurm_gpus_of_task(environ),
        grant=cpus.read_grant(environ, runtime.hostname(), by_mpirun) if is_unconfined else None,
        unaddressed=unaddressed,
        launcher=started_by.launcher.name if started_by else "",
        scheduler=scheduler.name if scheduler else "",
        job_nodes=schedulers.count_unchosen_nodes(environ) if rank == 0 else 0,
        hidden=hidden,
    )


def read_shm_bytes() -> int:
    """Return the size of /dev/shm, 0 if there is none."""
    try:
        shm = os.statvfs(SHM_FOLDER)
    except OSError:
        return 0
    return shm.f_frsize * shm.f_blocks


def describe_missing_shm() -> str:
    """Return why this user cannot have shared memory on this host, empty if that is possible."""
    if os.access(SHM_FOLDER, os.W_OK | os.X_OK):
        return ""
    return f"this user cannot write to {SHM_FOLDER}" if os.path.isdir(SHM_FOLDER) else f"there is no {SHM_FOLDER}"


def list_interfaces() -> tuple[tuple[Interface, ...], tuple[str, ...]]:
    """Return the IPv4 and IPv6 addresses of the interfaces that are up, without IPv6's link-local ones.

    The second value has the names of the interfaces that have only such ones.
    """
    import ipaddress

    import psutil

    stats = psutil.net_if_stats()
    interfaces = []
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
            interfaces.append(Interface(name, entry.address, str(network), address.is_loopback, stats[name].speed))
    return tuple(interfaces), tuple(sorted(linked - {interface.name for interface in interfaces}))


def read_versions(mpi_library: str) -> dict[str, str]:
    """Return the versions, by name, that must be the same on all ranks; torch's is not known yet."""
    import mpi4py

    return {"Python": sys.version.split()[0], "mpi4py": mpi4py.__version__, "mpiddp": __version__,
            "MPI library": mpi_library}


def describe_software(script: str) -> str:
    """Return the versions of all software in words, and the git state of a script file (empty for none)."""
    import mpi4py
    import torch

    from .devices import read_nccl_version

    nccl = read_nccl_version()
    torch_parts = [f"{name} {version}" for name, version in (
        ("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("NCCL", nccl)) if version]
    words = [f"Python {sys.version.split()[0]}",
             f"torch {torch.__version__}" + (f" ({', '.join(torch_parts)})" if torch_parts else ""),
             mpi.identify_library().title, f"mpi4py {mpi4py.__version__}", f"mpiddp {__version__}"]
    code = read_commit(script) if script else ""
    return ", ".join(words) + (f"; {script} at git {code}" if code else "")


def read_commit(file: str) -> str:
    """Return `git describe` of the folder around a file, empty without git or a repository."""
    import subprocess

    command = ["git", "-C", os.path.dirname(os.path.abspath(file)), "describe", "--always", "--dirty", "--tags"]
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=GIT_TIMEOUT_S,
                              stdin=subprocess.DEVNULL, env=env)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
