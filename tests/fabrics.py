"""Measurements of checks that never were: fabrics of any size, with nodes and links that are slow.

    python -m tests.fabrics FOLDER

draws the pictures of the check's README.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import NamedTuple

from mpiddp.base.text import fold_hosts
from mpiddp.check import PASSES, drawing, table
from mpiddp.check.stats import findings as all_findings
from mpiddp.check.stats.schema import Finding, Measurements, RankInfo, empty
from mpiddp.check.stats.tournament import rounds

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
    met = [way for pairs in rounds(nodes) for one, two in pairs for way in ((one, two), (two, one))]
    usual = 2.4e10 if gpus else 1.18e9
    share = {way: min(faults.sends.get(way[0], 1), faults.receives.get(way[1], 1), faults.links.get(way, 1))
             for way in met}
    ways: dict[str, dict[tuple[int, int], list[float]]] = {
        "large": {way: passes(usual * share[way]) for way in met}, "latency": {}}
    for one, two in met:
        ways["latency"][one, two] = ways["latency"].get((two, one)) or passes(4e-6 if gpus else 4e-5)
    inside = {"large": {(node * local + one, node * local + two): passes(3e11 if gpus else 6e9) for node in range(nodes)
                        for one in range(local) for two in range(local) if one != two}} if local <= 8 else {}
    slowest = usual * min([1.0, *faults.sends.values(), *faults.receives.values()])
    total = len(ranks)
    reduced = {size: passes(2 * math.log2(total) * 8e-6 + size * 2 * (total - 1) / total / (0.93 * slowest))[0]
               for size in REDUCED if total > 1}
    links = ways if nodes > 1 else {}
    claims = {rank: {"large": 2.5e10, "matrix": 9.89e14} for rank in range(total)} if gpus else {}
    return empty(ranks)._replace(own=own, links=links, inside=inside, by_mpi=links, allreduce=reduced, claims=claims)


def found(figures: Measurements) -> tuple[list[Finding], list[str]]:
    """Return the verdict on figures, and its notes."""
    return all_findings.find(figures), all_findings.notes(figures, "nccl")


def three() -> Measurements:
    """Return three nodes of two ranks, one of which sends slowly."""
    return fabric(3, 2, Faults(sends={1: 0.4}), gpus=False, seed=3)


def many(nodes: int) -> Measurements:
    """Return nodes of which one is slow both ways, one receives slowly, one has a slow rank, and one way is slow."""
    some = rounds(nodes)[2][nodes // 5]
    slow, deaf, hot = (next(node for node in range(at, nodes) if node not in some) for at in
                       (17, nodes * 2 // 3, nodes // 3))
    return fabric(nodes, 8, Faults(sends={slow: 0.48}, receives={slow: 0.52, deaf: 0.4}, links={some: 0.3},
                                   matrix={hot * 8 + 5: 0.7}), seed=nodes)


PICTURES = {"three": three, "sixty-four": lambda: many(64), "two-hundred": lambda: many(256)}


def main() -> None:
    """Draw the pictures, and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, make in PICTURES.items():
        figures = make()
        findings, notes = found(figures)
        print("\n".join([*table.lines(figures, findings, notes), ""]))
        title = f"{len(figures.ranks):,} ranks on {fold_hosts(who.host for who in figures.ranks)}"
        drawing.write(str(folder / f"{name}.png"), figures, findings, title)


if __name__ == "__main__":
    main()
