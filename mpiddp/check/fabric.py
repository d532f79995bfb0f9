"""The ways between ranks, as rank 0 lets them be measured: within nodes, between nodes, all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from ..compare.figures import Figures
from ..compare.rounds import Meetings, schedule
from ..measure.meeting import Pace, Ways, together
from .crew import Crew, Turns
from .progress import Progress
from .works import REDUCING_LIMIT_S, Met

MEETING_LIMIT_S = 12.0  # one that takes so long has lost somebody
SIZES = tuple(2**power for power in range(10, 29, 2))  # of an all-reduce: 1 KiB to 256 MiB
MOST_TIMES = 20

Pair = tuple[int, int]


class Fabric:
    """Lets ranks meet, and keeps what they have measured in `figures`. `nodes` has the ranks of each node."""

    def __init__(
        self, crew: Crew, figures: Figures, nodes: Mapping[int, Sequence[int]], turns: Turns, pace: Pace,
        progress: Progress,
    ) -> None:
        self._crew, self._figures, self._nodes, self._turns = crew, figures, nodes, turns
        self._pace, self._progress = pace, progress
        self._unreduced: tuple[int, int] | None = None
        self._meetings = Meetings(len(nodes))
        self._meetings_inside = {node: Meetings(len(ranks)) for node, ranks in nodes.items()}

    def completed(self) -> Figures:
        """Return the figures, with what has not come through."""
        inside = frozenset(pair for meetings in self._meetings_inside.values() for pair in meetings.unmet)
        return self._figures._replace(unmet=frozenset(self._meetings.unmet), unmet_inside=inside,
                                      unreduced=self._unreduced)

    def inside(self, pairs: Iterable[Pair]) -> None:
        """Let pairs of ranks of a node meet, no rank two others at a time."""
        plan = schedule(pairs)
        for number, one in enumerate(plan):
            self._progress.show("pairs within nodes", number, len(plan))
            able = [pair for pair in one if self._crew.can_meet(pair) and self._at(pair).can_meet(pair)]
            partners = {a: b for pair in able for a, b in (pair, pair[::-1])}
            for turn in self._turns.of(partners):
                orders = {rank: (partners[rank], self._pace, True) for rank in turn}
                told = self._crew.do("stream", orders, MEETING_LIMIT_S, "a meeting within its node")
                for pair in able:
                    if pair[0] in orders:
                        self._keep_inside(pair, told)

    def _at(self, pair: Pair) -> Meetings:
        """Return the meetings of a node, of which these are ranks."""
        return self._meetings_inside[self._figures.ranks[pair[0]].node]

    def _keep_inside(self, pair: Pair, told: Mapping[int, Ways]) -> None:
        """Keep what two ranks of a node tell of their meeting, or that nothing came through."""
        if told.keys() >= {*pair}:
            self._at(pair).note([pair], [])
            for rank, partner in (pair, pair[::-1]):
                ways = told[rank]._replace(resent=-1.0)
                keep(self._figures.inside, (rank, partner), [ways], ways.latency_s)
        elif self._crew.can_meet(pair):
            self._at(pair).note([], [pair])

    def between(self, pairs: Sequence[Pair], over_mpi: bool = True) -> None:
        """Let pairs of nodes meet, no node two others at a time; `over_mpi` too, without which no latency is kept.

        Their first ranks meet alone. Where ranks compute on accelerators, which may have a network card each, all ranks
        of both nodes meet at the same time, too.
        """
        able = (pair for pair in pairs if self._meetings.can_meet(pair) and self._crew.can_meet(self._ends(pair, 1)))
        for some in self._turns.of_pairs(able):
            self._between(some, over_mpi)

    def _ends(self, pair: Pair, most: int) -> list[int]:
        """Return the ranks of two nodes that meet, `most` of each."""
        return [rank for node in pair for rank in self._nodes[node][:most]]

    def _between(self, pairs: Sequence[Pair], over_mpi: bool) -> None:
        pace = self._pace
        met: dict[Pair, list[Met]] = self._meet("meet", pairs, 1, lambda pair: (pace, self._flows(pair) > 1, over_mpi))
        several = [pair for pair in pairs if both(pair, met) and self._flows(pair) > 1]
        connected = self._meet("connect", several, 0, lambda _: ())
        streams: dict[Pair, list[Ways]] = self._meet(
            "stream", [pair for pair in several if both(pair, connected)], 0, lambda _: (pace, False))
        through = [pair for pair in pairs if both(pair, met) and (pair not in several or both(pair, streams))]
        self._meetings.note(through, [pair for pair in pairs if pair not in through and self._crew.can_meet(
            self._ends(pair, self._flows(pair) if pair in several else 1))])
        self._keep(through, met, streams, over_mpi)

    def _keep(
        self, pairs: Sequence[Pair], met: Mapping[Pair, list[Met]], streams: Mapping[Pair, list[Ways]], over_mpi: bool
    ) -> None:
        """Keep what the ranks of pairs of nodes tell of their meetings."""
        for way in (way for pair in pairs for way in (pair, pair[::-1])):
            told = met[way][0]
            first = met[min(way), max(way)][0]  # both see the same latency
            latency_s = first.by_backend.latency_s if over_mpi else 0.0
            if told.by_mpi and first.by_mpi:
                keep(self._figures.by_mpi, way, [told.by_mpi], first.by_mpi.latency_s)
                latency_s = min(latency_s, first.by_mpi.latency_s)  # gloo's threads sleep, and may be slow to wake up
            ways = [told.by_backend]
            if self._flows(way) > 1:
                ways = [one._replace(small=told.by_backend.small) for one in streams[way]]
            keep(self._figures.ways, way, ways, latency_s)

    def reduce(self, whole_s: float) -> None:
        """Time an all-reduce over all ranks, of one size after the other, until `whole_s` are over."""
        left_s, last_s = whole_s, 0.0
        everyone = range(len(self._figures.ranks))
        for number, size in enumerate(SIZES):
            next_s = 4 * last_s
            if not self._crew.can_meet(everyone) or 2 * next_s > left_s:  # a warm-up, and one that counts
                return
            self._progress.show("all-reduce", number, len(SIZES))
            times = max(1, min(MOST_TIMES, int(left_s / len(SIZES) / next_s))) if next_s else MOST_TIMES
            told = self._crew.do("reduce", dict.fromkeys(everyone, (size, times)), REDUCING_LIMIT_S,
                                 f"an all-reduce of {size:,} bytes")
            if len(told) < len(everyone):
                if self._crew.can_meet(everyone):  # else it is told of by whom it fails
                    self._unreduced = (size, len(told))
                return
            last_s = told[0]
            left_s -= (times + 1) * last_s
            self._figures.reduced.append((size, last_s))

    def _flows(self, pair: Pair) -> int:
        """Return how many ranks of two nodes meet at a time: of those that compute on CPUs one, as they share a way."""
        ranks = [rank for node in pair for rank in self._nodes[node]]
        if any(self._figures.ranks[rank].device == "cpu" for rank in ranks):
            return 1
        return min(len(self._nodes[node]) for node in pair)

    def _meet(
        self, work: str, pairs: Sequence[Pair], most: int, rest: Callable[[Pair], tuple[Any, ...]]
    ) -> dict[Pair, list[Any]]:
        """Let ranks of nodes meet, `most` of each or all; return for each way what the ranks of its first node tell.

        `rest` returns what they are told besides their partner. Ways of which not all ranks tell anything are left out.
        """
        orders, names = {}, {}
        for pair in pairs:
            for way in (pair, pair[::-1]):
                for local in range(most or self._flows(pair)):
                    rank, partner = self._nodes[way[0]][local], self._nodes[way[1]][local]
                    if self._crew.can_meet((rank, partner)):
                        orders[rank] = (partner, *rest(pair))
                        names[rank] = way
        told = self._crew.do(work, orders, MEETING_LIMIT_S, "a meeting with another node")
        found: dict[Pair, list[Any]] = {}
        for rank, one in sorted(told.items()):
            found.setdefault(names[rank], []).append(one)
        return {way: ones for way, ones in found.items() if len(ones) == (most or self._flows(way))}


def both(pair: Pair, told: Container[Pair]) -> bool:
    """Tell whether both directions of a pair are told of."""
    return pair in told and pair[::-1] in told


def keep(kept: dict[str, dict[Pair, list[float]]], way: Pair, told: Sequence[Ways], latency_s: float) -> None:
    """Add the figures of a way, on which the ranks that tell of it have sent at the same time."""
    values = {"latency": latency_s, "small": together([told[0].small]), "large": together([one.large for one in told])}
    resent = max(one.resent for one in told)
    if resent >= 0:
        values["resent"] = resent
    for quantity, value in values.items():
        if value or quantity == "resent":
            kept.setdefault(quantity, {}).setdefault(way, []).append(value)
