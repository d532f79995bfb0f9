"""What an all-reduce carries, and what the links let one expect of it."""

from __future__ import annotations

from typing import NamedTuple

from .link_findings import RECEIVES, SENDS, by_node
from .outliers import best, median
from .schema import LINK_METRICS, Measurements


class Reduced(NamedTuple):
    """An all-reduce: its size in bytes, its seconds, and its bus bandwidth in B/s."""

    size: int
    seconds: float
    bus: float


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce in B/s, as nccl-tests defines it (its doc/PERFORMANCE.md).

    It is size / seconds * 2 (n - 1) / n: what each rank's link has carried, whatever their number.
    """
    return size / seconds * 2 * (ranks - 1) / ranks if seconds > 0 and ranks else 0.0


def reduced(measured: Measurements) -> list[Reduced]:
    """Return the all-reduces that were measured, with their bus bandwidths."""
    return [Reduced(size, seconds, bus_bandwidth(size, seconds, len(measured.ranks)))
            for size, seconds in sorted(measured.allreduce.items())]


def expected_bandwidth(measured: Measurements) -> float | None:
    """Return the bus bandwidth in B/s that the links let one expect of a large all-reduce, None without links.

    A ring is as fast as its slowest link. Nobody chooses its links between nodes, so a node counts as it sends or
    receives by the median; inside of nodes it is the slowest node's median.
    """
    metric = LINK_METRICS["large"]
    links = {link: [best(metric, passes)] for link, passes in measured.links.get("large", {}).items() if passes}
    found = [passes[0] for role in (SENDS, RECEIVES) for passes in by_node(metric, links, role, 0.5).values()]
    homes: dict[int, list[float]] = {}
    for link, passes in measured.inside.get("large", {}).items():
        if passes:
            homes.setdefault(measured.ranks[link[0]].node, []).append(best(metric, passes))
    return min([*found, *map(median, homes.values())], default=None)
