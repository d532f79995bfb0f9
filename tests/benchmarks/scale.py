"""How a start grows with the ranks: from MPI ready to group ready, and the plan for jobs that no machine here has.

    python -m tests.benchmarks.scale [--quick]

Real ranks on this machine, torch imported beforehand; medians (`scale_rank.py` tells what is measured).
An exponent of 1 is time in proportion to the ranks. The MPI is Open MPI, whose ranks give way to others where there are
more of them than cores, as there are here: those of MPICH spin.
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
PLAYED, MODELLED = 1_000, 10_000
TIMEOUT_S = 300


def job(ranks: int, program: str, number: int) -> dict[str, Any]:
    """Return what rank 0 of a job prints as JSON."""
    mpi = MPIS["openmpi5"]
    command = mpiexec_command(mpi, ranks, ROOT / "tests/benchmarks" / program, number)
    environ = {**single_node_environ(mpi), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = processes.run(*command, timeout=TIMEOUT_S, env=environ, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{program} with {ranks} ranks failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def model(ranks: int, pieces: dict[str, float]) -> dict[str, float]:
    """Return on what rank 0 would spend its seconds, from MPI ready to NCCL's turn: `pieces` are those for a rank."""
    return {
        "facts and answers before torch": ranks * pieces["hosts"],
        "facts and answers after torch": ranks * pieces["devices"],
        "plans": plan(ranks)[0],
        "connections to the store, and NCCL's identifier": ranks * pieces["store"],
        "word that all are connected": ranks * pieces["errors"],
    }


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
        found = job(ranks, "scale_rank.py", 1 if quick else TURNS)
        for how, values in medians.items():
            values.append(statistics.median(found[how]["seconds"]))
        ours, theirs, nccl = (f"{medians[how][-1]:11.3f}{found[how]['operations']:11.1f}" for how in medians)
        print(f"{ranks:5}{ours}{theirs[1:]}{medians['mpiddp'][-1] / medians['env'][-1]:8.2f} {nccl}", flush=True)
    slopes = [exponent(sizes, values) for values in medians.values()]
    print(f"growth exponent: mpiddp {slopes[0]:.2f}, env:// {slopes[1]:.2f}, mpiddp as for NCCL {slopes[2]:.2f}")
    for ranks in (1_000,) if quick else PLANNED:
        print(f"plan for {ranks:,} ranks: {plan(ranks)[0]:.3f} s")
    parts = model(MODELLED, job(2, "scale_pieces.py", PLAYED // 10 if quick else PLAYED))
    print(f"rank 0 in a start of {MODELLED:,} ranks, on paper:")
    for what, seconds in [*parts.items(), ("together", sum(parts.values()))]:
        print(f"{seconds:8.2f} s  {what}")


if __name__ == "__main__":
    main()
