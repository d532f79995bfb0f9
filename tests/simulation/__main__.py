"""Simulate jobs: the number of seeds, and those whose job did what it must not; or one job's whole story.

tests/simulation/run --seeds 1000000 [--first SEED] [--ranks 10000]
tests/simulation/run --trace SEED
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from functools import partial

from tests.simulation.job import MANY_KINDS, simulate, simulate_many

BATCH = 500
MOST_SHOWN = 20


def find_failing(first: int, batch: int, ranks: int) -> list[tuple[int, list[str]]]:
    """Return the seeds of a batch whose jobs did what they must not, and what that is."""
    failures = []
    for seed in range(first, first + batch):
        try:
            wrong = (simulate_many(MANY_KINDS[seed % len(MANY_KINDS)], ranks, seed) if ranks
                     else simulate(seed).violations)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            failures.append((seed, wrong))
    return failures


def main() -> int:
    """Run what the command line says; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="tests/simulation/run", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="of each job; few, as drawn, by default")
    parser.add_argument("--trace", type=int, metavar="SEED")
    options = parser.parse_args()
    if options.trace is not None:
        run = simulate(options.trace, print)
        print(run.shape, *run.faults, *run.violations or ["as it should be"], sep="\n")
        return bool(run.violations)
    began, wrong = time.monotonic(), []
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        batch = 1 if options.ranks else BATCH
        firsts = range(options.first, options.first + options.seeds, batch)
        for failures in pool.imap_unordered(partial(find_failing, batch=batch, ranks=options.ranks), firsts):
            wrong += failures
            for seed, words in failures[:MOST_SHOWN]:
                print(f"seed {seed}: {'; '.join(words)}"[:400], flush=True)
    seconds = time.monotonic() - began
    print(f"{options.seeds:,} jobs in {seconds:.1f} s, {options.seeds / seconds:,.0f} jobs/s; "
          f"{len(wrong)} not as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
