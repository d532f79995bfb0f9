"""Robust statistics: how much worse than its peers a value is, and how much worse it may be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .figures import Quantity

MADS = 5.0  # a value may be worse than the median of its peers by so many median absolute deviations
FEW = {1: 0.45, 2: 0.35, 3: 0.25}  # and by this share where there are so few peers that their deviation says nothing
SENSE, SENSE_MADS = 0.5, 3.0  # a first look: half of what a verdict asks for, and so many deviations
LEAVE_OUT = 64  # of so many values each is compared with the others alone; of more, one does not move the median

median = statistics.median


def mad(values: Sequence[float], centre: float | None = None) -> float:
    """Return the median absolute deviation of values, 0 if there are none."""
    if not values:
        return 0.0
    middle = median(values) if centre is None else centre
    return median([abs(value - middle) for value in values])


def best(values: Sequence[float], quantity: Quantity) -> float:
    """Return the best of values: nobody is accused of moments, only of what shows in each look."""
    return max(values) if quantity.more else min(values)


class Peers(NamedTuple):
    """What a value is compared with: the level and the deviation of a `number` of others, known by so many values."""

    level: float
    deviation: float
    number: int
    known: int


def peers(values: Sequence[float], again: Sequence[float], quantity: Quantity) -> Peers:
    """Return what others' first values, and those of later looks, make a value be compared with.

    The level is that of all these, or that of the later ones if it is worse, as when the machine has got busy.
    """
    both = [*values, *again]
    level = median(both)
    deviation = mad(both, level)
    if len(again) > 2:
        level = (min if quantity.more else max)(level, median(again))
    return Peers(level, deviation, len(values), len(both))


def worse(value: float, level: float, quantity: Quantity) -> float:
    """Return by how much a value is worse than the level: a share of that, or a difference if the unit is a share.

    It is negative for a better value.
    """
    by = level - value if quantity.more else value - level
    return by / scale(level, quantity)


def scale(level: float, quantity: Quantity) -> float:
    """Return what a difference is divided by."""
    return abs(level) if quantity.unit and level else 1.0


def allowed(those: Peers, quantity: Quantity, first: bool = False) -> float:
    """Return by how much a value may be worse, as `worse` counts it; `first` is for a first look.

    The fewer values, the less their deviation is known: it counts for more.
    """
    by = scale(those.level, quantity)
    least = max(quantity.least, FEW.get(those.number, 0.0))
    share = max(least * abs(those.level) / by, quantity.floor / by)
    deviation = those.deviation / by
    if first:
        return max(share * SENSE, SENSE_MADS * deviation)
    return max(share, MADS * (1 + 2 / those.known) * deviation)


def both_ways(value: float, those: Peers, quantity: Quantity) -> float:
    """Return by how much a value is off, ahead or behind, beyond what is allowed; 0 if it is not."""
    off = value - those.level
    return off if abs(off) > max(quantity.floor, MADS * (1 + 2 / those.known) * those.deviation) else 0.0
