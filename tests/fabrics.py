"""Measurements of checks that never were: fabrics of any size, with nodes and links that are slow.

    python -m tests.fabrics

prints their tables.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from mpiddp.check import PASSES, table
from mpiddp.check.stats import findings as all_findings
from mpiddp.check.stats.schema import CheckFinding, Measurements, RankInfo, no_measurements
from mpiddp.check.stats.tournament import tournament

GPU, CPU = "NVIDIA H100 80GB HBM3", "12 cores of AMD EPYC 7763"
OF_A_RANK = {"matrix": (1.1e12, 6.7e14), "memory": (2.1e10, 2.4e10), "device-memory": (0, 2.9e12),
             "to-device": (0, 5.4e10), "from-device": (0, 5.2e10)}  # of a CPU, of a GPU
OF_A_NODE = {"shm-write": 4.1e9, "shm-read": 9.8e9, "shm-size": 2.7e11, "shm-free": 2.6e11, "tmp-write": 1.3e9,
             "tmp-read": 3.1e9, "tmp-free": 4.2e11, "clock": 0.002, "import": 3.4}
REDUCED = tuple(2**power for power in range(10, 29, 2))


class Faults(NamedTuple):
    """What is slow, each by the share of the usual that is left: senders, receivers, ways, ranks' matrix products."""

    sends: dict[int, float] = {}  # noqa: RUF012 — nobody changes it
    receives: dict[int, float] = {}  # noqa: RUF012
    links: dict[tuple[int, int], float] = {}  # noqa: RUF012
    matrix: dict[int, float] = {}  # noqa: RUF012


NONE = Faults()


def fabric(nodes: int, local: int = 8, faults: Faults = NONE, gpus: bool = True, seed: int = 0) -> Measurements:
    """Return the figures of nodes with `local` ranks each, every measurement with a noise of 3 %."""
    chance = random.Random(seed)

    def passes(value: float) -> list[float]:
        return [value * math.exp(chance.gauss(0, 0.03)) for _ in range(PASSES)]

    digits = max(3, len(str(nodes - 1)))
    ranks = tuple(RankInfo(f"n{node:0{digits}}", node, one, f"cuda:{one}" if gpus else "cpu", GPU if gpus else CPU)
                  for node in range(nodes) for one in range(local))
    own = {name: {rank: passes(pair[gpus] * (faults.matrix.get(rank, 1) if name == "matrix" else 1))
                  for rank in range(len(ranks))} for name, pair in OF_A_RANK.items() if pair[gpus]}
    own |= {name: {node * local: passes(value) for node in range(nodes)} for name, value in OF_A_NODE.items()}
    met = [way for pairs in tournament(nodes) for one, two in pairs for way in ((one, two), (two, one))]
    usual = 2.4e10 if gpus else 1.18e9
    share = {way: min(faults.sends.get(way[0], 1), faults.receives.get(way[1], 1), faults.links.get(way, 1))
             for way in met}
    ways: dict[str, dict[tuple[int, int], list[float]]] = {
        "bandwidth": {way: passes(usual * share[way]) for way in met}, "latency": {}}
    for one, two in met:
        ways["latency"][one, two] = ways["latency"].get((two, one)) or passes(4e-6 if gpus else 4e-5)
    inside = {"bandwidth": {
        (node * local + one, node * local + two): passes(3e11 if gpus else 6e9) for node in range(nodes)
        for one in range(local) for two in range(local) if one != two}} if local <= 8 else {}
    slowest = usual * min([1.0, *faults.sends.values(), *faults.receives.values()])
    total = len(ranks)
    reduced = {size: passes(2 * math.log2(total) * 8e-6 + size * 2 * (total - 1) / total / (0.93 * slowest))[0]
               for size in REDUCED if total > 1}
    links = ways if nodes > 1 else {}
    return no_measurements(ranks)._replace(
        by_rank=own, links=links, inside_links=inside, mpi_links=links, allreduce=reduced)


def found(figures: Measurements) -> tuple[list[CheckFinding], list[str]]:
    """Return the verdict on figures, and its notes."""
    return all_findings.find_all(figures), all_findings.notes(figures, "nccl")


def three() -> Measurements:
    """Return three nodes of two ranks, one of which sends slowly."""
    return fabric(3, 2, Faults(sends={1: 0.4}), gpus=False, seed=3)


def many(nodes: int) -> Measurements:
    """Return nodes of which one is slow both ways, one receives slowly, one has a slow rank, and one way is slow."""
    some = tournament(nodes)[2][nodes // 5]
    slow, deaf, hot = (next(node for node in range(at, nodes) if node not in some) for at in
                       (17, nodes * 2 // 3, nodes // 3))
    return fabric(nodes, 8, Faults(sends={slow: 0.48}, receives={slow: 0.52, deaf: 0.4}, links={some: 0.3},
                                   matrix={hot * 8 + 5: 0.7}), seed=nodes)


def main() -> None:
    """Print the tables."""
    for figures in (three(), many(64), many(256)):
        print("\n".join([*table.render(figures, *found(figures)), ""]))


if __name__ == "__main__":
    main()
