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
from ..discovery import reachability
from ..discovery.schedulers import fill, find_end, name_for_commands, run_command
from ..systems import schedulers
from ..systems.schedulers import NO_SCHEDULER, Scheduler
from .decision import make_node_lookup

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 1.0  # for a node to accept a connection
BATCH_COMMAND_TIMEOUT_S = 5.0  # for a batch system's command
CANCEL_TIMEOUT_S = 1.0  # for a command that cancels a step; it goes on in a thread
SSH_PORT = 22
DRAINED = "DRAIN"  # in a node's state, as in MIXED+DRAIN


class Allocation(NamedTuple):
    """The nodes (none: this machine only) and the number of ranks on each, 0 if unknown.

    `scheduler` reports which nodes answer (NO_SCHEDULER: none does); `job` is the job's name in its commands.
    """

    nodes: tuple[str, ...]
    tasks_per_node: int
    scheduler: Scheduler = NO_SCHEDULER
    job: str = ""


def find_allocation(environ: Mapping[str, str], hostfile: str) -> Allocation:
    """Return the nodes of the hostfile, or else of the job around this process.

    A scheduler has them in a variable, prints them, or writes a file with a line for each rank, or for a node with its
    slots. Raises OSError if a file cannot be read.
    """
    if hostfile:
        return read_hostfile(hostfile)
    for row in schedulers.SCHEDULERS:
        if row.node_list and environ.get(row.jobs[0]):
            tasks = next(filter(None, map(environ.get, row.tasks_per_node)), "")
            counts = list(map(int, re.findall(r"(?:^|,)(\d+)", tasks)))
            nodes = expand_nodelists(environ.get(row.node_list, ""))
            return Allocation(nodes, min(counts, default=0), row, name_for_commands(environ, row))
        if row.ask_nodes and row.is_instance(environ) and (nodes := expand_nodelists(ask_scheduler(*row.ask_nodes))):
            return Allocation(nodes, 0, row)
        if file := row.node_file(environ):
            return read_hostfile(file)
    return Allocation((), 0)


def read_hostfile(path: str) -> Allocation:
    """Return the hosts in a file; each gets as many ranks as the smallest number of slots.

    A line is one slot, or several: `n1 slots=2` (Open MPI), `n1:2` (MPICH), `n1 2 …` (Grid Engine).
    """
    slots_of: Counter[str] = Counter()
    with open(open_for_reading(path), encoding="utf-8") as file:
        for line in file:
            words = line.partition("#")[0].split()
            if words:
                host, _, count = words[0].partition(":")
                slots = next((word.removeprefix("slots=") for word in words[1:]
                              if word.startswith("slots=") or word.isdecimal()), count)
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
    up = list_nodes_up(allocation)  # none if the scheduler does not answer
    silent = probe_twice(nodes, allocation.scheduler)
    lost = [node for node in nodes if node in silent or (up and node not in up)]
    here = socket.gethostname().partition(".")[0]
    return () if here in (node.partition(".")[0] for node in lost) else tuple(lost)


def probe_twice(nodes: Sequence[str], scheduler: Scheduler) -> list[str]:
    """Return the nodes where two connections fail: to the scheduler's daemon, or without a scheduler to the host.

    A scheduler without such daemons knows itself which nodes answer. TCP resends a lost packet after a second
    (RFC 6298), so one probe of a second would take a lost packet for a lost node.
    """
    here = (socket.gethostname(), "localhost")
    addresses = {} if scheduler.ask_nodes else {node: (node, SSH_PORT) for node in nodes if node not in here}
    if scheduler.ask_daemons:
        addresses = find_daemons(nodes, scheduler)
    for again in (False, True):
        began = time.monotonic()
        answers = reachability.probe_hosts(addresses, PROBE_TIMEOUT_S, refusal_counts=not scheduler.ask_daemons)
        addresses = {node: address for node, address in addresses.items() if not answers[node]}
        if addresses and not again:
            time.sleep(max(0.0, began + PROBE_INTERVAL_S - time.monotonic()))
    return [*addresses]


def find_daemons(nodes: Sequence[str], scheduler: Scheduler) -> dict[str, tuple[str, int]]:
    """Return the addresses of the nodes' daemons that the scheduler's controller knows."""
    config = ask_scheduler(*scheduler.ask_config)
    port = (re.findall(scheduler.daemon_port_pattern, config, re.MULTILINE) or [scheduler.daemon_port])[0]
    addresses = {}
    for facts in ask_about_nodes(nodes, scheduler):
        with contextlib.suppress(KeyError, ValueError):
            addresses[facts["NodeName"]] = (facts["NodeAddr"], int(facts.get("Port") or port))
    return addresses


def find_drained_nodes(allocation: Allocation) -> tuple[str, ...]:
    """Return the nodes that an administrator or a health check has drained; the job still has them."""
    facts = ask_about_nodes(allocation.nodes, allocation.scheduler)
    drained = {node.get("NodeName") for node in facts if DRAINED in re.split(r"\W", node.get("State", ""))}
    return tuple(node for node in allocation.nodes if node in drained)


def ask_about_nodes(nodes: Sequence[str], scheduler: Scheduler) -> list[dict[str, str]]:
    """Return what the scheduler's controller prints about each node."""
    lines = ask_scheduler(*fill(scheduler.ask_daemons, nodes=",".join(nodes))).splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def is_running(allocation: Allocation) -> bool:
    """Return whether the job still has its allocation: the scheduler may be ending or requeueing the job."""
    row = allocation.scheduler
    state = ask_scheduler(*fill(row.ask_state, job=allocation.job)).split()
    return not state or state[0] == row.running


def find_time_left_s() -> float:
    """Return the seconds until the batch system ends the job, infinity if unknown."""
    end = find_end(os.environ, True)
    return end - time.time() if end is not None else float("inf")


def kill_step(allocation: Allocation, name: str) -> None:
    """Ask the scheduler to kill a step by its name, without waiting long: Slurm's scancel waits for a lost node."""
    row = allocation.scheduler
    lines = ask_scheduler(*fill(row.ask_steps, job=allocation.job, step=name)).splitlines()
    for number, step in (line.split(maxsplit=1) for line in lines if " " in line):
        if step.strip() == name:
            thread = Thread(target=ask_scheduler, args=fill(row.cancel, step=number), daemon=True)
            thread.start()
            thread.join(CANCEL_TIMEOUT_S)


def list_nodes_up(allocation: Allocation) -> tuple[str, ...]:
    """Return the nodes that the job still has; none if the scheduler does not answer, or is ending the job.

    With `sbatch --no-kill`, Slurm takes a node from the job that becomes DOWN, also if its daemon answers. Flux lists
    neither lost nor drained ones.
    """
    return expand_nodelists(ask_scheduler(*fill(allocation.scheduler.ask_nodes, job=allocation.job)))


def has_controller(allocation: Allocation) -> bool:
    """Return whether the scheduler's controller answers; True if its command is missing or does not say."""
    row = allocation.scheduler
    if not row.no_controller or shutil.which(row.ask_state[0]) is None:
        return True
    done = run_command(*fill(row.ask_state, job=allocation.job), timeout_s=BATCH_COMMAND_TIMEOUT_S)
    return done is not None and row.no_controller not in done.stderr


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


def ask_scheduler(*command: str) -> str:
    """Return the output of a scheduler's command, empty without one, or if it cannot be started or times out."""
    done = run_command(*command, timeout_s=BATCH_COMMAND_TIMEOUT_S) if command else None
    return done.stdout if done is not None else ""
