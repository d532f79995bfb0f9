"""The nodes of a job are measured before its script: rank 0 compares them, has some measure again, warns or refuses.

Of a check, this is what each rank does by itself; ways between ranks take longer, and are the command's to measure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..compare.doubt import doubt
from ..compare.figures import OWN, Figures, Finding, Who
from ..compare.judge import judge
from ..config import LaunchConfig
from ..environment import Place
from ..errors import LaunchError
from ..facts.devices import use_device
from ..facts.runtime import hostname
from ..facts.schedulers import find_scheduler
from ..join.rollcall import RollCall
from ..measure.machine import kind, machine, switch
from ..measure.own import Own, measure
from ..plan.words import LISTED, folded
from ..say import warn
from .crew import Turns
from .history import OwnPast

BUDGET_S = 0.4  # for each look of a rank
LOOKS = 2  # later ones, at what seems odd
MEETING, MEASURING = "looking at its machine", "measuring its node"


class Turn(NamedTuple):
    """When a rank measures: in its `own` of `total` turns. Nodes of one machine take turns."""

    own: int
    total: int


class Answer(NamedTuple):
    """What rank 0 says when all have had their turn: whether there is another look, and a part of this rank's in it."""

    again: bool = False
    measures: bool = False
    warnings: tuple[str, ...] = ()


def check_nodes(roll: RollCall, place: Place, device: str, config: LaunchConfig) -> None:
    """Measure this rank's part of its node, and print on rank 0 what is odd about nodes. Collective.

    Raises LaunchError `bad-node` or `slow-node` on every rank, if `config` is strict.
    """
    where = use_device(device)
    judgement = Judgement(roll.size, config)
    who = Who(hostname(), place.node_rank, place.local_rank, device, kind(where, torch.get_num_threads()),
              switch(os.environ))
    turns = roll.agree(MEETING, (who, machine()), judgement.give_turns)
    answer = Answer(again=True, measures=True)
    while answer.again:
        measures = answer.measures
        for turn in range(turns.total):
            own = measure(where, place.local_rank == 0, BUDGET_S) if measures and turn == turns.own else None
            answer = roll.agree(MEASURING, own, judgement.take)
    warn(answer.warnings)


class Judgement:
    """Rank 0's part in a check: it gives the ranks their turns, takes their figures, and judges."""

    def __init__(self, ranks: int, config: LaunchConfig) -> None:
        self._figures = Figures((), {}, {}, {}, {}, {}, {}, [])
        self._wanted: dict[str, frozenset[int]] | None = None  # by quantity; None for all
        self._ranks, self._config = ranks, config
        self._turns = self._turn = self._look = 0
        self._unfit: set[int] = set()  # ranks whose device does not compute, or not answer
        self._own_past: OwnPast | None = None

    def give_turns(self, facts: Sequence[tuple[Who, str]]) -> list[Turn]:
        """Return each rank's turn."""
        self._figures = self._figures._replace(ranks=tuple(who for who, _ in facts))
        if self._config.check_history:
            self._own_past = OwnPast(self._config.check_history)
        machines = {rank: name or f"node {who.node}" for rank, (who, name) in enumerate(facts)}
        turns = Turns(self._figures.ranks, machines).of(machines)
        self._turns = len(turns)
        own = {rank: at for at, ranks in enumerate(turns) for rank in ranks}
        return [Turn(own[rank], len(turns)) for rank in machines]

    def take(self, found: Sequence[Own | None]) -> list[Answer]:
        """Return what each rank does after a turn; raise LaunchError `bad-node` or `slow-node` if that is asked for."""
        for rank, own in enumerate(found):
            if own is not None:
                self._note(rank, own)
        self._turn += 1
        if self._turn < self._turns:
            return [Answer()] * self._ranks
        self._turn = 0
        if self._look == 0:
            self._wanted = self._doubt()
        self._look += 1
        if self._wanted and self._look <= LOOKS:
            again = frozenset().union(*self._wanted.values())
            return [Answer(True, rank in again) for rank in range(self._ranks)]
        return [Answer(warnings=self._judge()), *[Answer()] * (self._ranks - 1)]

    def _note(self, rank: int, own: Own) -> None:
        """Take a rank's figures, of a later look those that were asked for."""
        if not own.computes:
            self._unfit.add(rank)
        if self._wanted is None and own.told:
            self._figures.told[rank] = own.told
        for name, value in own.values.items():
            if self._wanted is None or rank in self._wanted.get(name, ()):
                self._figures.own.setdefault(name, {}).setdefault(rank, []).append(value)

    def _doubt(self) -> dict[str, frozenset[int]]:
        """Return which ranks measure again, by quantity."""
        wanted = dict(doubt(self._figures).own)
        for name, ranks in (self._own_past.doubt(self._figures) if self._own_past else {}).items():
            wanted[name] = wanted.get(name, frozenset()) | ranks
        return {name: some for name, ranks in wanted.items() if (some := ranks - self._unfit)}

    def _judge(self) -> tuple[str, ...]:
        """Return the warnings of a check; raise LaunchError instead if it is strict."""
        findings, told = judge(self._figures), []
        if self._own_past:
            findings = [*findings, *self._own_past.judge(self._figures)]
            told = self._own_past.keep(self._figures)
        if self._config.check == "strict" and (error := refusal(findings)):
            warn(told)
            raise error
        return (*told, *warnings(findings))


def is_slow(finding: Finding) -> bool:
    """Tell whether a finding is of how fast something is; others are of room, and of what is bad by itself."""
    return finding.quantity in OWN and OWN[finding.quantity].unit != "B"


def warnings(findings: Sequence[Finding]) -> list[str]:
    """Return the warnings `bad-node` and `slow-node`, a handful of each."""
    bad, slow = split(findings)
    return [f"bad-node: {words}" for words in lines(bad)] + [f"slow-node: {words}" for words in lines(slow)]


def refusal(findings: Sequence[Finding]) -> LaunchError | None:
    """Return why a job does not start on its nodes, LaunchError `bad-node` or `slow-node`; None if nothing is odd."""
    bad, slow = split(findings)
    hosts = dict.fromkeys(host for one in findings for host in one.hosts)
    scheduler = find_scheduler(os.environ)
    option = (scheduler and scheduler.exclude) or "mpiddp.supervise --exclude={}"
    without = f"leave it out with {option.format(folded(hosts))}, or start" if hosts else "start"
    cure = f"{without} with --check alone, which warns"
    if bad:
        return LaunchError(
            "bad-node",
            found="\n".join(lines([*bad, *slow])),
            needed="nodes with room in /dev/shm and /tmp, and devices without errors",
            do=cure,
        )
    if slow:
        return LaunchError(
            "slow-node",
            found="\n".join(lines(slow)),
            needed="nodes that are as fast as the others of their kind: all wait for the slowest in each step",
            do=cure,
        )
    return None


def split(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return what is bad by itself, and what is slow."""
    return [one for one in findings if not is_slow(one)], [one for one in findings if is_slow(one)]


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return the words of a handful of findings; the rest are counted."""
    words = list(dict.fromkeys(one.words for one in findings))
    return words if len(words) <= LISTED else [*words[:LISTED], f"{len(words) - LISTED:,} more like these"]
