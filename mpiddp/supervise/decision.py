"""What follows from how a job's attempts have ended. Pure functions: no I/O, no clock."""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import EXIT_CANNOT_START, EXIT_REQUEUE, EXIT_USAGE
from ..plan.verdict import OWN
from ..plan.words import duration, shortened

STARTING_S = 30.0  # for a start and a few steps: an attempt that has less is not begun
CHANCE = 0.01  # healthy nodes that may be left out, in a job's whole life, because faults have met there by chance
LENGTH = 0.25  # by which the lengths of two attempts may differ that end alike without counting steps
DEVICE_FAULTS = (  # as CUDA, NCCL and drivers say that a device, and not the script, is at fault
    "uncorrectable ecc", "ecc error", "cudaerrordevicesunavailable", "busy or unavailable", "fallen off the bus",
    "cuda driver initialization failed", "hardware stack error", "cudaerrorhardwarestackerror", "nvlink error",
    "cudaerrorsystemnotready", "system not yet initialized", "device not ready", "nvrm: xid",
)
VARYING = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, ports, sizes: what differs between two errors that are alike


class Attempt(NamedTuple):
    """How a job was tried, and how that ended.

    It ran on `nodes` for `seconds`, and its launcher ended with `status`. What its report says: `kind` and `signal` as
    in plan/verdict.py, `cause`, `where`, the `rank` and its `host`; all are empty, and `rank` is None, if there is no
    report, and `host` and `rank` if nobody is to blame. `outside` tells that a signal was sent to the job as a whole.
    `silent` are nodes that were asked afterwards and did not answer. It made `steps`, None if it counts none;
    `has_progressed` tells whether it wrote a checkpoint, None if it is not known where those lie.
    """

    nodes: tuple[str, ...]
    seconds: float
    status: int
    kind: str = ""
    cause: str = ""
    where: str = ""
    rank: int | None = None
    host: str = ""
    signal: str = ""
    outside: bool = False
    silent: tuple[str, ...] = ()
    steps: int | None = None
    has_progressed: bool | None = None

    @property
    def reason(self) -> str:
        """Why it ended, in a line."""
        if self.status == 0:
            return "success"
        who = f"rank {self.rank} on {self.host}: " if self.rank is not None else ""
        return who + (shortened(self.cause, 200) or f"status {self.status}, without a report")


class Limits(NamedTuple):
    """What the user allows: so many restarts, on so many nodes, at least `min_nodes`, and the time that is `left_s`."""

    nodes: int
    min_nodes: int
    restarts: int
    left_s: float = math.inf


class Action(enum.Enum):
    """What to do next."""

    DONE = "done"
    AGAIN = "again"
    REQUEUE = "requeue"
    STOP = "stop"


class Decision(NamedTuple):
    """What to do next: on which `nodes`, and why. `without` are the nodes that are left out from now on."""

    action: Action
    why: str
    nodes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Suspect(NamedTuple):
    """A node that is left out, and what speaks against it. `attempt` is the number of the one that has shown it."""

    host: str
    evidence: str
    attempt: int


def decide(attempts: Sequence[Attempt], pool: Sequence[str], limits: Limits) -> Decision:
    """Return what to do after the last of `attempts`; `pool` are all nodes that the job has."""
    last = attempts[-1]
    if last.status == 0:
        return Decision(Action.DONE, "")
    if last.status == EXIT_REQUEUE:
        return Decision(Action.REQUEUE, "the job has stopped, and can go on")
    if last.outside:
        return Decision(Action.STOP, f"{last.signal or 'a signal'} was sent to the job from outside")
    out = suspects(attempts, pool)
    new = tuple(one.host for one in out if one.attempt == len(attempts) - 1)
    if not new and (why := stops(attempts)):
        return Decision(Action.STOP, why)
    if len(attempts) > limits.restarts:
        return Decision(Action.STOP, f"--max-restarts {limits.restarts} is reached", without=new)
    if limits.left_s < STARTING_S:
        return Decision(Action.REQUEUE, f"{duration(max(0.0, limits.left_s))} of the walltime are left, too few for an "
                        "attempt", without=new)
    nodes = choose(last.nodes, pool, {one.host for one in out}, limits)
    evidence = "; ".join(one.evidence for one in out if one.host in new)
    if not nodes:
        needed = f"{limits.min_nodes} nodes are needed, and {len(pool) - len(out)} of {len(pool)} are left"
        return Decision(Action.REQUEUE, "; ".join(filter(None, (evidence, needed))), without=new)
    fewer = f"{len(nodes)} of {limits.nodes} nodes are left" if len(nodes) < limits.nodes else ""
    healthy = f"nothing speaks against {last.host}" if last.host and len(pool) > 1 else ""
    why = "; ".join(filter(None, (evidence, fewer))) or healthy
    return Decision(Action.AGAIN, why, nodes, new)


def choose(former: Sequence[str], pool: Sequence[str], out: Collection[str], limits: Limits) -> tuple[str, ...]:
    """Return the nodes for the next attempt, the `former` ones first; none if fewer are left than are needed."""
    left = [node for node in dict.fromkeys((*former, *pool)) if node not in out][:limits.nodes]
    chosen = frozenset(left)
    return tuple(node for node in pool if node in chosen) if len(left) >= limits.min_nodes else ()


def stops(attempts: Sequence[Attempt]) -> str:
    """Return why it makes no sense to try again, empty if it does."""
    last = attempts[-1]
    if last.status == EXIT_USAGE and not last.kind:
        return f"status {EXIT_USAGE}, by which programs say that their command line is wrong"
    if last.status == EXIT_CANNOT_START and not last.kind and len(attempts) == 1:
        return f"status {EXIT_CANNOT_START}, by which mpiddp says that the job cannot start"
    if len(attempts) > 1 and (how := likeness(attempts[-2], last)):
        return f"two attempts ended alike, {how}: {last.reason}"
    return ""


def likeness(before: Attempt, last: Attempt) -> str:
    """Return in words how an attempt ended as the one before and got no further, as the next one will; else nothing."""
    if (before.status, before.kind, before.where) != (last.status, last.kind, last.where):
        return ""
    if VARYING.sub("#", before.cause) != VARYING.sub("#", last.cause):
        return ""
    if last.has_progressed is not None:
        return "" if last.has_progressed else "with no checkpoint written between"
    if before.steps and last.steps is not None:
        words = f"after {last.steps:,} steps (does it go on from checkpoints? name these by --progress-file)"
        return words if last.steps in (0, before.steps) else ""
    longer = max(before.seconds, last.seconds)
    return "after about the same time" if abs(before.seconds - last.seconds) <= LENGTH * longer else ""


def suspects(attempts: Sequence[Attempt], pool: Sequence[str]) -> list[Suspect]:
    """Return the nodes that evidence speaks against, in the order in which they were found."""
    found: dict[str, Suspect] = {}
    known = names_of(pool)
    faults: dict[str, list[int | None]] = {}  # the ranks at fault, of each host
    for number, one in enumerate(attempts):
        told = {host: f"{host} does not answer" for host in one.silent}
        if one.rank is not None and not one.outside:
            if is_device_fault(one.cause):
                told.setdefault(one.host, f"a device of {one.host} is at fault: {shortened(one.cause, 200)}")
            elif one.kind != OWN and not one.silent:  # an exception of the script says nothing of its node
                faults.setdefault(one.host, []).append(one.rank)
                here, in_all = faults[one.host], sum(map(len, faults.values()))
                if len(set(here)) > 1 and (len(here) == in_all or coincidence(len(here), in_all, len(pool)) < CHANCE):
                    told[one.host] = f"{len(here)} of {in_all} faults were on {one.host}, with different ranks"
        for host, evidence in told.items():
            if node := known.get(host) or known.get(short(host)):
                found.setdefault(node, Suspect(node, evidence, number))
    return list(found.values())


def names_of(pool: Sequence[str]) -> dict[str, str]:
    """Return the nodes by their names, and by the first parts of these, if no other has it: so ranks name hosts."""
    times = Counter(map(short, pool))
    return {**{short(node): node for node in pool if times[short(node)] == 1}, **{node: node for node in pool}}


def short(host: str) -> str:
    """Return a host's name without its domain; an address stays whole."""
    first = host.partition(".")[0]
    return host if first.isdecimal() else first


def is_device_fault(error: str) -> bool:
    """Tell whether an error's text says that a device is at fault."""
    return any(words in error.lower() for words in DEVICE_FAULTS)


def coincidence(here: int, faults: int, nodes: int) -> float:
    """Return how many of so many nodes, all alike, are expected to have so many of all faults, or more."""
    mean = faults / max(1, nodes)
    few = sum(math.exp(-mean) * mean**count / math.factorial(count) for count in range(here))
    return nodes * max(0.0, 1 - few)
