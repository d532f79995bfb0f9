"""What it costs a training to be asked where its ranks are, as --stall does, at most every ten seconds.

    python -m tests.benchmarks.asking [--quick]

Two ranks on this machine. In every second block of some seconds they are asked again and again, in the others not at
all; each block is compared with the one before.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import tempfile
import time

from mpiddp.where import client
from mpiddp.where.stall import MAX_INTERVAL_S
from tests import processes
from tests.support import MPIS, ROOT, mpiexec_command, single_node_environ

SCRIPT = ROOT / "tests/benchmarks/asked.py"
BLOCK_S, BLOCKS = 5.0, 60
STARTING_S = 60


def ask_until(end: float) -> int:
    """Ask until then, and return how often."""
    for count in itertools.count():
        if time.time() >= end:
            return count
        client.request_snapshot(client.find_endpoint(""))
    raise AssertionError


def train(block_s: float, blocks: int) -> tuple[list[int], int]:
    """Return the steps of each block, and how often the ranks were asked.

    The training goes on for another block, so that it is there when the last answer is late.
    """
    mpi, asked = MPIS["mpich"], 0
    environ = {**single_node_environ(mpi), "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    command = mpiexec_command(mpi, 2, "-m", "mpiddp", "--quiet", SCRIPT, block_s, blocks + 1)
    with processes.start(command, environ, ROOT, stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout
            start = float(job.stdout.readline().split()[1])
            for block in range(1, blocks, 2):
                time.sleep(max(0.0, start + block * block_s - time.time()))
                asked += ask_until(start + (block + 1) * block_s - 0.1)
            rest, _ = job.communicate(timeout=STARTING_S)
        finally:
            processes.end_tree(job.pid)
    return list(map(int, rest.split()[1:-1])), asked


def main() -> None:
    """Print the cost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a short training, to see that it works")
    quick = parser.parse_args().quick
    block_s, blocks = (3.0, 2) if quick else (BLOCK_S, BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        steps, asked = train(block_s, blocks)
    ratios = [watched / alone for alone, watched in zip(steps[::2], steps[1::2], strict=True)]
    ratio = statistics.median(ratios)
    every_s = blocks / 2 * block_s / asked
    print(f"{statistics.median(steps) / block_s:.0f} steps/s; asked every {every_s:.2f} s {ratio:.4f} of that "
          f"(median of {len(ratios)} pairs), so every "
          f"{MAX_INTERVAL_S:.0f} s {1 - (1 - ratio) * every_s / MAX_INTERVAL_S:.5f}")


if __name__ == "__main__":
    main()
