"""Ways from node to node: how far each, and each node as it sends and receives, is worse than the others."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from .figures import Quantity
from .outliers import FEW, LEAVE_OUT, Peers, allowed, best, mad, median, peers, scale, worse

Way = tuple[int, int]
Kinds = Mapping[int, tuple[str, ...]]
SENDS, RECEIVES = 0, 1  # the node's place in a way
BEFOREHAND = 0.75  # a node whose better quarter of ways is odd is left out of what others are compared with
HALF = 0.35  # where a node has few peers, no noise hides one that is so much slower in all its ways, twice
CAP = 0.25  # a node that is so much worse at a first look is looked at again, whatever the noise seems to be
OF_A_MEDIAN = 2.0  # a median of n values deviates by so much of 1/sqrt(n) at most, and what it is compared with as well
LOOKS_AT_A_WAY = 2  # later ones, before a single way is accused: no others speak for or against it
FEW_NODES = 16  # of so many, the ways of each are compared with those of the others alone


class Seen(NamedTuple):
    """How much worse something is than its peers, and how much it may be: of a first look, and of later ones.

    Both are shares of the peers' level, or differences where a quantity is a share. `value` and `level` are of later
    looks. Without later looks `again` is None. `number` is how many ways or others that comes from.
    """

    first: float
    suspect_from: float
    again: float | None
    odd_from: float
    value: float
    level: float
    number: int

    @property
    def suspect(self) -> bool:
        """Whether the first look is odd."""
        return self.first > self.suspect_from

    @property
    def odd(self) -> bool:
        """Whether both the first look and the later ones are odd."""
        return self.suspect and self.again is not None and self.again > self.odd_from


class Board:
    """The values of one quantity for all ways; `both` tells that a way has one value for both directions."""

    def __init__(self, quantity: Quantity, values: Mapping[Way, list[float]], kinds: Kinds, both: bool) -> None:
        self.quantity = quantity
        self.first = {way: found[0] for way, found in values.items() if found}
        self.again = {way: median(found[1:]) for way, found in values.items() if len(found) > 1}
        self.fresh = {way: found[1:] for way, found in values.items() if len(found) > 1}
        self.kinds = kinds
        self.roles = (SENDS,) if both else (SENDS, RECEIVES)
        self.of: tuple[dict[int, list[Way]], dict[int, list[Way]]] = ({}, {})
        for way in self.first:
            self.of[SENDS].setdefault(way[0], []).append(way)
            self.of[RECEIVES].setdefault(way[1], []).append(way)
        self.levels: dict[object, Peers | None] = {}
        self.bad = self.beforehand()

    def kind(self, way: Way) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the kinds of a way's ends: ways are compared with those of the same ones."""
        return self.kinds[way[0]], self.kinds[way[1]]

    def beforehand(self) -> tuple[set[int], set[int]]:
        """Return the nodes that send, and those that receive, worse than others even in their better quarter of ways.

        So two bad nodes of four show, where of all ways only those between the other two are good.
        """
        found: tuple[set[int], set[int]] = (set(), set())
        for role in self.roles:
            best: dict[object, dict[int, float]] = {}
            for node, ways in self.of[role].items():
                for kind in {self.kind(way) for way in ways}:
                    some = sorted((self.first[way] for way in ways if self.kind(way) == kind),
                                  reverse=not self.quantity.more)
                    best.setdefault(kind, {})[node] = some[-1 - int(len(some) * (1 - BEFOREHAND))]
            for values in best.values():
                found[role].update(suspects(values, self.quantity))
        return (found[SENDS], found[SENDS]) if len(self.roles) == 1 else found

    def clean(self, way: Way) -> bool:
        """Whether neither end of a way is bad beforehand."""
        return way[0] not in self.bad[SENDS] and way[1] not in self.bad[RECEIVES]

    @cached_property
    def cleans(self) -> dict[object, list[Way]]:
        """The clean ways of each kind; all of the kind where there are fewer than two."""
        found: dict[object, list[Way]] = {}
        every: dict[object, list[Way]] = {}
        for way in self.first:
            every.setdefault(self.kind(way), []).append(way)
            if self.clean(way):
                found.setdefault(self.kind(way), []).append(way)
        return {kind: found[kind] if len(found.get(kind, ())) > 1 else ways for kind, ways in every.items()}

    def peers(self, kind: object, without: tuple[int, ...] | Way | None, later: bool) -> Peers | None:
        """Return what ways of a kind are compared with, without those of a node, or one way; None if nothing is left.

        Of many nodes, none is left out.
        """
        ways = self.cleans[kind]
        if len(self.of[SENDS]) > FEW_NODES and len(ways) > LEAVE_OUT:
            without = None
        key = (kind, without, later)
        if key not in self.levels:
            if without is not None and len(without) == 1:
                ways = [way for way in ways if without[0] not in way]
            elif without is not None:
                ways = [way for way in ways if way != without]
            self.levels[key] = self.compared(ways, later) if ways else None
        return self.levels[key]

    def compared(self, ways: list[Way], later: bool) -> Peers:
        """Return what these ways make another be compared with, by first values, or by those of later looks too."""
        values = [self.first[way] for way in ways]
        again = [value for way in ways for value in self.fresh.get(way, ())] if later else []
        return peers(values, again, self.quantity)

    def middle(self, losses: Iterable[float]) -> float:
        """Return the better of the middle ones: more than half are as bad or worse."""
        return statistics.median_low(losses)

    def losses(self, node: int, role: int, later: bool) -> tuple[list[float], list[Peers]]:
        """Return how much worse than their peers a node's ways are, and these peers.

        Ways to nodes that are bad by themselves are left out if there are two or more others.
        """
        values = self.again if later else self.first
        ways = [way for way in self.of[role].get(node, ()) if way in values]
        good = [way for way in ways if way[1 - role] not in self.bad[1 - role]]
        found, those = [], []
        for way in good if len(good) > 1 else ways:
            others = self.peers(self.kind(way), (node,), later)
            if others is not None:
                found.append(worse(values[way], others.level, self.quantity))
                those.append(others)
        return found, those

    @cached_property
    def nodes_first(self) -> tuple[dict[int, float], dict[int, float]]:
        """How much worse each node is in a first look, as it sends and as it receives."""
        found: tuple[dict[int, float], dict[int, float]] = ({}, {})
        for role in self.roles:
            for node in self.of[role]:
                losses, _ = self.losses(node, role, later=False)
                if losses:
                    found[role][node] = self.middle(losses)
        return found

    @cached_property
    def nodes_deviation(self) -> list[float]:
        """The deviation among nodes of a first look, as they send and as they receive; 0 of so few that it is noise."""
        good = [[loss for node, loss in self.nodes_first[role].items() if node not in self.bad[role]]
                for role in (SENDS, RECEIVES)]
        return [mad(losses) if len(losses) > FEW_NODES // 2 else 0.0 for losses in good]

    def node(self, node: int, role: int) -> Seen | None:
        """Return how a node sends or receives, by the median of its ways; None if it has no peers, or a single way."""
        losses, those = self.losses(node, role, later=False)
        if len(losses) < 2:
            return None
        first = self.middle(losses)
        limit = capped(allowed(self.loosely(those, len(losses), role), self.quantity, first=True), self.quantity)
        losses_later, those_later = self.losses(node, role, later=True)
        if len(losses_later) < 2:
            return Seen(first, limit, None, 0.0, 0.0, 0.0, len(losses))
        ways = [way for way in self.of[role][node] if way in self.again]
        others = self.loosely(those_later, sum(len(self.fresh[way]) for way in ways), role)
        odd_from = allowed(others, self.quantity)
        if others.number in FEW and self.quantity.unit:
            odd_from = min(odd_from, max(self.quantity.least, HALF))
        return Seen(first, limit, self.middle(losses_later), odd_from, median([self.again[way] for way in ways]),
                    others.level, len(losses))

    def loosely(self, those: list[Peers], values: int, role: int) -> Peers:
        """Return peers for a median of so many values: it deviates less than one does, but as nodes do at least."""
        level, count = median([one.level for one in those]), min(one.number for one in those)
        deviation = max(one.deviation for one in those) * OF_A_MEDIAN / values**0.5
        deviation = max(deviation, self.nodes_deviation[role] * scale(level, self.quantity))
        return Peers(level, deviation, count, min(one.known for one in those))

    def way(self, way: Way) -> Seen | None:
        """Return how a way is; None if it has no peers."""
        others = self.peers(self.kind(way), way, later=False)
        if others is None or others.number < 2:
            return None
        first, limit = worse(self.first[way], others.level, self.quantity), allowed(others, self.quantity, first=True)
        later = self.peers(self.kind(way), way, later=True)
        if len(self.fresh.get(way, ())) < LOOKS_AT_A_WAY or later is None:
            return Seen(first, limit, None, 0.0, 0.0, 0.0, others.number)
        value = best(self.fresh[way], self.quantity)
        return Seen(first, limit, worse(value, later.level, self.quantity), allowed(later, self.quantity), value,
                    later.level, others.number)

    def ways(self) -> Iterator[Way]:
        """Return all ways, of those with one value for both directions each once."""
        return (way for way in self.first if len(self.roles) == 2 or way[0] < way[1])


def suspects(values: Mapping[int, float], quantity: Quantity) -> set[int]:
    """Return who is worse than the others at a first look."""
    if len(values) < 2:
        return set()
    whole = peers(list(values.values()), (), quantity)
    found = set()
    for one, value in values.items():
        others = whole if len(values) > LEAVE_OUT else peers(
            [other for key, other in values.items() if key != one], (), quantity)
        if worse(value, others.level, quantity) > capped(allowed(others, quantity, first=True), quantity):
            found.add(one)
    return found


def capped(limit: float, quantity: Quantity) -> float:
    """Return from where on a node is looked at again, CAP at most."""
    return min(limit, max(quantity.least, CAP)) if quantity.unit else limit
