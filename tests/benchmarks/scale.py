"""How a start grows with the ranks: from MPI ready to group ready, and the plan for jobs that no machine here has.

    python -m tests.benchmarks.scale [--quick]

Real ranks on this machine, torch imported beforehand, gloo; ours and env:// in turn, medians. An exponent
of 1 is time in proportion to the ranks. The store's operations are counted in runs of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics

from tests import processes
from tests.benchmarks.planning import plan
from tests.support import MPIS, ROOT, mpiexec_command, single_node_environ

RANKS, RUNS = (2, 4, 8, 16, 32, 64), 3
PLANNED = (1_000, 10_000, 100_000)
TIMEOUT_S = 300
WAYS = ("mpiddp", "env")


def start(how: str, ranks: int, *options: str) -> dict[str, float]:
    """Return the seconds that a start took, and the store's operations per rank."""
    mpi = MPIS["mpich"]
    command = mpiexec_command(mpi, ranks, ROOT / "tests/benchmarks/scale_rank.py", how, *options)
    environ = {**single_node_environ(mpi), "OMP_NUM_THREADS": "1"}
    done = processes.run(*command, timeout=TIMEOUT_S, env=environ, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{how} with {ranks} ranks failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of the logarithms, by least squares."""
    xs, ys = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    return statistics.linear_regression(xs, ys).slope


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few ranks once, to see that it works")
    quick = parser.parse_args().quick
    sizes = [2, 4] if quick else list(RANKS)
    print(f"{'ranks':>7}{'mpiddp':>10}{'env://':>10}{'ratio':>7}{'operations per rank: mpiddp':>29}{'env://':>8}")
    medians: dict[str, list[float]] = {how: [] for how in WAYS}
    for ranks in sizes:
        found: dict[str, list[float]] = {how: [] for how in WAYS}
        for _ in range(1 if quick else RUNS):
            for how in WAYS:
                found[how].append(start(how, ranks)["seconds"])
        ours, theirs = (statistics.median(found[how]) for how in WAYS)
        medians["mpiddp"].append(ours)
        medians["env"].append(theirs)
        asked = [start(how, ranks, "--count")["operations"] for how in WAYS]
        print(f"{ranks:7}{ours:8.3f} s{theirs:8.3f} s{ours / theirs:7.2f}{asked[0]:29.1f}{asked[1]:8.1f}", flush=True)
    slopes = [exponent(sizes, medians[how]) for how in WAYS]
    print(f"growth exponent: mpiddp {slopes[0]:.2f}, env:// {slopes[1]:.2f}")
    for ranks in (1_000,) if quick else PLANNED:
        print(f"plan for {ranks:,} ranks: {plan(ranks)[0]:.3f} s")


if __name__ == "__main__":
    main()
