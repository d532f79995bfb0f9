"""What is to be expected: of an all-reduce, from the ways it takes, and of the time of a tournament."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .doubt import LOOKS, PARTNERS
from .figures import Figures
from .outliers import median
from .rounds import rounds

AGAIN = 2 * PARTNERS  # rounds that the suspects' meetings fit into, as a rule


class Reduced(NamedTuple):
    """An all-reduce: its size in bytes, its seconds, and its bus bandwidth in B/s."""

    size: int
    seconds: float
    bus: float


def bus(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in B/s, as nccl-tests defines it (its doc/PERFORMANCE.md).

    It is size / seconds * 2 (n - 1) / n: what each rank's way has carried, whatever their number.
    """
    return size / seconds * 2 * (ranks - 1) / ranks if seconds > 0 and ranks else 0.0


def reduced(figures: Figures) -> list[Reduced]:
    """Return the all-reduces that were measured, with their bus bandwidths."""
    return [Reduced(size, seconds, bus(size, seconds, len(figures.ranks))) for size, seconds in figures.reduced]


def bandwidth(figures: Figures) -> float | None:
    """Return the bus bandwidth in B/s that the pairs let one expect of a large all-reduce, None without pairs.

    A ring is as fast as its slowest way. Its ways between nodes can be chosen by nobody, so a node counts as it sends
    or receives by the median; inside of nodes it is the slowest node's median.
    """
    found = [value for end in (0, 1) for value in medians(figures.ways.get("large", {}).items(), end)]
    homes: dict[int, list[float]] = {}
    for way, values in figures.inside.get("large", {}).items():
        if values:
            homes.setdefault(figures.ranks[way[0]].node, []).append(values[-1])
    found += [median(values) for values in homes.values()]
    return min(found, default=None)


def medians(ways: Iterable[tuple[tuple[int, int], list[float]]], end: int) -> list[float]:
    """Return the median of the ways at each node, of which that is the first or the second end."""
    nodes: dict[int, list[float]] = {}
    for way, values in ways:
        if values:
            nodes.setdefault(way[end], []).append(values[-1])
    return [median(values) for values in nodes.values()]


def duration(nodes: int, meeting_s: float, again: int = AGAIN) -> float:
    """Return how many seconds a tournament of nodes takes, if a meeting takes so many.

    `again` is how many rounds the ways fit into that are measured again, LOOKS times.
    """
    return (len(rounds(nodes)) + LOOKS * again) * meeting_s
