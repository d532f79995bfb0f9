"""The nodes of the allocation or the hostfile: which they are, and whether they answer."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import NamedTuple

from ..base.files import open_for_reading
from ..discovery import reachability, schedulers
from ..systems.schedulers import FLUX, SLURM, name_slurm_job
from .decision import make_node_lookup

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 1.0  # for a node to accept a connection
BATCH_COMMAND_TIMEOUT_S = 5.0  # for a batch system's command
SSH_PORT = 22
KUBERNETES_HOSTS = "/etc/mpi/hostfile"  # of Kubernetes' MPI operator, on its launcher's pod


class Allocation(NamedTuple):
    """The nodes (none: this machine only) and the number of ranks on each, 0 if unknown.

    `system` is the batch system if it reports which nodes answer; `job` is Slurm's name of the job.
    """

    nodes: tuple[str, ...]
    tasks_per_node: int
    system: str = ""
    job: str = ""


def find_allocation(environ: Mapping[str, str], hostfile: str) -> Allocation:
    """Return the nodes of the hostfile, or else of the job of Slurm, Flux, PBS or Kubernetes' MPI operator.

    In `flux batch` and `flux alloc`, FLUX_URI names a Flux instance with the job's nodes; in a task of `flux run`, the
    instance may have all nodes of the cluster. A line of PBS_NODEFILE is a rank (`mpiprocs` of a node), a line of the
    operator's file is a node with its slots. Raises OSError if a file cannot be read.
    """
    if hostfile:
        return read_hostfile(hostfile)
    if job := name_slurm_job(environ):
        tasks = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
        counts = list(map(int, re.findall(r"(?:^|,)(\d+)", tasks)))
        return Allocation(tuple(schedulers.list_slurm_hosts(environ)), min(counts, default=0), SLURM.name, job)
    if environ.get("FLUX_URI") and "FLUX_TASK_RANK" not in environ and (nodes := list_flux_nodes()):
        return Allocation(nodes, 0, FLUX.name)
    if file := environ.get("PBS_NODEFILE"):
        return read_hostfile(file)
    if environ.get("K_MPI_JOB_ROLE") == "launcher" and os.path.exists(KUBERNETES_HOSTS):
        return read_hostfile(KUBERNETES_HOSTS)
    return Allocation((), 0)


def read_hostfile(path: str) -> Allocation:
    """Return the hosts in a file; each gets as many ranks as the smallest number of slots.

    A line is one slot, or several: `n1 slots=2` (Open MPI), `n1:2` (MPICH).
    """
    slots_of: Counter[str] = Counter()
    with open(open_for_reading(path)) as file:
        for line in file:
            words = line.partition("#")[0].split()
            if words:
                host, _, count = words[0].partition(":")
                slots = next((word.partition("=")[2] for word in words[1:] if word.startswith("slots=")), count)
                slots_of.update([host] * (int(slots) if slots.isdecimal() else 1))
    return Allocation(tuple(slots_of), min(slots_of.values(), default=0))


def exclude_nodes(nodes: Sequence[str], excluded: str) -> tuple[str, ...]:
    """Return the nodes without the excluded ones: a list such as n[017,023], or a file of suspects or of nodes.

    Raises OSError if the file cannot be read, ValueError if the text is no list or names none of the nodes.
    """
    node_of = make_node_lookup(nodes)
    if os.path.isfile(excluded):
        with open(open_for_reading(excluded), encoding="utf-8", errors="replace") as file:
            lines = [line.split("\t") for line in file if line.strip()]
        excluded_nodes = {node_of((parts[1] if len(parts) > 2 else parts[0]).strip()) for parts in lines}
    else:
        from ClusterShell.NodeSet import NodeSet, NodeSetException

        try:
            excluded_nodes = set(map(node_of, NodeSet(excluded)))
        except NodeSetException as error:
            raise ValueError(f"neither a file nor a node list ({error})") from None
        if excluded_nodes.isdisjoint(nodes):
            raise ValueError("not a file, and not a node of this job")
    return tuple(node for node in nodes if node not in excluded_nodes)


def find_silent_nodes(allocation: Allocation, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes that do not answer, or that the batch system has taken from the job.

    None if this node is among them, since then the probe is wrong.
    """
    up = list_nodes_up(allocation)  # none if the batch system does not answer
    silent = probe_twice(nodes, allocation.system == SLURM.name) if allocation.system != FLUX.name else []
    lost = [node for node in nodes if node in silent or (up and node not in up)]
    here = socket.gethostname().partition(".")[0]
    return () if here in (node.partition(".")[0] for node in lost) else tuple(lost)


def probe_twice(nodes: Sequence[str], by_slurm: bool) -> list[str]:
    """Return the nodes where two connections fail: to Slurm's daemon, or without Slurm to the host.

    TCP resends a lost packet after a second (RFC 6298), so one probe of a second would take a lost packet for a lost
    node.
    """
    here = (socket.gethostname(), "localhost")
    addresses = {node: (node, SSH_PORT) for node in nodes if node not in here}
    if by_slurm:
        addresses = find_slurmd_addresses(nodes)
    for again in (False, True):
        began = time.monotonic()
        answers = reachability.probe_hosts(addresses, PROBE_TIMEOUT_S, refusal_counts=not by_slurm)
        addresses = {node: address for node, address in addresses.items() if not answers[node]}
        if addresses and not again:
            time.sleep(max(0.0, began + PROBE_INTERVAL_S - time.monotonic()))
    return [*addresses]


def find_slurmd_addresses(nodes: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Return the addresses of the nodes' Slurm daemons that the controller knows."""
    config = read_command("scontrol", "show", "config")
    port = (re.findall(r"^SlurmdPort *= (\d+)", config, re.MULTILINE) or [reachability.SLURMD_PORT])[0]
    addresses = {}
    for line in read_command("scontrol", "--oneliner", "show", "node", ",".join(nodes)).splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        with contextlib.suppress(KeyError, ValueError):
            addresses[facts["NodeName"]] = (facts["NodeAddr"], int(facts.get("Port") or port))
    return addresses


def is_running(allocation: Allocation) -> bool:
    """Return whether the job still has its allocation: Slurm may be ending or requeueing the job."""
    if allocation.system != SLURM.name:
        return True
    state = read_command("squeue", "--noheader", f"--jobs={allocation.job}", "--format=%T").split()
    return not state or state[0] == "RUNNING"


def find_time_left_s() -> float:
    """Return the seconds until the batch system ends the job, infinity if unknown."""
    end = schedulers.find_end(os.environ, True)
    return end - time.time() if end is not None else float("inf")


def cancel_step(allocation: Allocation, step: str) -> None:
    """Ask the batch system to kill a step by its name, without waiting: scancel waits for a lost node."""
    if allocation.system == FLUX.name:
        for number in read_command("flux", "jobs", f"--name={step}", "-no", "{id}").split():
            read_command("flux", "cancel", number)
    if allocation.system == SLURM.name:
        steps = read_command("squeue", "--noheader", "--steps", f"--jobs={allocation.job}", "--format=%i %j")
        for number, name in (line.split(maxsplit=1) for line in steps.splitlines() if " " in line):
            if name.strip() == step:
                Thread(target=read_command, args=("scancel", "--signal=KILL", number), daemon=True).start()


def list_nodes_up(allocation: Allocation) -> tuple[str, ...]:
    """Return the nodes that the job still has; none if the batch system does not answer, or is ending the job.

    With `sbatch --no-kill`, Slurm takes a node from the job that becomes DOWN, also if its daemon answers.
    """
    if allocation.system == SLURM.name:
        return expand_nodelists(read_command(
            "squeue", "--noheader", "--states=RUNNING", f"--jobs={allocation.job}", "--format=%N"))
    return list_flux_nodes() if allocation.system == FLUX.name else ()


def has_controller(allocation: Allocation) -> bool:
    """Return whether Slurm's controller answers; True without squeue, and for other batch systems."""
    if allocation.system != SLURM.name or shutil.which("squeue") is None:
        return True
    done = schedulers.run_command(
        "squeue", "--noheader", f"--jobs={allocation.job}", timeout_s=BATCH_COMMAND_TIMEOUT_S)
    return done is not None and "Unable to contact slurm controller" not in done.stderr


def list_flux_nodes() -> tuple[str, ...]:
    """Return the nodes that Flux lists as up, without lost and drained ones; none if it does not answer."""
    return expand_nodelists(read_command("flux", "resource", "list", "-s", "up", "-no", "{nodelist}"))


def expand_nodelists(text: str) -> tuple[str, ...]:
    """Return the nodes in lines such as n[1-3], none if a line is no list of nodes."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    nodes = NodeSet()
    try:
        for line in text.split():
            nodes.update(line)
    except NodeSetException:
        return ()
    return tuple(nodes)


def read_command(*command: str) -> str:
    """Return the output of a batch system's command, empty if it cannot be started or times out."""
    done = schedulers.run_command(*command, timeout_s=BATCH_COMMAND_TIMEOUT_S)
    return done.stdout if done is not None else ""
