"""The restart decision: what to do after a job's attempts. Pure functions: no I/O, no clock."""

from __future__ import annotations

import enum
import math
import re
import signal
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ..base.text import format_duration, truncate_middle
from ..failure.root_cause import OUT_OF_MEMORY, ReportKind
from ..systems.statuses import (
    EXIT_CANNOT_START,
    EXIT_INTERRUPTED,
    EXIT_OUTPUT_LOST,
    EXIT_REQUEUE,
    EXIT_TERMINATED,
    EXIT_USAGE,
    find_explanation,
)

MIN_ATTEMPT_S = 30.0  # for a start and a few steps; no attempt starts with less time left
LENGTH_TOLERANCE = 0.25  # largest relative difference of two attempts that count as equally long
START_VARIATION_S = 5.0  # between two starts of the same job: they count as equally long, too
LONG_ATTEMPT_S = 600.0  # attempts longer than this are never "the same failure by coincidence"
MAX_FRUITLESS_STARTS = 2  # in a row, each stopped before its first step
BROKEN_DEVICE_WORDS = (  # in errors of CUDA, NCCL and drivers that a device causes, never the script
    "uncorrectable ecc", "ecc error", "fallen off the bus", "hardware stack error", "cudaerrorhardwarestackerror",
    "nvlink error", "nvlink or a hardware error", "nvrm: xid",
)
UNREADY_DEVICE_WORDS = (  # in errors about an unusable device, which the script may have caused
    "cudaerrordevicesunavailable", "busy or unavailable", "cuda driver initialization failed",
    "cudaerrorsystemnotready", "system not yet initialized",
)
VARYING = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, ports, sizes: they differ between two errors with the same cause
OUTSIDE_STATUSES = (EXIT_INTERRUPTED, EXIT_TERMINATED, signal.SIGTERM)  # of a launcher; the last one is MPICH's
EXTERNAL_KINDS = (ReportKind.PROCESS_EXIT, ReportKind.UNREACHABLE)  # a faulty node may cause these, too
NAME_CHECKPOINTS = "(if the job continues from checkpoints, name them with --progress-file)"
REQUEUE_SIGNALS = ("SIGUSR1", "SIGTERM")  # a job that calls should_stop() ends with status 75 at these


class Attempt(NamedTuple):
    """An attempt to run the job, and how it ended.

    It ran on `nodes` for `seconds`, and its launcher ended with `status`. From its report: `kind`, `cause`, `where` and
    `signal` as in failure/root_cause.py, the `rank` and its `host`. Without a report all are empty, and `rank` is None;
    so are `host` and `rank` if no rank is to blame. `outside`: a signal was sent to the whole job. `device` is the line
    of its error that names a faulty device. `silent` are the nodes that did not answer a probe afterwards, `drained`
    are those of the allocation that the scheduler gives to no new job. `steps` is None if the job counts none.
    `has_progressed`: it wrote a checkpoint, None without --progress-file.
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
    drained: tuple[str, ...] = ()
    steps: int | None = None
    has_progressed: bool | None = None

    @property
    def has_stopped(self) -> bool:
        """Return whether all ranks agreed to stop; a rank can also fail with that status."""
        return self.status == EXIT_REQUEUE and not self.kind

    @property
    def is_explained(self) -> bool:
        """Return whether mpiddp has printed why it ended, and no rank has failed."""
        return bool(find_explanation(self.status)) and not self.kind

    @property
    def reason(self) -> str:
        """Why it ended, in one line."""
        if self.status == 0:
            return "success"
        if self.has_stopped:
            return "all ranks agreed to stop" if self.steps != 0 else "it had to stop before its first step"
        if self.is_explained:
            return f"{find_explanation(self.status)} (exit status {self.status}), see above"
        who = f"rank {self.rank} on {self.host}: " if self.rank is not None else ""
        return who + (truncate_middle(self.cause, 200) or f"exit status {self.status} without a failure report")


class Limits(NamedTuple):
    """The limits: restarts, nodes and their minimum, and the seconds left until the end of the allocation.

    The last `requeues` starts of the job before this one made no progress, and were requeued. The last `fruitless`
    starts before this one stopped, with status 75, before their first step.
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
    """What to do next, why, and on which `nodes`. The nodes in `without` are excluded from now on."""

    action: Action
    why: str
    nodes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Suspect(NamedTuple):
    """A node to exclude, the evidence against it, and the number of the attempt that showed it."""

    host: str
    evidence: str
    attempt: int


def decide(attempts: Sequence[Attempt], pool: Sequence[str], limits: Limits) -> Decision:
    """Return what to do after the last of `attempts`; `pool` are all nodes of the allocation."""
    last = attempts[-1]
    if last.status == 0:
        return Decision(Action.DONE, "")
    if last.has_stopped:
        return decide_after_stop(attempts, limits)
    if is_from_outside(last):
        why = f"the job received {last.signal or 'a signal'} from outside"
        return Decision(Action.REQUEUE if can_go_on(attempts, last.signal) else Action.STOP, why)
    suspects = find_suspects(attempts, pool)
    new = tuple(suspect.host for suspect in suspects if suspect.attempt == len(attempts) - 1)
    if not new and (why := find_reason_to_stop(attempts)):
        return Decision(Action.STOP, why)
    if len(attempts) > limits.restarts:
        return Decision(Action.STOP, f"reached the limit, --max-restarts {limits.restarts}", without=new)
    if limits.left_s < MIN_ATTEMPT_S:
        why = f"only {format_duration(max(0.0, limits.left_s))} left of the walltime, too little for another attempt"
        return decide_requeue(why, new, attempts, limits)
    nodes = choose_nodes(last.nodes, pool, {suspect.host for suspect in suspects}, limits)
    evidence = "; ".join(suspect.evidence for suspect in suspects if suspect.host in new)
    if not nodes:
        needed = f"too few nodes: {limits.min_nodes} needed, {len(pool) - len(suspects)} of {len(pool)} left"
        return decide_requeue("; ".join(filter(None, (evidence, needed))), new, attempts, limits)
    fewer = f"continuing with {len(nodes)} of {limits.nodes} nodes" if len(nodes) < limits.nodes else ""
    healthy = f"no evidence against {last.host}; reusing it" if last.host and len(pool) > 1 else ""
    why = "; ".join(filter(None, (evidence, fewer))) or healthy
    return Decision(Action.AGAIN, why, nodes, new)


def decide_requeue(why: str, without: tuple[str, ...], attempts: Sequence[Attempt], limits: Limits) -> Decision:
    """Requeue the job, or end it if it was requeued often enough and has made no progress."""
    if any(has_got_further(attempt) for attempt in attempts) or limits.requeues < max(1, limits.restarts):
        return Decision(Action.REQUEUE, why, without=without)
    times = f"{limits.requeues} time{'s' * (limits.requeues != 1)}"
    why += f"; already requeued {times} in a row without progress"
    return Decision(Action.STOP, why, without=without)


def has_got_further(attempt: Attempt) -> bool:
    """Return whether an attempt has made progress: a checkpoint, or without --progress-file a step.

    The step in which an attempt failed is not done; a checkpoint from before the first step does not count.
    """
    if attempt.steps == 1:
        return False
    return bool(attempt.steps) if attempt.has_progressed is None else attempt.has_progressed


def decide_after_stop(attempts: Sequence[Attempt], limits: Limits) -> Decision:
    """Return what to do after all ranks agreed to stop."""
    if not is_fruitless(attempts):
        return Decision(Action.REQUEUE, "the job stopped and can continue")
    if limits.fruitless + 1 < MAX_FRUITLESS_STARTS:
        return Decision(Action.REQUEUE, "the job had to stop before its first step; after "
                        f"{MAX_FRUITLESS_STARTS} such starts in a row it is not requeued")
    return Decision(Action.STOP, f"{MAX_FRUITLESS_STARTS} starts in a row had to stop before their first step: "
                    "--stop-before, or the batch system's signal before the walltime, leaves too little time to train")


def is_fruitless(attempts: Sequence[Attempt]) -> bool:
    """Return whether the last attempt of a start had to stop before its first step, and no earlier one made any."""
    return attempts[-1].has_stopped and attempts[-1].steps == 0 and not any(attempt.steps for attempt in attempts)


def is_from_outside(attempt: Attempt) -> bool:
    """Return whether a signal was sent to the whole job: from its report, or else from its launcher's status.

    A node that shuts down sends SIGTERM to its ranks, and then does not answer.
    """
    return not attempt.silent and (attempt.outside or (attempt.status in OUTSIDE_STATUSES and not attempt.kind))


def can_go_on(attempts: Sequence[Attempt], name: str) -> bool:
    """Return whether signal `name` ended a job during its start that handles it once it makes steps."""
    return name in REQUEUE_SIGNALS and not attempts[-1].steps and any(attempt.steps for attempt in attempts)


def decide_after_signal(decision: Decision, name: str, attempts: Sequence[Attempt]) -> Decision:
    """Return `decision`, or what replaces it after a signal that asks the whole job to end.

    After Ctrl-C or SIGHUP the job is requeued only if all its ranks had agreed to stop.
    """
    last = attempts[-1]
    may_replace = decision.action is Action.AGAIN or (decision.action is Action.REQUEUE and (
        bool(last.outside and last.silent) or (name not in REQUEUE_SIGNALS and not last.has_stopped)))
    is_cut_off = is_from_outside(last) and can_go_on(attempts, name)
    if is_cut_off or (may_replace and name in REQUEUE_SIGNALS and any(attempt.steps for attempt in attempts)):
        return Decision(Action.REQUEUE, f"received {name}; the job can continue", without=decision.without)
    return Decision(Action.STOP, f"received {name}", without=decision.without) if may_replace else decision


def choose_nodes(former: Sequence[str], pool: Sequence[str], suspects: Collection[str],
                 limits: Limits) -> tuple[str, ...]:
    """Return the nodes for the next attempt, preferring the `former` ones; none if too few are left."""
    left = [node for node in dict.fromkeys((*former, *pool)) if node not in suspects][:limits.nodes]
    chosen = frozenset(left)
    return tuple(node for node in pool if node in chosen) if len(left) >= limits.min_nodes else ()


def find_reason_to_stop(attempts: Sequence[Attempt]) -> str:
    """Return why a restart makes no sense, empty if it does."""
    last = attempts[-1]
    if last.status == EXIT_USAGE and last.is_explained:
        return "the same command line would fail again"
    if last.status == EXIT_CANNOT_START and last.is_explained and len(attempts) == 1:
        return "it would not start the second time either"
    if last.status == EXIT_OUTPUT_LOST and last.is_explained:
        return "no rank failed"
    if len(attempts) > 1 and (how := describe_same_failure(attempts[-2], last)):
        return f"two attempts in a row failed in the same way {how}: {last.reason}"
    return ""


def describe_same_failure(before: Attempt, last: Attempt) -> str:
    """Return how the last attempt repeated the failure before it, as part of a message; empty if it did not."""
    if (before.status, before.kind, before.where) != (last.status, last.kind, last.where):
        return ""
    if VARYING.sub("#", before.cause) != VARYING.sub("#", last.cause):
        return ""
    if last.has_progressed is not None:
        return "" if last.has_progressed else "without a new checkpoint"
    if before.steps and last.steps is not None:
        steps = f"{last.steps:,} step{'s' * (last.steps != 1)}"
        return f"after {steps} {NAME_CHECKPOINTS}" if last.steps in (0, before.steps) else ""
    longer_s = max(before.seconds, last.seconds)
    if before.host != last.host and last.kind in EXTERNAL_KINDS and longer_s > LONG_ATTEMPT_S:
        return ""
    is_equally_long = abs(before.seconds - last.seconds) <= max(LENGTH_TOLERANCE * longer_s, START_VARIATION_S)
    return f"after about the same time {NAME_CHECKPOINTS}" if is_equally_long else ""


def find_suspects(attempts: Sequence[Attempt], pool: Sequence[str]) -> list[Suspect]:
    """Return the nodes with evidence against them, in the order of the attempts."""
    suspects: dict[str, Suspect] = {}
    node_of = make_node_lookup(pool)
    faults: list[tuple[str, int]] = []  # which a node may have caused: host and rank
    for number, attempt in enumerate(attempts):
        evidence = {**{host: f"{host} is drained" for host in attempt.drained},
                    **{host: f"{host} does not answer, or is no longer part of the job" for host in attempt.silent}}
        if attempt.rank is not None and not attempt.outside:
            is_bug = number > 0 and bool(describe_same_failure(attempts[number - 1], attempt))
            if attempt.device and was_on_other_node(attempts[number - 1:number], attempt) and is_bug:
                suspects.pop(node_of(attempts[number - 1].host), None)
            elif attempt.device:
                evidence.setdefault(
                    attempt.host, f"faulty device on {attempt.host}: {truncate_middle(attempt.device, 200)}")
            elif attempt.kind in EXTERNAL_KINDS and OUT_OF_MEMORY not in attempt.cause and not attempt.silent:
                faults.append((attempt.host, attempt.rank))
                hosts, ranks = map(set, zip(*faults, strict=True))
                if len(pool) > 1 and len(hosts) == 1 and len(ranks) > 1 and not is_bug:
                    count = len(faults)
                    evidence[attempt.host] = f"{count} of {count} faults on {attempt.host}, in different ranks"
        for host, reason in evidence.items():
            if node := node_of(host):
                suspects.setdefault(node, Suspect(node, reason, number))
    return list(suspects.values())


def make_node_lookup(pool: Sequence[str]) -> Callable[[str], str]:
    """Return a function that finds a node by its hostname, or by its unique first part; empty for none."""
    counts = Counter(map(strip_domain, pool))
    known = {**{strip_domain(node): node for node in pool if counts[strip_domain(node)] == 1},
             **{node: node for node in pool}}
    return lambda host: known.get(host) or known.get(strip_domain(host), "")


def strip_domain(host: str) -> str:
    """Return a hostname without its domain; an address is unchanged."""
    first = host.partition(".")[0]
    return host if first.isdecimal() else first


def find_device_fault(error: str) -> str:
    """Return the line of an error that names a faulty device, empty if there is none."""
    phrases = (*BROKEN_DEVICE_WORDS, *UNREADY_DEVICE_WORDS)
    return next((line.strip() for line in error.splitlines() if has_phrase(line, phrases)), "")


def has_phrase(text: str, phrases: Sequence[str]) -> bool:
    """Return whether a text contains one of the phrases."""
    return any(phrase in text.lower() for phrase in phrases)


def was_on_other_node(before: Sequence[Attempt], last: Attempt) -> bool:
    """Return whether an unready device follows one on another node in the attempt before."""
    return not has_phrase(last.device, BROKEN_DEVICE_WORDS) and any(
        attempt.device and attempt.host != last.host for attempt in before)
