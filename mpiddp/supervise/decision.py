"""What follows from how a job's attempts have ended. Pure functions: no I/O, no clock."""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..base.errors import EXIT_CANNOT_START, EXIT_OUTPUT_LOST, EXIT_REQUEUE, EXIT_USAGE
from ..base.text import duration, shortened
from ..failure.root_cause import ABSENT, ENDED, OUT_OF_MEMORY

MIN_ATTEMPT_S = 30.0  # for a start and a few steps: an attempt that has less is not begun
# healthy nodes that may be left out, in a job's whole life, because faults have met there by chance
FALSE_EXCLUSION_BUDGET = 0.01
LENGTH_TOLERANCE = 0.25  # by which the lengths of two attempts may differ that end alike without counting steps
BROKEN_DEVICE_WORDS = (  # as CUDA, NCCL and drivers say that a device, and not the script, is at fault
    "uncorrectable ecc", "ecc error", "fallen off the bus", "hardware stack error", "cudaerrorhardwarestackerror",
    "nvlink error", "nvlink or a hardware error", "nvrm: xid",
)
UNREADY_DEVICE_WORDS = (  # that it cannot be used, which a script may have caused, too
    "cudaerrordevicesunavailable", "busy or unavailable", "cuda driver initialization failed",
    "cudaerrorsystemnotready", "system not yet initialized",
)
VARYING = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, ports, sizes: what differs between two errors that are alike
OUTSIDE_STATUSES = (130, 143, 15)  # of a launcher that was ended by SIGINT or SIGTERM; the last one is MPICH's
EXTERNAL_KINDS = (ENDED, ABSENT)  # of a rank that was killed, crashed or stopped: nodes do that, too
TOO_SHORT = "--stop-before, or the time at which the batch system sends its signal, leaves too little of the walltime"
GOES_ON = "(does it go on from checkpoints? name these by --progress-file)"
MAX_FRUITLESS_STARTS = 2  # starts in a row that were to stop before their first step, after which no other one is made
LONG_ATTEMPT_S = 600.0  # an attempt of which the length is no chance
REQUEUE_SIGNALS = ("SIGUSR1", "SIGTERM")  # at which a job that calls should_stop() ends with status 75


class Attempt(NamedTuple):
    """How a job was tried, and how that ended.

    It ran on `nodes` for `seconds`, and its launcher ended with `status`. What its report says: `kind` and `signal` as
    in failure/root_cause.py, `cause`, `where`, the `rank` and its `host`; all are empty, and `rank` is None, if there
    is no report, and `host` and `rank` if nobody is to blame. `outside` tells that a signal was sent to the job as a
    whole. `device` is the line of its error by which a device is at fault. `silent` are nodes that were asked
    afterwards and did not answer. It made `steps`, None if it counts none;
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
    device: str = ""
    silent: tuple[str, ...] = ()
    steps: int | None = None
    has_progressed: bool | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether all ranks have agreed to stop; a rank may fail with that status, too."""
        return self.status == EXIT_REQUEUE and not self.kind

    @property
    def reason(self) -> str:
        """Why it ended, in a line."""
        if self.status == 0:
            return "success"
        if self.has_stopped:
            return "all ranks agreed to stop" if self.steps != 0 else "it was to stop before its first step"
        who = f"rank {self.rank} on {self.host}: " if self.rank is not None else ""
        return who + (shortened(self.cause, 200) or f"status {self.status}, without a report")


class Limits(NamedTuple):
    """What the user allows: so many restarts, on so many nodes, at least `min_nodes`, and the time that is `left_s`.

    The batch system has started the job again for `requeues` times. Before this start `fruitless` ones in a row have
    stopped, with status 75, before their first step.
    """

    nodes: int
    min_nodes: int
    restarts: int
    left_s: float = math.inf
    requeues: int = 0
    fruitless: int = 0


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
    if last.has_stopped:
        return decide_after_stop(attempts, limits)
    if is_from_outside(last):
        why = f"{last.signal or 'a signal'} was sent to the job from outside"
        return Decision(Action.REQUEUE if can_go_on(attempts, last.signal) else Action.STOP, why)
    out = find_suspects(attempts, pool)
    new = tuple(one.host for one in out if one.attempt == len(attempts) - 1)
    if not new and (why := find_reason_to_stop(attempts)):
        return Decision(Action.STOP, why)
    if len(attempts) > limits.restarts:
        return Decision(Action.STOP, f"--max-restarts {limits.restarts} is reached", without=new)
    if limits.left_s < MIN_ATTEMPT_S:
        why = f"{duration(max(0.0, limits.left_s))} of the walltime are left, too few for an attempt"
        return decide_requeue(why, new, attempts, limits)
    nodes = choose_nodes(last.nodes, pool, {one.host for one in out}, limits)
    evidence = "; ".join(one.evidence for one in out if one.host in new)
    if not nodes:
        needed = f"{limits.min_nodes} nodes are needed, and {len(pool) - len(out)} of {len(pool)} are left"
        return decide_requeue("; ".join(filter(None, (evidence, needed))), new, attempts, limits)
    fewer = f"{len(nodes)} of {limits.nodes} nodes are left" if len(nodes) < limits.nodes else ""
    healthy = f"nothing speaks against {last.host}" if last.host and len(pool) > 1 else ""
    why = "; ".join(filter(None, (evidence, fewer))) or healthy
    return Decision(Action.AGAIN, why, nodes, new)


def decide_requeue(why: str, without: tuple[str, ...], attempts: Sequence[Attempt], limits: Limits) -> Decision:
    """Return that the job is queued again, but not for ever: it ends if it was, and has got no further since."""
    if any(has_got_further(one) for one in attempts) or limits.requeues < max(1, limits.restarts):
        return Decision(Action.REQUEUE, why, without=without)
    return Decision(Action.STOP, f"{why}, and it was queued again {limits.requeues} times", without=without)


def has_got_further(attempt: Attempt) -> bool:
    """Tell whether an attempt has brought the job on: by a checkpoint, or where those are not known, by a step.

    The step in which an attempt has failed was not done; a checkpoint that was written before the first one is none.
    """
    if attempt.steps == 1:
        return False
    return bool(attempt.steps) if attempt.has_progressed is None else attempt.has_progressed


def decide_after_stop(attempts: Sequence[Attempt], limits: Limits) -> Decision:
    """Return what to do after all ranks have agreed to stop."""
    if not is_fruitless(attempts):
        return Decision(Action.REQUEUE, "the job has stopped, and can go on")
    if limits.fruitless + 1 < MAX_FRUITLESS_STARTS:
        return Decision(Action.REQUEUE,
                        f"the job was to stop before its first step; {MAX_FRUITLESS_STARTS} such starts in a row "
                                        "are the last ones")
    return Decision(Action.STOP,
                    f"{MAX_FRUITLESS_STARTS} starts in a row were to stop before their first step: {TOO_SHORT}")


def is_fruitless(attempts: Sequence[Attempt]) -> bool:
    """Tell whether a start's last attempt was to stop before its first step, and none before has made any."""
    return attempts[-1].has_stopped and attempts[-1].steps == 0 and not any(one.steps for one in attempts)


def is_from_outside(attempt: Attempt) -> bool:
    """Tell whether a signal was sent to the job as a whole: by its report, or without one its launcher's status."""
    return attempt.outside or (attempt.status in OUTSIDE_STATUSES and not attempt.kind and not attempt.silent)


def can_go_on(attempts: Sequence[Attempt], name: str) -> bool:
    """Tell whether a signal cut a job off while it was started that ends in order by it once it makes steps."""
    return name in REQUEUE_SIGNALS and not attempts[-1].steps and any(one.steps for one in attempts)


def decide_after_signal(found: Decision, name: str, attempts: Sequence[Attempt]) -> Decision:
    """Return what to do instead of `found` where a signal came, which asks the whole job to end."""
    is_again, is_cut_off = found.action is Action.AGAIN, is_from_outside(attempts[-1]) and can_go_on(attempts, name)
    if is_cut_off or (is_again and name in REQUEUE_SIGNALS and any(one.steps for one in attempts)):
        return Decision(Action.REQUEUE, f"{name} came, and the job can go on", without=found.without)
    return Decision(Action.STOP, f"{name} came", without=found.without) if is_again else found


def choose_nodes(former: Sequence[str], pool: Sequence[str], out: Collection[str], limits: Limits) -> tuple[str, ...]:
    """Return the nodes for the next attempt, the `former` ones first; none if fewer are left than are needed."""
    left = [node for node in dict.fromkeys((*former, *pool)) if node not in out][:limits.nodes]
    chosen = frozenset(left)
    return tuple(node for node in pool if node in chosen) if len(left) >= limits.min_nodes else ()


def find_reason_to_stop(attempts: Sequence[Attempt]) -> str:
    """Return why it makes no sense to try again, empty if it does."""
    last = attempts[-1]
    if last.status == EXIT_USAGE and not last.kind:
        return f"status {EXIT_USAGE}, which means a wrong command line"
    if last.status == EXIT_CANNOT_START and not last.kind and len(attempts) == 1:
        return f"status {EXIT_CANNOT_START}, by which mpiddp says that the job cannot start"
    if last.status == EXIT_OUTPUT_LOST and not last.kind:
        return f"status {EXIT_OUTPUT_LOST}, by which mpiddp says that output was lost; no rank failed"
    if len(attempts) > 1 and (how := describe_same_failure(attempts[-2], last)):
        return f"two attempts ended alike, {how}: {last.reason}"
    return ""


def describe_same_failure(before: Attempt, last: Attempt) -> str:
    """Return in words how an attempt ended as the one before and got no further, as the next one will; else nothing."""
    if (before.status, before.kind, before.where) != (last.status, last.kind, last.where):
        return ""
    if VARYING.sub("#", before.cause) != VARYING.sub("#", last.cause):
        return ""
    if last.has_progressed is not None:
        return "" if last.has_progressed else "with no checkpoint written between"
    if before.steps and last.steps is not None:
        words = f"after {last.steps:,} steps {GOES_ON}"
        return words if last.steps in (0, before.steps) else ""
    longer = max(before.seconds, last.seconds)
    if before.host != last.host and last.kind in EXTERNAL_KINDS and longer > LONG_ATTEMPT_S:
        return ""
    return f"after about the same time {GOES_ON}" if abs(before.seconds - last.seconds) <= LENGTH_TOLERANCE * longer else ""


def find_suspects(attempts: Sequence[Attempt], pool: Sequence[str]) -> list[Suspect]:
    """Return the nodes that evidence speaks against, in the order in which they were found."""
    found: dict[str, Suspect] = {}
    node_of = make_node_lookup(pool)
    faults: dict[str, list[int | None]] = {}  # the ranks at fault, of each host
    for number, one in enumerate(attempts):
        told = {host: f"{host} does not answer" for host in one.silent}
        if one.rank is not None and not one.outside:
            is_bug = number > 0 and bool(describe_same_failure(attempts[number - 1], one))
            if one.device and was_on_other_node(attempts[number - 1:number], one) and is_bug:
                found.pop(node_of(attempts[number - 1].host), None)
            elif one.device:
                told.setdefault(one.host, f"a device of {one.host} is at fault: {shortened(one.device, 200)}")
            elif one.kind in EXTERNAL_KINDS and OUT_OF_MEMORY not in one.cause and not one.silent:
                faults.setdefault(one.host, []).append(one.rank)
                here, in_all = faults[one.host], sum(map(len, faults.values()))
                plainly = len(here) == in_all and len(pool) > 1 and not is_bug
                if len(set(here)) > 1 and (plainly
                                           or expect_by_chance(len(here), in_all, len(pool)) < FALSE_EXCLUSION_BUDGET):
                    told[one.host] = f"{len(here)} of {in_all} faults were on {one.host}, with different ranks"
        for host, evidence in told.items():
            if node := node_of(host):
                found.setdefault(node, Suspect(node, evidence, number))
    return list(found.values())


def make_node_lookup(pool: Sequence[str]) -> Callable[[str], str]:
    """Return what gives the node that a rank calls by its name, or by the first part of it, if no other has that."""
    times = Counter(map(strip_domain, pool))
    known = {**{strip_domain(node): node for node in pool if times[strip_domain(node)] == 1},
             **{node: node for node in pool}}
    return lambda host: known.get(host) or known.get(strip_domain(host), "")


def strip_domain(host: str) -> str:
    """Return a host's name without its domain; an address stays whole."""
    first = host.partition(".")[0]
    return host if first.isdecimal() else first


def find_device_fault(error: str) -> str:
    """Return the line of an error by which a device is at fault, empty if none is."""
    return next((line.strip() for line in error.splitlines()
                 if has_phrase(line, (*BROKEN_DEVICE_WORDS, *UNREADY_DEVICE_WORDS))), "")


def has_phrase(text: str, phrases: Sequence[str]) -> bool:
    """Tell whether one of the phrases is in a text."""
    return any(phrase in text.lower() for phrase in phrases)


def was_on_other_node(before: Sequence[Attempt], last: Attempt) -> bool:
    """Tell whether a device that is said not to be ready was on another node in the attempt before."""
    return not has_phrase(last.device, BROKEN_DEVICE_WORDS) and any(one.device and one.host != last.host
                                                                    for one in before)


def expect_by_chance(here: int, faults: int, nodes: int) -> float:
    """Return how many of so many nodes, all alike, are expected to have so many of all faults, or more."""
    mean = faults / max(1, nodes)
    few = sum(math.exp(-mean) * mean**count / math.factorial(count) for count in range(here))
    return nodes * max(0.0, 1 - few)
