"""Run every cell of the fault matrix and print a table, worst cells first: `python -m tests.faults`."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections import defaultdict

from tests.cluster import Cluster
from tests.faults.matrix import MOMENTS, STATUSES, WHOLE, Outcome, run
from tests.support import ROOT


def main() -> int:
    """Run the cells, print the table, and return 1 if a cell is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(STATUSES), help="only these ways to end")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="only these moments")
    parser.add_argument("--ranks", default="0,-1", help="which rank comes to its end; -1 is the last")
    options = parser.parse_args()
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    outcomes: list[Outcome] = []
    try:
        with Cluster(visible=[ROOT]) as cluster:
            ranks = [int(rank) for rank in options.ranks.split(",")]
            for kind, moment, rank, launcher in itertools.product(
                    options.kinds.split(","), options.moments.split(","), ranks, WHOLE):
                outcome = run(launcher, kind, moment, rank, cluster)
                outcomes.append(outcome)
                if outcome.problems:
                    print(f"{kind} at {moment} on rank {outcome.rank} under {launcher.name}: {outcome.problems}\n"
                          f"{outcome.stderr[-3000:]}\n", file=sys.stderr, flush=True)
    finally:
        print(table(outcomes))
    return 1 if any(outcome.problems for outcome in outcomes) else 0


def table(outcomes: list[Outcome]) -> str:
    """Return a table with a row for each way to end, the slowest first, and a line that counts the cells.

    A launcher's column has the longest time from the fault to the job's end, and the exit statuses.
    """
    kinds: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome.kind].append(outcome)
    rows = []
    for kind, some in sorted(kinds.items(), key=lambda one: -max(outcome.seconds for outcome in one[1])):
        cells = [cell([outcome for outcome in some if outcome.launcher == launcher]) for launcher in WHOLE]
        rows.append(f"| {kind} | {some[0].expected} | {' | '.join(cells)} |")
    names = " | ".join(launcher.name for launcher in WHOLE)
    head = [f"| end | status | {names} |", "| --- | --- |" + " --- |" * len(WHOLE)]
    counts = (f"{len(outcomes)} cells: cause named in {sum(one.named for one in outcomes)}, "
              f"processes left by {sum(bool(one.lost) for one in outcomes)}, "
              f"not as it should be {sum(bool(one.problems) for one in outcomes)}")
    return "\n".join([*head, *rows, "", counts])


def cell(outcomes: list[Outcome]) -> str:
    """Return the text of a cell: one way to end under one launcher."""
    if not outcomes:
        return "-"
    return f"{max(one.seconds for one in outcomes):.1f} s, {'/'.join(sorted({str(one.status) for one in outcomes}))}"


if __name__ == "__main__":
    sys.exit(main())
