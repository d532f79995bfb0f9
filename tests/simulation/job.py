"""One simulated job with faults that a seed draws, and what must hold of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from mpiddp.agent.timeouts import (
    DECISION_TIMEOUT_S,
    DEPUTY_TIMEOUT_S,
    DESCENDANTS_TIMEOUT_S,
    FINAL_EXIT_TIMEOUT_S,
    JOB_OVER_TIMEOUT_S,
    LATE_AGENTS_TIMEOUT_S,
    LOST_COORDINATOR_TIMEOUT_S,
    PRINT_TIMEOUT_S,
)
from mpiddp.failure.root_cause import NOBODY, ROOT_CAUSE_WAIT_S, SAME_CAUSE_WAIT_S, ReportKind, RootCause
from tests.simulation.world import (
    COLLECTIVE_S,
    LAUNCHERS,
    LOST_LINK_S,
    LOST_LINK_SPREAD_S,
    MOST_CONNECTING_S,
    Rank,
    Shape,
    World,
)

FIRST_FAULT_S = 0.36  # all ranks have joined by then; the agents of some have not
EXIT_TIMEOUT_S, SNAPSHOT_S = 4.0, 2.0
MARGIN_S = 1.5
KINDS = ("raise", "exit", "SIGKILL", "SIGSEGV", "SIGSTOP", "agent", "node", "all ranks", "slow", "partition", "stop",
         "vanish", "late crash")
MANY_KINDS = ("raise", "SIGKILL", "stop", "all ranks", "agent", "vanish", "late crash")
CRASHES = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV}
STATUSES = {"raise": 1, "exit": 7, "SIGKILL": 137, "SIGSEGV": 139, "SIGSTOP": 1, "agent": 137, "late crash": 139,
            "all ranks": 1}


class Fault(NamedTuple):
    """What goes wrong: at which rank, how, and when, in seconds from the start."""

    kind: str
    rank: int
    at_s: float


class Run(NamedTuple):
    """A simulated job that has run: its shape, its faults, and what of it must not be."""

    shape: Shape
    faults: tuple[Fault, ...]
    violations: list[str]
    ended_s: float


def draw_shape(random: Random) -> Shape:
    """Return a job."""
    return Shape(nodes=random.randint(1, 4), per_node=random.randint(1, 3), launcher=random.choice(list(LAUNCHERS)),
                 grace_s=random.choice([0.5, 5.0]), script_s=random.uniform(0.3, 4.0),
                 slow_s=random.choice([0.02, 0.3]), collectives=random.random() < 0.7,
                 busy=random.choice([0.0, 0.0, 0.5, 1.0]), leaving_s=random.choice([0.05, 4.0]),
                 watchdog=random.random() < 0.2, exit_timeout_s=EXIT_TIMEOUT_S)


def draw_faults(random: Random, shape: Shape) -> tuple[Fault, ...]:
    """Return what goes wrong in a job, which may be nothing."""
    number = random.choice([0, 1, 1, 1, 2])
    return tuple(Fault(random.choice(KINDS), random.randrange(shape.ranks),
                       FIRST_FAULT_S + random.uniform(0, shape.script_s)) for _ in range(number))


def simulate(seed: int, tell: Callable[[str], object] | None = None) -> Run:
    """Run the job of a seed; `tell` gets each thing that happens in it, in words."""
    random = Random(seed)
    shape = draw_shape(random)
    faults = draw_faults(random, shape)
    world = World(shape, random, tell)
    for fault in faults:
        world.schedule(fault.at_s, inject, world, fault)
    world.run(until_s=shape.script_s + 3 * LOST_LINK_S)
    return Run(shape, faults, find_violations(world), world.now)


def simulate_many(kind: str, ranks: int, seed: int) -> list[str]:
    """Return what must not be of a job of many ranks with one fault."""
    random = Random(seed)
    world = World(Shape(ranks // 8 + 1, 8, script_s=2.0, exit_timeout_s=EXIT_TIMEOUT_S), random)
    world.schedule(1.0, inject, world, Fault(kind, random.randrange(1, ranks), 1.0))
    world.run(until_s=3 * LOST_LINK_S)
    return find_violations(world)


def inject(world: World, fault: Fault) -> None:
    """Let something go wrong, and note it if it has an effect."""
    rank, random = world.ranks[fault.rank], world.random
    world.trace("FAULT", fault)
    works = rank.alive and not rank.left
    others_notice = world.shape.collectives and not world.shape.busy and len(world.ranks) > 1 and not any(
        earlier.kind in ("SIGSTOP", "node") for _, earlier in world.effects) and not any(
        other.script_over for other in world.ranks)
    match fault.kind:
        case "raise" | "exit":
            works = rank.fail(fault.kind, STATUSES[fault.kind], random.choice([0.0, 0.0, 0.3, 9.0]))
        case "SIGKILL" | "SIGSEGV" if works:
            rank.end(CRASHES[fault.kind])
        case "SIGSTOP":
            works = works and others_notice and not rank.reporting
            if works:
                rank.stopped = True
                world.on_stall(rank)
        case "agent":
            works = rank.agent.alive and not rank.left
            if works:
                rank.agent.take_signal(signal.SIGKILL)
        case "node":
            works = works and world.shape.nodes > 1 and others_notice
            if works:
                random.choice([world.lose_node, world.isolate])(rank.node)
        case "all ranks":
            works = False  # before one of them does
            for other in world.ranks:
                world.schedule(random.uniform(0, 0.02), fail_with_others, world, fault, other)
        case "stop":
            works = any(other.alive and not other.left for other in world.ranks)
            if works:
                world.stop(random.choice(world.launcher.stops))
        case "vanish":  # os._exit(0): a fault if others wait for it
            works = works and rank.can_act and not rank.reporting
            if works:
                rank.end(0)
                world.vanished.append((world.now, fault))
            works = False
        case "late crash":
            rank.crashes_late |= works
            works = False
        case "partition":
            world.cut_off[rank.node] = world.now + random.uniform(0.1, COLLECTIVE_S - 0.1)
            works = False
        case "slow":
            world.slow_nodes.add(rank.node)
            works = False
    if works:
        note_effect(world, fault)
        world.hold_busy_ranks(rank)


def note_effect(world: World, fault: Fault) -> None:
    """Note a fault that has an effect."""
    world.effects.append((world.now, fault))


def fail_with_others(world: World, fault: Fault, rank: Rank) -> None:
    """Let a rank fail by an error that all have; note it at the first."""
    if rank.fail("the same for all", 1) and not any(earlier.kind == fault.kind for _, earlier in world.effects):
        note_effect(world, fault)


def find_violations(world: World) -> list[str]:
    """Return what of a job that has run must not be, in words."""
    for rank in world.ranks:  # which the script's end has made a fault
        if rank.crashes_late and rank.left and rank.wait_status == signal.SIGSEGV and rank.gone_s is not None:
            world.effects.append((rank.gone_s, Fault("late crash", rank.number, rank.gone_s)))
    world.effects += world.vanished if world.printed else []
    world.effects.sort()
    violated = [f"rank {rank.number} lives" for rank in world.ranks if rank.alive]
    violated += [f"the agent of rank {agent.number} lives" for agent in world.agents if agent.alive]
    if not world.effects:
        violated += [f"agent {agent.number} ended with {agent.status} in a job without a fault"
                     for agent in world.agents if agent.status != 0]
        return violated + [f"printed in a job without a fault: {line}" for line in (*world.printed, *world.said)]
    violated += find_late(world)
    if len({report.by for report in world.printed}) < len(world.printed):
        violated.append(f"printed twice: {world.printed}")
    if world.isolated is not None and len(world.effects) == 1:
        violated += find_wrong_in_isolation(world)
    if world.coordinator_is_lost:
        return violated + find_wrong_of_loss(world)
    if not is_printable(world):
        return violated
    printed = [report for report in world.printed if not report.is_isolated]
    if len(printed) != 1 and not has_doubtful_printer(world):
        return [*violated, f"{len(printed)} reports: {printed}"]
    root_cause = printed[0].root_cause
    violated += find_misjudged(root_cause, find_first(world))
    statuses = {agent.status for agent in world.agents
                if agent.status is not None and agent.rank.node != world.isolated}
    return violated + [f"agents exit with {statuses}, not {root_cause.first.status}"
                       for _ in range(statuses != {root_cause.first.status} and not has_killing_launcher(world))]


def find_wrong_of_loss(world: World) -> list[str]:
    """Return what must not be of a job that has lost its coordinator, by that fault alone: its deputy reports it."""
    printed = [report for report in world.printed if not report.is_isolated]
    has_time = world.kills_s is None or bool(printed and printed[0].at_s < world.kills_s)
    (_, fault), *more = world.effects
    has_deputy = any(world.agents[rank].status is not None for rank in world.deputies)  # which was not lost, too
    is_survived = any(agent.status is not None for agent in world.agents)
    if not (printed or world.said) and has_time and is_survived and (has_deputy or not more):
        return ["nobody says that the coordinator is lost"]
    is_first = fault.rank == 0 if fault.kind == "agent" else fault.kind == "node" and world.ranks[fault.rank].node == 0
    if more or not is_first or not has_deputy or not has_time:
        return []
    # Agents that it has not admitted, or that got no answer, may say so before the deputy's connection is lost.
    others = [line for line in world.said if "has no coordinator" not in line and "no answer within" not in line]
    if [report.root_cause.first.rank for report in printed] != [0] or others:
        return [f"the loss of the coordinator is reported by {printed} and {others}"]
    return []


def find_wrong_in_isolation(world: World) -> list[str]:
    """Return what a node must not print that has lost its network: that another node is to blame."""
    printed = [report for report in world.printed if report.is_isolated]
    if len(printed) > 1:
        return [f"{len(printed)} reports on the lost node: {printed}"]
    named = {(report.root_cause.first.rank, report.root_cause.first.kind) for report in printed}
    seen = {(0 if world.isolated or world.shape.nodes > 2 else NOBODY, ReportKind.UNREACHABLE)}
    return [f"the lost node reports {printed}"] * bool(named - seen)


def is_printable(world: World) -> bool:
    """Return whether the launcher leaves the time for a report."""
    kills_s = world.kills_s
    if world.was_stopped and kills_s is not None:
        kills_s = min(kills_s, world.effects[0][0] + (world.launcher.stop_kill_s or 0.0))
    return kills_s is None or bool(world.printed and world.printed[0].at_s < kills_s)


def has_killing_launcher(world: World) -> bool:
    """Return whether the launcher has ended agents before they could agree."""
    return world.kills_s is not None and (world.was_stopped or any(
        fault.kind in ("agent", "node") for _, fault in world.effects))


def has_doubtful_printer(world: World) -> bool:
    """Return whether an agent that has printed was lost before it could say so: then another one prints, too."""
    return any(fault.kind in ("agent", "node") for _, fault in world.effects[1:]) and len(world.printed) == 2


def find_late(world: World) -> list[str]:
    """Return which agents have ended later than is promised."""
    shape = world.shape
    (_, fault), *others = world.effects
    longest_s = (ROOT_CAUSE_WAIT_S + PRINT_TIMEOUT_S + LATE_AGENTS_TIMEOUT_S + 2 * DESCENDANTS_TIMEOUT_S + shape.grace_s
                 + FINAL_EXIT_TIMEOUT_S + MARGIN_S)
    if others or fault.kind in ("SIGSTOP", "node", "vanish", "stop"):
        longest_s += shape.script_s + EXIT_TIMEOUT_S + SNAPSHOT_S  # until a rank that stands still is missed
    if world.coordinator_is_lost or world.isolated is not None:
        longest_s += DECISION_TIMEOUT_S + LOST_COORDINATOR_TIMEOUT_S + shape.grace_s + FINAL_EXIT_TIMEOUT_S
    if (world.coordinator_is_lost and world.lost_nodes) or world.isolated is not None:
        # ranks that miss nobody else learn it from the kernel
        longest_s += LOST_LINK_S + LOST_LINK_SPREAD_S + JOB_OVER_TIMEOUT_S + DEPUTY_TIMEOUT_S
    limit_s = world.effects[-1][0] + longest_s + 8 * shape.slow_s * bool(world.slow_nodes)
    limit_s += COLLECTIVE_S * bool(world.cut_off)
    return [f"agent {agent.number} ended at {agent.gone_s:.2f} s, not by {limit_s:.2f} s" for agent in world.agents
            if agent.gone_s is not None and agent.gone_s > limit_s]


def find_first(world: World) -> Fault | None:
    """Return the fault that the report has to name, None if others may be named."""
    (at_s, fault), *others = world.effects
    if world.slow_nodes or world.cut_off or (fault.kind not in STATUSES and fault.kind != "stop"):
        return None
    if (others or fault.kind == "agent") and at_s < FIRST_FAULT_S + MOST_CONNECTING_S:  # it may connect late, or never
        return None
    if fault.kind == "SIGSTOP":  # is noticed late, by others
        return None if others else fault
    return None if any(later_s < at_s + SAME_CAUSE_WAIT_S + 0.01 for later_s, _ in others) else fault


def find_misjudged(root_cause: RootCause, fault: Fault | None) -> list[str]:
    """Return what is wrong with the report of the rank that was taken for the first, and with the status."""
    first = root_cause.first
    if fault is None:
        return []
    if fault.kind == "stop":
        return [] if root_cause.outside else [f"{first} for a signal from outside"]
    violated = []
    if first.rank != fault.rank and fault.kind != "all ranks":
        violated.append(f"rank {first.rank} is named, but rank {fault.rank} was first")
    if first.status != STATUSES[fault.kind]:
        violated.append(f"status {first.status} of {fault}")
    return violated
