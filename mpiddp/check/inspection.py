"""Rank 0's part in a check: who measures what when, from the first look to the last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..compare.doubt import LOOKS, doubt
from ..compare.figures import Figures
from ..compare.judge import judge
from ..compare.rounds import mixed, rounds, schedule
from ..errors import LonelyLaunchError
from ..measure.meeting import Pace
from ..measure.own import ANSWER_S, START_S, Own
from ..plan.words import listed
from .crew import Crew, Turns
from .fabric import Fabric
from .history import OwnPast
from .progress import Progress

LIMIT_S = 18.0  # for a piece of work, besides the time that it is meant to take: three folders that hang have 5 s each
LEAST_OWN_S = 0.35
APART_S = 1.0  # the beginnings of later looks, so that a busy moment of a machine does not show in all
LONGEST_MEETING_S, SHORTEST_MEETING_S = 1.0, 0.2
BACKENDS_AND_WAYS = 4  # of a meeting: over MPI and over the backend, there and back


class Extent(NamedTuple):
    """How much is measured: pairs within nodes; seconds for a rank itself, all meetings, all-reduces, later looks.

    What ranks measure by themselves may be looked at for `own_again_s` after the last meeting. Where it is to be over
    `soon`, a later look is the last one if nothing seems odd any more.
    """

    nodes_only: bool = False
    inside: bool = True
    own_s: float = 1.5
    meetings_s: float = 20.0
    reducing_s: float = 2.0
    again_s: float = 10.0
    own_again_s: float = 10.0
    soon: bool = False

    def pace(self, meetings: int) -> Pace:
        """Return how thorough each of so many meetings in a row is."""
        seconds = min(LONGEST_MEETING_S, max(SHORTEST_MEETING_S, self.meetings_s / max(1, meetings)))
        times = Pace().times
        return Pace(times, seconds / BACKENDS_AND_WAYS / (times + 1), seconds / 12)


QUICK = Extent(inside=False, own_s=0.35, meetings_s=1.1, reducing_s=0.3, again_s=5.0, own_again_s=4.0, soon=True)


class Inspection:
    """Lets a crew measure, and keeps the figures."""

    def __init__(self, crew: Crew, size: int, extent: Extent, progress: Progress, patience_s: float) -> None:
        """Ask the ranks who they are, which may take `patience_s`; raise LonelyLaunchError if one does not say it."""
        self._crew, self._extent, self._progress = crew, extent, progress
        told = crew.do("who", dict.fromkeys(range(size), ()), patience_s, "to say who it is")
        if len(told) < size:
            raise unknown(crew, [rank for rank in range(size) if rank not in told], patience_s)
        self.figures = Figures(tuple(told[rank][0] for rank in range(size)), {}, {}, {}, {}, {}, crew.lost, [])
        self._nodes: dict[int, list[int]] = {}  # the ranks of each, in the order of local ranks
        for rank, who in enumerate(self.figures.ranks):
            self._nodes.setdefault(who.node, []).append(rank)
        self._on_cpus = all(who.device == "cpu" for who in self.figures.ranks)  # which have memory between them
        self._rounds = mixed(rounds(len(self._nodes)))
        self._turns = Turns(self.figures.ranks, {rank: machine for rank, (_, machine) in told.items()})
        self._fabric = Fabric(crew, self.figures, self._nodes, self._turns, extent.pace(len(self._rounds)), progress)

    def run(self, past: OwnPast | None) -> Figures:
        """Measure all, then again what is in doubt, also beside a node's own past; return the figures."""
        self._own(range(len(self.figures.ranks)), None)
        self._clocks()
        if not self._extent.nodes_only:
            if self._extent.inside and not (self._on_cpus and len(self._nodes) > 1):
                self._fabric.inside((ranks[a], ranks[b]) for ranks in self._nodes.values()
                                    for one in rounds(len(ranks)) for a, b in one)
            for number, one in enumerate(self._rounds):
                self._progress.show("pairs of nodes", number, len(self._rounds))
                self._fabric.between(one)
            self._fabric.reduce(self._extent.reducing_s)
        self._look_again(past)
        self._progress.end()
        for rank, words in self._crew.troubles.items():
            self.figures.told.setdefault(rank, []).extend(words)
        return self._fabric.completed()

    def _look_again(self, past: OwnPast | None) -> None:
        """Measure again what is in doubt: nobody must be accused of a moment in which all was slow.

        A first such look is always made, further ones as long as there is time, for what ranks measure by themselves
        longer: that takes a second, and meetings over a bad link take far more.
        """
        found, aged = doubt(self.figures), past.doubt(self.figures) if past else {}
        own = {rank for some in (found.own, aged) for ranks in some.values() for rank in ranks} - self._crew.unfit
        names = frozenset({*found.own, *aged})
        plan = schedule(found.ways)
        over_mpi = found.latency or past is not None  # which knows no doubt of its own about ways
        end = own_end = time.monotonic() + self._extent.again_s
        began, own_s, took_s = -APART_S, 0.0, 0.0
        for number in range(LOOKS if own or plan or found.inside else 0):
            now = time.monotonic()
            is_late = number > 0 and now + took_s > end
            if is_late and (not own or now + own_s > own_end + self._extent.own_again_s):
                return
            if number and self._extent.soon and not self._may_be_odd(past, names if is_late else None):
                return
            pause_s = max(0.0, began + APART_S - now)
            end, own_end = end + pause_s, own_end + pause_s
            time.sleep(pause_s)
            began = time.monotonic()
            self._progress.show("suspects again", number, LOOKS)
            self._own(own, names)
            own_s = time.monotonic() - began
            if is_late:
                continue
            self._fabric.inside(found.inside)
            for one in plan:
                self._fabric.between(one, over_mpi)
            own_end = max(end, time.monotonic())
            took_s = time.monotonic() - began

    def _may_be_odd(self, past: OwnPast | None, only: frozenset[str] | None) -> bool:
        """Tell whether something would be odd if one more look told the same: of one alone no way is accused.

        `only` are the quantities that are still measured, None for all.
        """
        figures = self.figures.looked_again()
        found = [*judge(figures), *(past.judge(figures) if past else ())]
        return any(only is None or one.quantity in only for one in found)

    def _own(self, ranks: Iterable[int], only: frozenset[str] | None) -> None:
        """Let ranks measure themselves, all or `only` some quantities."""
        budget_s = self._extent.own_s if only is None else max(self._extent.own_s / 2, LEAST_OWN_S)
        limit_s = budget_s + LIMIT_S + (0.0 if self._on_cpus else START_S + ANSWER_S)
        turns = self._turns.of(ranks)
        for number, turn in enumerate(turns):
            self._progress.show("nodes", number, len(turns))
            orders = dict.fromkeys(turn, (budget_s, only))
            told = self._crew.do("own", orders, limit_s, "what it measures itself")
            for rank, one in told.items():
                self._keep(rank, one, only)

    def _keep(self, rank: int, own: Own, only: frozenset[str] | None) -> None:
        """Keep what a rank has measured of itself; of a later look what was asked for."""
        for quantity, value in own.values.items():
            if only is None or quantity in only:
                self.figures.own.setdefault(quantity, {}).setdefault(rank, []).append(value)
        if not own.computes:
            self._crew.unfit.add(rank)
        words = self.figures.told.setdefault(rank, [])
        words += [one for one in own.told if one not in words]

    def _clocks(self) -> None:
        """Compare each node's clock with rank 0's."""
        others = tuple(ranks[0] for ranks in self._nodes.values() if ranks[0] not in {0, *self._crew.lost})
        orders = dict.fromkeys(others, ((0,),))
        told = self._crew.do("clock", {0: (others,), **orders}, LIMIT_S, "a comparison of its clock with rank 0's")
        self.figures.own["clock"] = {0: [0.0], **{rank: [offset] for rank, offset in told.get(0, {}).items()}}


def unknown(crew: Crew, ranks: Sequence[int], patience_s: float) -> LonelyLaunchError:
    """Return why there is no check where ranks do not say who they are: what has gone wrong there, if they tell it."""
    told = [f"{crew.name(rank)}{''.join(f' ({words})' for words in crew.troubles.get(rank, ()))}" for rank in ranks]
    return LonelyLaunchError(
        "startup-timeout",
        found=f"{len(ranks)} of the check's ranks did not say who they are, for which they had {patience_s:g} s: "
              f"{listed(told)}",
        needed="every rank at the start in time",
        do="look at those hosts (a slow file system, a broken node); more time: --startup-timeout SECONDS",
    )
