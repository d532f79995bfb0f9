"""Run every cell of the fault matrix and print a table, worst cells first: `python -m tests.faults`."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import defaultdict

from tests.cluster import Cluster
from tests.faults.matrix import LAUNCHERS, MOMENTS, STATUSES, Launcher, Outcome, run
from tests.support import ROOT


def main() -> int:
    """Run the cells, print the table, and return 1 if a cell is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(STATUSES), help="only these ways to end")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="only these moments")
    parser.add_argument("--ranks", default="0,-1", help="which rank comes to its end; -1 is the last")
    options = parser.parse_args()
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    outcomes = []
    with Cluster(visible=[ROOT]) as cluster:
        for kind, moment, rank, launcher in itertools.product(
                options.kinds.split(","), options.moments.split(","), map(int, options.ranks.split(",")), LAUNCHERS):
            outcome = run(launcher, kind, moment, rank, cluster)
            outcomes.append(outcome)
            if outcome.problems:
                print(f"{kind} at {moment} on rank {outcome.rank} under {launcher.name}: {outcome.problems}\n"
                      f"{outcome.stderr[-3000:]}\n", file=sys.stderr, flush=True)
    print(table(outcomes))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def table(outcomes: list[Outcome]) -> str:
    """Return a table with a row for each way to end and launcher, the slowest first."""
    cells: dict[tuple[str, Launcher], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        cells[outcome.kind, outcome.launcher].append(outcome)
    rows = []
    for (kind, launcher), some in sorted(cells.items(), key=lambda cell: -max(one.seconds for one in cell[1])):
        statuses = ", ".join(sorted({str(one.status) for one in some}))
        bad = sum(bool(one.problems) for one in some)
        left = sum(len(one.left) for one in some)
        named = sum(one.named for one in some)
        rows.append(f"| {kind} | {launcher.name} | {max(one.seconds for one in some):.2f} | {some[0].expected} | "
                    f"{statuses} | {named} of {len(some)} | {left} | {bad} |")
    head = "| end | launcher | seconds to the end, at most | status | seen | cause named | processes left | wrong |"
    return "\n".join([head, "| --- | --- | --- | --- | --- | --- | --- | --- |", *rows])


if __name__ == "__main__":
    sys.exit(main())
