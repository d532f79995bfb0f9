"""One simulated job with faults that a seed draws, and what must hold of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from mpiddp.agent.coordinator import PRINT_TIMEOUT_S
from mpiddp.agent.protocol import FINAL_EXIT_TIMEOUT_S, LAUNCHER_KILL_TIMEOUT_S
from mpiddp.agent.watcher import DECISION_TIMEOUT_S, LEAVE_TIMEOUT_S
from mpiddp.failure.root_cause import ROOT_CAUSE_WAIT_S, SAME_CAUSE_WAIT_S, Report
from tests.simulation.world import COLLECTIVE_S, EXIT_TIMEOUT_S, LOST_LINK_S, Rank, Shape, World

NOTICED_S = COLLECTIVE_S + EXIT_TIMEOUT_S + 0.5  # a rank that stands still is missed by then
MARGIN_S = 1.5
KINDS = ("raise", "exit", "SIGKILL", "SIGSEGV", "SIGSTOP", "with its agent", "its agent", "node", "all ranks",
         "slow", "partition")
CRASHES = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV}
STATUSES = {"raise": 1, "exit": 7, "SIGKILL": 137, "SIGSEGV": 139, "SIGSTOP": 1}


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
    by_srun = random.random() < 0.5
    exits = random.random() < 0.5
    return Shape(nodes=random.randint(1, 4), per_node=random.randint(1, 3), exits=exits, by_srun=by_srun,
                 kills_s=random.choice([0.0, 0.05, 0.5, 2.0]) if exits or random.random() < 0.8 else None,
                 grace_s=random.choice([0.5, 5.0]), script_s=random.uniform(0.3, 4.0),
                 slow_s=random.choice([0.02, 0.3]), collectives=random.random() < 0.7,
                 busy=random.choice([0.0, 0.0, 0.5, 1.0]), leaving_s=random.choice([0.05, 4.0]),
                 watchdog=random.random() < 0.2)


def draw_faults(random: Random, shape: Shape) -> tuple[Fault, ...]:
    """Return what goes wrong in a job, which may be nothing."""
    number = random.choice([0, 1, 1, 1, 2])
    return tuple(Fault(random.choice(KINDS), random.randrange(shape.ranks), 0.4 + random.uniform(0, shape.script_s))
                 for _ in range(number))


def simulate(seed: int, tell: Callable[[str], object] | None = None) -> Run:
    """Run the job of a seed; `tell` gets each thing that happens in it, in words."""
    random = Random(seed)
    shape = draw_shape(random)
    faults = draw_faults(random, shape)
    world = World(shape, random, tell)
    for fault in faults:
        world.schedule(fault.at_s, inject, world, fault)
    world.run(until_s=shape.script_s + 3 * LOST_LINK_S)
    return Run(shape, faults, violations(world), world.now)


def inject(world: World, fault: Fault) -> None:
    """Let something go wrong, and note it if it has an effect."""
    rank, random = world.ranks[fault.rank], world.random
    world.trace("FAULT", fault)
    works = rank.alive and not rank.left and not all(other.script_over for other in world.ranks)
    others_notice = world.shape.collectives and not world.shape.busy and not any(
        earlier.kind in ("SIGSTOP", "node") for _, earlier in world.effects)
    match fault.kind:
        case "raise" | "exit":
            works = rank.fail(fault.kind, STATUSES[fault.kind], random.choice([0.0, 0.0, 0.3, 9.0]))
        case "SIGKILL" | "SIGSEGV" if works:
            rank.die(CRASHES[fault.kind])
        case "SIGSTOP":
            works = works and not rank.script_over and len(world.ranks) > 1 and others_notice and rank.agent.alive
            if works:
                rank.stopped = True
                world.on_stall(rank)
        case "node":
            at_end = any(other.script_over for other in world.ranks if other.node == rank.node)
            works = works and world.shape.nodes > 1 and others_notice and not at_end
            if works:
                world.lose_node(rank.node)
        case "all ranks":
            works = False  # before one of them does
            for other in world.ranks:
                world.schedule(random.uniform(0, 0.02), fail_with_others, world, fault, other)
        case "with its agent" if works:
            if rank.number == 0:
                world.note_coordinator_lost()
            world.doubt(*rank.names)
            rank.die(signal.SIGKILL)
            world.agents[rank.number].die()
        case "its agent":
            if works and not (rank.stopped or world.shape.busy or world.cut_off):
                if rank.number == 0:
                    world.note_coordinator_lost()
                world.doubt(rank.names[1])
                rank.agent.die()
                world.without_agent.add(rank.number)
            works = False
        case "partition":
            if not world.without_agent:
                world.cut_off[rank.node] = world.now + random.uniform(0.1, COLLECTIVE_S - 0.1)
            works = False
        case "slow":
            world.slow_nodes.add(rank.node)
            works = False
    if works:
        note_effect(world, fault)
        world.hold_busy_ranks(rank)


def note_effect(world: World, fault: Fault) -> None:
    """Note a fault that has an effect; nobody sees how a rank is killed whose agent was killed before."""
    is_unseen = fault.kind in CRASHES and fault.rank in world.without_agent
    world.effects.append((world.now, fault._replace(kind="with its agent") if is_unseen else fault))


def fail_with_others(world: World, fault: Fault, rank: Rank) -> None:
    """Let a rank fail by an error that all have; note it at the first."""
    if all(other.script_over for other in world.ranks):
        return
    if rank.fail("the same for all", 1) and not any(earlier.kind == fault.kind for _, earlier in world.effects):
        note_effect(world, fault)


def violations(world: World) -> list[str]:
    """Return what of a job that has run must not be, in words."""
    if not world.effects:
        violated = [f"rank {rank.number} ended with {rank.wait_status} in a job without a fault" for rank in world.ranks
                 if rank.wait_status != 0]
        return violated + [f"a report in a job without a fault: {line}" for line in (*world.printed, *world.said)]
    violated = [f"rank {rank.number} has not ended" for rank in world.ranks if rank.alive]
    violated += [f"the agent of rank {agent.number} has not ended" for agent in world.agents
              if agent.alive]
    violated += late(world)
    first = plainly_first(world)
    if world.coordinator_gone_s is None and not world.cut_off:
        reports = world.printed or world.doubtful
        if len(reports) != 1:
            violated.append(f"{len(reports)} reports: {reports}")
        elif first is not None:
            violated += misjudged(world, reports[0].verdict.first, first)
    elif first is not None and world.coordinator_gone_s is not None and first.kind in ("raise", "exit"):
        named = [report.verdict.first.rank for report in world.printed]
        violated += [] if first.rank in named else [f"rank {first.rank} was first, but reports name {named}"]
    return violated


def late(world: World) -> list[str]:
    """Return which ranks have ended later than is promised."""
    shape = world.shape
    (_, fault), *others = world.effects
    longest_s = ROOT_CAUSE_WAIT_S + PRINT_TIMEOUT_S + MARGIN_S
    if fault.kind in ("raise", "exit") or others:
        longest_s += shape.grace_s  # for the last words
    if shape.busy or others:
        longest_s += shape.grace_s + FINAL_EXIT_TIMEOUT_S
    if others or fault.kind in ("SIGSTOP", "node"):
        longest_s += NOTICED_S
    if world.coordinator_gone_s is not None:
        longest_s += max(DECISION_TIMEOUT_S, LAUNCHER_KILL_TIMEOUT_S) + shape.grace_s + FINAL_EXIT_TIMEOUT_S
    limit_s = world.effects[-1][0] + longest_s
    if world.slow_nodes:
        limit_s += 6 * shape.slow_s
    if world.cut_off:
        limit_s += COLLECTIVE_S
    leaving_s = LEAVE_TIMEOUT_S if world.coordinator_gone_s is not None else 0.0
    limits = [(rank, limit_s + leaving_s * rank.script_over) for rank in world.ranks]
    return [f"rank {rank.number} ended at {rank.gone_s:.2f} s, not by {latest_s:.2f} s" for rank, latest_s in limits
            if rank.gone_s is not None and rank.gone_s > latest_s]


def plainly_first(world: World) -> Fault | None:
    """Return the fault that the report has to name, None if others may be named."""
    (at_s, fault), *others = world.effects
    if world.slow_nodes or fault.kind not in STATUSES:
        return None
    if fault.kind == "SIGSTOP":  # is noticed late, by others
        return None if others else fault
    if fault.kind == "SIGKILL" and world.shape.by_srun and world.shape.kills_s is not None:
        return None  # srun kills all by the same signal, when it is ended itself
    return None if any(later_s < at_s + SAME_CAUSE_WAIT_S + 0.01 for later_s, _ in others) else fault


def misjudged(world: World, first: Report, fault: Fault) -> list[str]:
    """Return what is wrong with the report of the rank that was taken for the first, and with the status."""
    violated = []
    if first.rank != fault.rank:
        violated.append(f"rank {first.rank} is named, but rank {fault.rank} was first")
    if first.status != STATUSES[fault.kind]:
        violated.append(f"status {first.status} of {fault}")
    if len(world.effects) == 1 and not world.shape.watchdog and world.ended_with != STATUSES[fault.kind]:
        violated.append(f"the launcher's status is {world.ended_with}, not that of {fault}")
    return violated
