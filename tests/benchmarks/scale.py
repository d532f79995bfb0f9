"""How a start grows with the ranks: from MPI ready to group ready, and the plan for jobs that no machine here has.

    python -m tests.benchmarks.scale [--quick]

Real ranks on this machine, torch imported beforehand; medians (`scale_rank.py` tells what is measured).
An exponent of 1 is time in proportion to the ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from typing import Any

from tests import processes
from tests.benchmarks.planning import plan
from tests.support import MPIS, ROOT, mpiexec_command, single_node_environ

RANKS, TURNS = (2, 4, 8, 16, 32, 64), 5
PLANNED = (1_000, 10_000, 100_000)
TIMEOUT_S = 300


def start(ranks: int, turns: int) -> dict[str, Any]:
    """Return what a job of some ranks tells: seconds and the store's operations by the way of starting."""
    mpi = MPIS["mpich"]
    command = mpiexec_command(mpi, ranks, ROOT / "tests/benchmarks/scale_rank.py", turns)
    environ = {**single_node_environ(mpi), "OMP_NUM_THREADS": "1"}
    done = processes.run(*command, timeout=TIMEOUT_S, env=environ, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the slope of the logarithms, by least squares."""
    return statistics.linear_regression(list(map(math.log, sizes)), list(map(math.log, seconds))).slope


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few ranks once, to see that it works")
    quick = parser.parse_args().quick
    sizes = [2, 4] if quick else list(RANKS)
    medians: dict[str, list[float]] = {"mpiddp": [], "env": [], "nccl": []}
    print("          gloo: from MPI ready to a first all-reduce         as for NCCL\n"
          "         mpiddp            env://             ratio         mpiddp\n"
          "ranks    seconds operations   seconds operations            seconds operations")
    for ranks in sizes:
        found = start(ranks, 1 if quick else TURNS)
        for how, values in medians.items():
            values.append(statistics.median(found[how]["seconds"]))
        ours, theirs, nccl = (f"{medians[how][-1]:11.3f}{found[how]['operations']:11.1f}" for how in medians)
        print(f"{ranks:5}{ours}{theirs[1:]}{medians['mpiddp'][-1] / medians['env'][-1]:8.2f} {nccl}", flush=True)
    slopes = [exponent(sizes, values) for values in medians.values()]
    print(f"growth exponent: mpiddp {slopes[0]:.2f}, env:// {slopes[1]:.2f}, mpiddp as for NCCL {slopes[2]:.2f}")
    for ranks in (1_000,) if quick else PLANNED:
        print(f"plan for {ranks:,} ranks: {plan(ranks)[0]:.3f} s")


if __name__ == "__main__":
    main()
