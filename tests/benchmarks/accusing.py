"""Fabrics with and without a fault, simulated: what the check's verdict finds, beside DLRover's two-round rule.

    python -m tests.benchmarks.accusing [FABRICS] [--first SEED]

The verdict is the package's own, mpiddp/check/stats. What is made up is the fabric: every measurement has log-normal
noise, and a way has the least of what its sender, its receiver and its link let through.
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import random
import statistics
import time
from typing import NamedTuple

from mpiddp.check import PASSES
from mpiddp.check.stats.link_findings import find_link_findings
from mpiddp.check.stats.schema import Nodes, RankInfo, no_measurements
from mpiddp.check.stats.tournament import tournament

NOISE = 0.05  # of each measurement, the logarithm's standard deviation
SMALLEST, LARGEST = 4, 1024  # nodes of a fabric, all magnitudes alike often
BAD = 0.03  # of the nodes and links that are bad, at most
FASTEST, SLOWEST = 0.8, 0.1  # what is left of the bandwidth of what is bad
GROUPS = ((4, 4), (5, 8), (9, 64), (65, 1024))  # sizes, for the table
SLOWER, ROUNDS = 2, 2  # DLRover: more than twice the median, in the better of two rounds


class Fabric(NamedTuple):
    """Nodes and the share of the usual bandwidth that bad ones have left: senders, receivers, links."""

    size: int
    sends: dict[int, float]
    receives: dict[int, float]
    links: dict[tuple[int, int], float]

    @property
    def bad(self) -> set[int]:
        """The nodes that are bad."""
        return {*self.sends, *self.receives}


class Outcome(NamedTuple):
    """What a rule made of a fabric: bad nodes found and missed, good ones accused; links likewise; seconds."""

    found: int
    missed: int
    accused: int
    links_found: int
    links_missed: int
    links_accused: int
    meetings: int
    seconds: float


def fabric(chance: random.Random) -> Fabric:
    """Return a fabric: half of the small ones have something bad, too."""
    count = round(math.exp(chance.uniform(math.log(SMALLEST), math.log(LARGEST))))
    wrong = round(chance.uniform(0, BAD) * count) or (chance.random() < 0.5)
    made = Fabric(count, {}, {}, {})
    for node in chance.sample(range(count), wrong):
        share = math.exp(chance.uniform(math.log(SLOWEST), math.log(FASTEST)))
        kind = chance.choice(("sends", "receives", "both", "link"))
        if kind == "link":
            met = {other for pairs in tournament(count) for pair in pairs if node in pair for other in pair} - {node}
            made.links[node, chance.choice(sorted(met))] = share
        if kind in ("sends", "both"):
            made.sends[node] = share
        if kind in ("receives", "both"):
            made.receives[node] = share
    return made


def measure(made: Fabric, way: tuple[int, int], chance: random.Random) -> float:
    """Return a noisy measurement of a way's bandwidth."""
    share = min(made.sends.get(way[0], 1.0), made.receives.get(way[1], 1.0), made.links.get(way, 1.0))
    return 1e10 * share * math.exp(chance.gauss(0, NOISE))


def ours(made: Fabric, chance: random.Random) -> Outcome:
    """Return what the passes of a check and its rule come to."""
    met = tournament(made.size)
    links = {link: [measure(made, link, chance) for _ in range(PASSES)]
             for pairs in met for one, two in pairs for link in ((one, two), (two, one))}
    ranks = tuple(RankInfo(f"n{node}", node, 0) for node in range(made.size))
    begun = time.process_time()
    findings = find_link_findings(no_measurements(ranks)._replace(links={"bandwidth": links}), Nodes(ranks))
    seconds = time.process_time() - begun
    nodes = {node for one in findings if one.subject == "node" for node in one.nodes}
    accused = {link for one in findings if one.subject == "link" for link in one.links}
    slow = {link for link in made.links if not made.bad & {*link}}  # the others go with their node
    return Outcome(len(nodes & made.bad), len(made.bad - nodes), len(nodes - made.bad), len(accused & slow),
                   len(slow - accused), len(accused - made.links.keys()), PASSES * len(met), seconds)


def dlrover(made: Fabric, chance: random.Random) -> Outcome:
    """Return what DLRover makes of it: NetworkCheckRendezvousManager in its rdzv_manager.py.

    Neighbours meet, then the fastest the slowest; an odd one joins the last pair. A node's time is the better of both,
    and more than twice the median is a straggler's. A group's time is that of its slowest way. It knows no links: the
    ends of a bad one are not counted as accused falsely.
    """
    begun = time.process_time()
    times: dict[int, float] = {}
    order = list(range(made.size))
    for turn in range(ROUNDS):
        if turn == 0:
            groups = [order[at:at + 2] for at in range(0, made.size, 2)]
        else:
            order.sort(key=lambda node: times[node])
            groups = [[order[at], order[-1 - at]] for at in range(made.size // 2)]
            groups += [[order[made.size // 2]]] if made.size % 2 else []
        if len(groups[-1]) == 1:
            alone = groups.pop()
            groups[-1].extend(alone)
        for group in groups:
            took = max(1 / measure(made, (one, two), chance) for one in group for two in group if one != two)
            for node in group:
                times[node] = min(times.get(node, took), took)
    middle = statistics.median(times.values())
    nodes = {node for node, took in times.items() if took > SLOWER * middle}
    ends = {node for way in made.links for node in way}
    return Outcome(len(nodes & made.bad), len(made.bad - nodes), len(nodes - made.bad - ends), 0, len(made.links),
                   0, ROUNDS, time.process_time() - begun)


RULES = {"mpiddp.check": ours, "DLRover": dlrover}


def compare(seed: int) -> tuple[Fabric, dict[str, Outcome]]:
    """Return a fabric, and what each rule makes of it."""
    made = fabric(random.Random(seed))
    return made, {name: rule(made, random.Random(f"{seed} {name}")) for name, rule in RULES.items()}


def lines(results: list[tuple[Fabric, dict[str, Outcome]]]) -> list[str]:
    """Return the table: each rule at each size, and all sizes."""
    found = [(f"{'':13} {'nodes':>10} {'fabrics':>7} {'found':>7} {'missed':>6} {'accused':>7} {'in jobs':>7} "
             f"{'links found':>11} {'missed':>6} {'accused':>7} {'meetings':>8} {'seconds':>8}")]
    for name in RULES:
        for least, most in (*GROUPS, (SMALLEST, LARGEST)):
            some = [outcomes[name] for made, outcomes in results if least <= made.size <= most]
            sums = collections.Counter[str]()
            for one in some:
                sums.update(one._asdict())
            falsely = sum(1 for one in some if one.accused or one.links_accused)
            found.append(
                f"{name:13} {f'{least}-{most:,}':>10} {len(some):7,} {sums['found']:7,} {sums['missed']:6,} "
                f"{sums['accused']:7,} {falsely:7,} {sums['links_found']:11,} {sums['links_missed']:6,} "
                f"{sums['links_accused']:7,} {max((one.meetings for one in some), default=0):8,} "
                f"{max((one.seconds for one in some), default=0):8.2f}")
    return found


def main() -> None:
    """Print the table, and in which fabrics a node was missed or somebody accused falsely."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fabrics", type=int, nargs="?", default=10_000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    with multiprocessing.Pool() as pool:
        results = pool.map(compare, range(given.first, given.first + given.fabrics), chunksize=20)
    print("\n".join(lines(results)))
    for seed, (made, outcomes) in enumerate(results, given.first):
        one = outcomes["mpiddp.check"]
        if one.missed or one.accused or one.links_accused:
            print(f"seed {seed}: {one.missed} missed, {one.accused} nodes, {one.links_accused} links accused: {made}")


if __name__ == "__main__":
    main()
