"""What ranks have measured by themselves: which of them are worse than others of their kind."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from .figures import Quantity
from .outliers import LEAVE_OUT, Peers, allowed, best, peers, worse
from .ways import Seen

One = TypeVar("One", bound=Hashable)


def compare(quantity: Quantity, values: Mapping[One, list[float]]) -> dict[One, Seen]:
    """Return how each of some is that are of one kind, compared with the others; nothing for one alone.

    What does not vary by itself needs no later look: its first value stands for that.
    """
    measured = {one: found for one, found in values.items() if found}
    if len(measured) < 2:
        return {}
    first = {one: found[0] for one, found in measured.items()}
    first_peers = dict.fromkeys(first, peers(list(first.values()), (), quantity))
    if len(first) <= LEAVE_OUT:
        first_peers = {one: peers(without(first, one), (), quantity) for one in first}
    suspect = {one for one, value in first.items() if is_suspect(value, first_peers[one], quantity)}
    good = {one: found for one, found in measured.items() if one not in suspect}
    later = Later(quantity, measured, good)
    return {one: seen(quantity, measured, one, first_peers[one], later) for one in measured}


class Later:
    """What later looks are compared with: `good` are those to whom nothing is odd, among the `values` of all."""

    def __init__(self, quantity: Quantity, values: Mapping[One, list[float]], good: Mapping[One, list[float]]) -> None:
        self._quantity, self._good = quantity, good
        self._level = good if len(good) > 1 else values
        self._of_all: Peers | None = None

    def peers(self, one: One) -> Peers:
        """Return the peers of one, without itself if they are few."""
        if len(self._level) <= LEAVE_OUT:
            return self._without(one)
        self._of_all = self._of_all or self._without(None)
        return self._of_all

    def _without(self, one: Hashable) -> Peers:
        controls = [value for other, found in self._good.items() if other != one for value in found[1:]]
        return peers([found[0] for other, found in self._level.items() if other != one], controls, self._quantity)


def is_suspect(value: float, others: Peers, quantity: Quantity) -> bool:
    """Whether a first value is odd."""
    return worse(value, others.level, quantity) > allowed(others, quantity, first=True)


def without(values: Mapping[One, float], one: One) -> list[float]:
    """Return the values of all but one."""
    return [value for other, value in values.items() if other != one]


def seen(quantity: Quantity, values: Mapping[One, list[float]], one: One, others: Peers, later: Later) -> Seen:
    """Return how one is, compared with others at a first look and at later ones."""
    first = worse(values[one][0], others.level, quantity)
    limit = allowed(others, quantity, first=True)
    if not quantity.repeats:
        return Seen(first, limit, first, allowed(others, quantity), values[one][0], others.level, others.number)
    if len(values[one]) < 2 or first <= limit:
        return Seen(first, limit, None, 0.0, values[one][0], others.level, others.number)
    those = later.peers(one)
    value = best(values[one][1:], quantity)
    return Seen(first, limit, worse(value, those.level, quantity), allowed(those, quantity), value, those.level,
                others.number)
