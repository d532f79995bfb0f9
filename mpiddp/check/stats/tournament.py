"""Which nodes, or ranks of a node, meet when: rounds of a tournament, turns, and which get no more meetings."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Sequence

FULL_MESH_MAX = 64  # of more members, each meets only some
MAX_FAILED_PARTNERS = 3  # before a member gets no more meetings
MAX_FAILING_TURNS = 12  # turns in which a meeting fails, before the limit above holds for everybody

Pair = tuple[int, int]


def tournament(count: int) -> list[list[Pair]]:
    """Return the rounds of a tournament of `count` members, each a list of pairs without a common member.

    Up to FULL_MESH_MAX members all meet each other, in count - 1 rounds, or count if that is odd (the circle method).
    Of more, only rounds_needed(count) of these rounds are played.
    """
    even = count + count % 2
    numbers: Sequence[int] = range(even - 1)
    if count > FULL_MESH_MAX:  # chosen by chance, so that few steps lead from any member to any other
        numbers = random.Random(count).sample(numbers, rounds_needed(count))  # noqa: S311 — no secret
    return [[pair for pair in circle_round(even, number) if pair[1] < count] for number in numbers if count > 1]


def rounds_needed(count: int) -> int:
    """Return how many rounds judge each of `count` members: the logarithm, 7 for 65 and 10 for 1,024.

    A node is judged by the median of its meetings: of seven, three may be slow because of the partner. As a round can
    double the members that one has met through others, the logarithm connects all.
    """
    return math.ceil(math.log2(count))


def circle_round(even: int, number: int) -> list[Pair]:
    """Return a round of the circle method: pairs whose sum is `number`, and the last member with the one left over."""
    modulus = even - 1
    pairs = [(first, (number - first) % modulus) for first in range(modulus) if first < (number - first) % modulus]
    left_over = number // 2 if number % 2 == 0 else (number + modulus) // 2
    return [*pairs, (left_over, modulus)]


def shuffled_tournament(count: int, pass_number: int) -> list[list[Pair]]:
    """Return the rounds of a tournament in another order for each pass.

    Nodes that fail together are often neighbours, as in a rack: a node that met them first would be given up.
    """
    rounds = tournament(count)
    random.Random(pass_number).shuffle(rounds)  # noqa: S311 — no secret
    return rounds


def split_into_turns(nodes: Sequence[int], machines: Sequence[str]) -> list[list[int]]:
    """Return the ranks on these nodes in turns without two nodes of one machine; "" is an unknown machine."""
    by_machine: dict[str, dict[int, None]] = {}
    for node, machine in zip(nodes, machines, strict=True):
        by_machine.setdefault(machine or f"node {node}", {})[node] = None
    turn_of = {node: turn for members in by_machine.values() for turn, node in enumerate(members)}
    count = max(map(len, by_machine.values()), default=0)
    return [[rank for rank, node in enumerate(nodes) if turn_of[node] == turn] for turn in range(count)]


class MeetingLog:
    """Which of `count` members have met, and the `unreachable` pairs, whose meeting failed although both answer.

    A failed meeting takes long, so members that fail often get no more. Whom to blame is up to cut_off_members().
    """

    def __init__(self, count: int) -> None:
        self._count, self._failing_turns = count, 0
        self._met: set[Pair] = set()
        self._given_up: set[int] = set()
        self.unreachable: set[Pair] = set()

    def can_meet(self, pair: Pair) -> bool:
        """Return whether a pair may meet: it has not failed yet, and none of the two is given up."""
        return pair not in self.unreachable and not self._given_up & {*pair}

    def record(self, met: Iterable[Pair], failed: Collection[Pair]) -> None:
        """Add the meetings of a turn, and give up members with MAX_FAILED_PARTNERS.

        They are given up if they failed with the main component and are not in it, or if nobody has met. Partners that
        are given up do not count: bad partners do not make a good member bad. After MAX_FAILING_TURNS everybody with so
        many failed partners is given up.
        """
        self._met.update(met)
        self.unreachable.update(failed)
        self._failing_turns += bool(failed)
        is_over = self._failing_turns >= MAX_FAILING_TURNS
        failures = partners_of(pair for pair in self.unreachable if is_over or not self._given_up & {*pair})
        candidates = {member for member, partners in failures.items() if len(partners) >= MAX_FAILED_PARTNERS}
        main = main_component(self._met, self._count) if candidates else set()
        self._given_up.update(member for member in candidates if is_over or not self._met
                              or (member not in main and failures[member] & main))


def cut_off_members(met: Collection[Pair], failed: Iterable[Pair], count: int) -> set[int]:
    """Return the members outside of the main component that failed with two or more, one of them inside.

    A member that has only met others that are cut off may be good.
    """
    main = main_component(met, count)
    return {member for member, partners in partners_of(failed).items()
            if len(partners) > 1 and member not in main and partners & main}


def partners_of(pairs: Iterable[Pair]) -> dict[int, set[int]]:
    """Return the partners of each member of a pair."""
    partners: dict[int, set[int]] = {}
    for first, second in pairs:
        partners.setdefault(first, set()).add(second)
        partners.setdefault(second, set()).add(first)
    return partners


def main_component(met: Iterable[Pair], count: int) -> set[int]:
    """Return the largest set of members connected by meetings; empty if it is less than half of `count`, or a tie."""
    component_of: dict[int, set[int]] = {}
    for first, second in met:
        joined = component_of.setdefault(first, {first})
        if second not in joined:
            joined |= component_of.get(second, {second})
            component_of.update(dict.fromkeys(joined, joined))
    components = sorted({id(part): part for part in component_of.values()}.values(), key=len)
    is_tie = len(components) > 1 and len(components[-2]) == len(components[-1])
    return components[-1] if components and not is_tie and 2 * len(components[-1]) >= count else set()
