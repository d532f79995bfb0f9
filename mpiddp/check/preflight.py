"""`--check`: each rank is measured by itself before the script; what is odd is a warning, or stops the start.

Links between ranks take longer, and are left to `python -m mpiddp.check`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..base import timeline
from ..base.config import CheckMode, LaunchConfig
from ..base.errors import LaunchError
from ..base.ranks import RankPosition
from ..base.stderr import warn
from ..base.text import MAX_LISTED, fold_hosts
from ..bootstrap.rollcall import Rendezvous
from ..discovery.devices import use_device
from ..discovery.schedulers import find_scheduler
from . import OWN_S, PASSES, PAUSE_S
from .bench.machine import machine
from .bench.rank import Own, measure
from .history import History
from .identity import describe
from .stats.findings import find
from .stats.schema import RANK_METRICS, Finding, Measurements, Passes, RankInfo, empty
from .stats.tournament import in_turns

LOOKING, MEASURING = "looking at its machine", "measuring its node"


class Turn(NamedTuple):
    """When a rank measures in each pass: in its `own` of `total` turns."""

    own: int
    total: int


class Answer(NamedTuple):
    """What rank 0 says when all have had their turn."""

    again: bool
    warnings: Sequence[str] = ()


def check_nodes(roll: Rendezvous, place: RankPosition, device: str, config: LaunchConfig) -> None:
    """Measure this rank's part of its node, and print on rank 0 what is odd about nodes. Collective.

    Raises LaunchError `bad-node` or `slow-node` on every rank, if `config` is strict; at the start's deadline
    LocalLaunchError, with the ranks that still measure.
    """
    timeline.begin_stage(LOOKING)
    where, judge = use_device(device), Judge(config)
    turn = roll.exchange(LOOKING, (describe(place, where), machine()), judge.give_turns)
    answer, own = Answer(again=True), Own({}, [])
    for number in range(PASSES):
        if answer.again:
            time.sleep(PAUSE_S if number else 0.0)
            for at in range(turn.total):
                timeline.begin_stage(MEASURING)
                mine = at == turn.own and own.computes  # each try of a device that does not compute may take a minute
                own = measure(where, place.local_rank == 0, OWN_S) if mine else own
                answer = roll.exchange(MEASURING, own if mine else None, judge.take)
    warn(answer.warnings)


class Judge:
    """Rank 0's part: it gives the ranks their turns, keeps what they have measured, and judges after each pass.

    Nobody can be accused any more after a pass in which nothing was odd: then there is no other one.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._history: History | None = None
        self._measured = empty(())
        self._turns: list[list[int]] = []
        self._taken = 0

    def give_turns(self, facts: Sequence[tuple[RankInfo, str]]) -> list[Turn]:
        """Return each rank's turn: nodes that are containers of one machine would disturb each other."""
        self._history = History(self._config.check_history) if self._config.check_history else None
        self._measured = empty(tuple(info for info, _ in facts))
        self._turns = in_turns([info.node for info, _ in facts], [where for _, where in facts])
        own = {rank: at for at, ranks in enumerate(self._turns) for rank in ranks}
        return [Turn(own[rank], len(self._turns)) for rank in range(len(facts))]

    def take(self, found: Sequence[Own | None]) -> list[Answer]:
        """Return what each rank does after a turn; raise LaunchError if the check is strict and something is odd."""
        for rank, own in enumerate(found):
            if own:
                self._measured.add(rank, own.values, own.told)
        self._taken += 1
        passes, left = divmod(self._taken, len(self._turns))
        again = bool(left) or (passes < PASSES and bool(self._findings(repeated(self._measured))))
        return [Answer(again, () if again else self._end())] + [Answer(again)] * (len(found) - 1)

    def _findings(self, measured: Measurements) -> list[Finding]:
        return [*find(measured), *(self._history.compare(measured) if self._history else ())]

    def _end(self) -> list[str]:
        """Return the warnings of a check; raise LaunchError instead if it is strict."""
        found = self._findings(self._measured)
        about_history = self._history.keep(self._measured) if self._history else []
        if self._config.check is CheckMode.STRICT and (error := refusal(found)):
            warn(about_history)
            raise error
        return [*about_history, *warnings(found)]


def repeated(measured: Measurements) -> Measurements:
    """Return what this would be if all other passes were like the last one."""
    def like_last(passes: Passes) -> Passes:
        return [*passes, *passes[-1:] * (PASSES - len(passes))]

    return measured._replace(own={name: {rank: like_last(passes) for rank, passes in some.items()}
                                  for name, some in measured.own.items()})


def is_slow(finding: Finding) -> bool:
    """Tell whether a finding is of how fast something is; others are of room, and of what is bad by itself."""
    return finding.metric in RANK_METRICS and RANK_METRICS[finding.metric].unit != "B"


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
    without = f"leave it out with {option.format(fold_hosts(hosts))}, or start" if hosts else "start"
    cure = f"{without} with --check alone, which warns"
    if bad:
        return LaunchError(
            "bad-node",
            actual="\n".join(lines([*bad, *slow])),
            needed="nodes with room in /dev/shm and /tmp, and devices without errors",
            do=cure,
        )
    if slow:
        return LaunchError(
            "slow-node",
            actual="\n".join(lines(slow)),
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
    return words if len(words) <= MAX_LISTED else [*words[:MAX_LISTED], f"{len(words) - MAX_LISTED:,} more like these"]
