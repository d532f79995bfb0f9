"""The schedule of link benchmarks between nodes, or ranks of a node: rounds and turns."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

FULL_MESH_MAX = 64  # members; of more, each meets only some
MAX_FAILED_PARTNERS = 5  # of a member, which then meets no others

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

    Nodes that fail together are often neighbours, as in a rack: a node that met them first would meet no others.
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


def can_meet(pair: Pair, unreachable: Collection[Pair]) -> bool:
    """Return whether a pair may meet: it has not failed, and neither member has failed with MAX_FAILED_PARTNERS.

    A failed meeting takes as long as its timeout. cut_off_members() decides whom to blame.
    """
    return pair not in unreachable and all(
        sum(member in failed for failed in unreachable) < MAX_FAILED_PARTNERS for member in pair)


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
