"""Who measures when, and who meets whom in a tournament of nodes, or of the ranks of a node."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence

WHOLE = 64  # so many meet each other once; of more, each meets some
MOST_FAILURES = 3  # of one who is given up
MOST_FAILING = 12  # times at which some fail, before all are given up that have failed so often

Pair = tuple[int, int]


def rounds(count: int, whole: int = WHOLE) -> list[list[Pair]]:
    """Return the rounds of a tournament of `count`, each a list of pairs in which nobody is twice.

    Up to `whole` all meet each other, in count - 1 rounds, or count if that is odd (the circle method). More have
    `enough(count)` of these rounds.
    """
    even = count + count % 2
    wanted: Sequence[int] = range(even - 1)
    if count > whole:  # chance connects all by few steps, so that no part hangs by few meetings
        wanted = random.Random(count).sample(wanted, enough(count))  # noqa: S311 — no secret
    return [[pair for pair in circle(even, turn) if pair[1] < count] for turn in wanted if count > 1]


def enough(count: int) -> int:
    """Return in how many rounds each of `count` has met enough others: the logarithm, 7 for 65 and 10 for 1,024.

    A node is told from its partners by the median of its meetings; seven bear three that are slow for their partner's
    sake. As each round can double those whom a node has met through others, the logarithm connects them all.
    """
    return math.ceil(math.log2(count))


def circle(even: int, turn: int) -> list[Pair]:
    """Return a round of the circle method: those whose numbers add up to the turn, and the last with who is left."""
    ring = even - 1
    found = [(one, (turn - one) % ring) for one in range(ring) if one < (turn - one) % ring]
    alone = turn // 2 if turn % 2 == 0 else (turn + ring) // 2
    return [*found, (alone, ring)]


def shuffled(found: list[list[Pair]], number: int) -> list[list[Pair]]:
    """Return the rounds of a tournament in the order of a pass, which differs from that of the other passes.

    Nodes that fail together are neighbours as a rule, as those of a rack: who met them first would know no others.
    """
    order = list(found)
    random.Random(number).shuffle(order)  # noqa: S311 — no secret
    return order


def in_turns(nodes: Sequence[int], machines: Sequence[str]) -> list[list[int]]:
    """Return the ranks on these nodes in turns, in which no two nodes share a machine; an empty one is unknown."""
    of: dict[str, dict[int, None]] = {}  # the nodes of each machine
    for node, machine in zip(nodes, machines, strict=True):
        of.setdefault(machine or f"node {node}", {})[node] = None
    turn = {node: at for some in of.values() for at, node in enumerate(some)}
    count = max(map(len, of.values()), default=0)
    return [[rank for rank, node in enumerate(nodes) if turn[node] == at] for at in range(count)]


class Meetings:
    """Which of `count` have met, and which have `unmet`: pairs between which nothing came through.

    Who fails again and again gets no more meetings, as each failure takes long. Whom to accuse is cut_off()'s to tell.
    """

    def __init__(self, count: int) -> None:
        self._count, self._failing = count, 0
        self._met: set[Pair] = set()
        self._given_up: set[int] = set()
        self.unmet: set[Pair] = set()

    def can_meet(self, pair: Pair) -> bool:
        """Tell whether two may meet: not where they have failed, or one of them is given up."""
        return pair not in self.unmet and not self._given_up & {*pair}

    def note(self, met: Iterable[Pair], unmet: Collection[Pair]) -> None:
        """Take what has become of meetings at a time, and give up who has failed too often.

        That is who fails with those that reach each other, or anybody where nobody reaches anybody. Failures with those
        that are given up do not count: bad partners do not make a good one bad. When some have failed at MOST_FAILING
        times, all that have failed often get no more, good ones too.
        """
        self._met.update(met)
        self.unmet.update(unmet)
        self._failing += bool(unmet)
        enough = self._failing >= MOST_FAILING
        failed = partners(pair for pair in self.unmet if enough or not self._given_up & {*pair})
        several = {one for one, others in failed.items() if len(others) >= MOST_FAILURES}
        whole = main_part(self._met, self._count) if several else set()
        self._given_up.update(one for one in several if enough or not self._met
                              or (one not in whole and failed[one] & whole))


def cut_off(met: Collection[Pair], unmet: Iterable[Pair], count: int) -> set[int]:
    """Return who of `count` is cut off from those that reach each other, and has failed with at least two.

    One of the two is of those: who has only tried others that are cut off may be good.
    """
    whole = main_part(met, count)
    return {one for one, others in partners(unmet).items() if len(others) > 1 and one not in whole and others & whole}


def partners(pairs: Iterable[Pair]) -> dict[int, set[int]]:
    """Return the partners of each that is in a pair."""
    found: dict[int, set[int]] = {}
    for pair in pairs:
        for one, other in (pair, pair[::-1]):
            found.setdefault(one, set()).add(other)
    return found


def main_part(met: Iterable[Pair], count: int) -> set[int]:
    """Return the largest part of `count` that reach each other, through others too; empty if it is less than half."""
    parts: dict[int, set[int]] = {}
    for one, other in met:
        joined = parts.setdefault(one, {one})
        if other not in joined:
            joined |= parts.get(other, {other})
            parts.update(dict.fromkeys(joined, joined))
    sizes = sorted({id(part): part for part in parts.values()}.values(), key=len)
    alone = len(sizes) < 2 or len(sizes[-2]) < len(sizes[-1])
    return sizes[-1] if sizes and alone and 2 * len(sizes[-1]) >= count else set()
