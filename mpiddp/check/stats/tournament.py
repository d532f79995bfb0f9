"""The schedule of link benchmarks between nodes, or ranks of a node: rounds, turns, and who is given up."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

FULL_MESH_MAX = 64  # members; of more, each meets only some
MAX_FAILED_PARTNERS = 3  # before a member is given up
MAX_FAILING_TURNS = 12  # turns with a failed meeting, before the limit above applies to all members

Pair = tuple[int, int]
Item = TypeVar("Item")


def tournament(count: int) -> list[list[Pair]]:
    """Return the rounds of a tournament of `count` members, each a list of pairs without a common member.

    Up to FULL_MESH_MAX members all meet each other, in count - 1 rounds, or count rounds if that is odd (the circle
    method). More members play only rounds_needed(count) of these rounds.
    """
    even = count + count % 2
    numbers: Sequence[int] = range(even - 1)
    if count > FULL_MESH_MAX:  # at random: this keeps the paths between members short
        numbers = random.Random(count).sample(numbers, rounds_needed(count))  # noqa: S311 — no secret
    return [[pair for pair in _circle_round(even, number) if pair[1] < count] for number in numbers if count > 1]


def rounds_needed(count: int) -> int:
    """Return how many rounds are enough to judge `count` members: the logarithm, 7 for 65 and 10 for 1,024.

    A node is judged by the median of its meetings: three of seven may be slow because of the partner. Each round can
    double the number of members that are connected, so the logarithm connects all.
    """
    return math.ceil(math.log2(count))


def _circle_round(even: int, number: int) -> list[Pair]:
    # pairs whose sum is `number`; the last member meets the one left over
    modulus = even - 1
    pairs = [(first, (number - first) % modulus) for first in range(modulus) if first < (number - first) % modulus]
    left_over = number // 2 if number % 2 == 0 else (number + modulus) // 2
    return [*pairs, (left_over, modulus)]


def shuffled_tournament(count: int, pass_number: int) -> list[list[Pair]]:
    """Return the rounds of a tournament in a different order for each pass.

    Nodes that fail together are often neighbours, as in a rack: a node that always meets them first would be given up.
    """
    rounds = tournament(count)
    random.Random(pass_number).shuffle(rounds)  # noqa: S311 — no secret
    return rounds


def split_into_turns(machines: Mapping[Item, Collection[str]]) -> list[list[Item]]:
    """Return items in turns such that no two items of a turn use the same machine."""
    turns: list[tuple[set[str], list[Item]]] = []
    for item, used in machines.items():
        busy, members = next((turn for turn in turns if not turn[0] & {*used}), (set[str](), list[Item]()))
        if not members:
            turns.append((busy, members))
        busy.update(used)
        members.append(item)
    return [members for _, members in turns]


class MeetingLog:
    """Which of `count` members have met, and `unreachable` pairs: their meeting failed, but both reply to rank 0.

    A failed meeting takes long, so members that fail often are given up. cut_off_members() decides whom to blame.
    """

    def __init__(self, count: int) -> None:
        self._count, self._failing_turns = count, 0
        self._met: set[Pair] = set()
        self._given_up: set[int] = set()
        self.unreachable: set[Pair] = set()

    def can_meet(self, pair: Pair) -> bool:
        """Return whether a pair may meet: it has not failed yet, and neither member is given up."""
        return pair not in self.unreachable and not self._given_up & {*pair}

    def record(self, met: Iterable[Pair], failed: Collection[Pair]) -> None:
        """Add the meetings of a turn, and give up members with MAX_FAILED_PARTNERS.

        They are given up if they are outside of the main component and failed with a member of it, or if no members
        have met. Given-up partners do not count: bad partners do not make a good member bad. After MAX_FAILING_TURNS
        all members with so many failed partners are given up.
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
    """Return the members outside of the main component that failed with two or more others, one of them inside.

    A member that failed only with cut-off members may be good.
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
