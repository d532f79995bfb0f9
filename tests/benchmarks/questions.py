"""A healthy training is asked where its ranks are, as often as it can answer, and must come to the same weights.

    python -m tests.benchmarks.questions [NUMBER] [--seconds SECONDS] [--only plain|busy]

Two jobs of two ranks each answer half of the questions: a plain loop, and one with DataLoader workers and many threads.
Then each trains as many steps once more while nobody asks. Their agents, unlike those of `python -m mpiddp`, do not
measure for 0.2 s how busy a rank is, so that it is asked more often. The exit status is 1 if a job was harmed.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpiddp.where import client
from mpiddp.where.registry import read_endpoints
from mpiddp.where.snapshot import Activity
from tests import processes
from tests.support import MPIS, ROOT, mpiexec_command, single_node_environ

FOLDER = ROOT / "tests/benchmarks"
NUMBER = 100_000
KINDS = "plain", "busy"
STARTING_S = 600  # a busy machine takes minutes to import torch
UNSEEN = (Activity.SILENT, Activity.LOST)


def start(kind: str, end: object, state: str) -> subprocess.Popen[str]:
    """Start a training that ends when the file `end` is there, or after so many steps."""
    mpi = MPIS["mpich"]
    command = mpiexec_command(mpi, 2, FOLDER / "hasty.py", "--quiet", FOLDER / "questioned.py", kind, end)
    environ = {**single_node_environ(mpi), "XDG_STATE_HOME": state, "PYTHONPATH": str(ROOT)}
    return processes.start(command, environ, ROOT, stdout=subprocess.PIPE)


def ask(job: subprocess.Popen[str], number: int, most_s: float) -> tuple[int, int]:
    """Ask a job so many times, or for so long; return how often, and how many answers had the stack of each rank.

    It must not end meanwhile.
    """
    deadline = time.monotonic() + STARTING_S
    while not (cards := list(read_endpoints().values())):
        assert job.poll() is None and time.monotonic() < deadline, "the job has not started"
        time.sleep(0.1)
    asked, seen, end_s = 0, 0, time.monotonic() + most_s
    while asked < number and time.monotonic() < end_s:
        assert job.poll() is None, "the job has ended"
        snapshot, _ = client.request_snapshot(cards[0])
        asked += 1
        seen += not any(group.location.activity in UNSEEN for group in snapshot.groups)
    return asked, seen


def trained(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Return how many steps a job has made, and the digest of its weights, when it has come to its end."""
    told, _ = job.communicate()
    found = set(re.findall(r"^(\d+) steps, (\w+)$", told, re.MULTILINE))
    assert job.returncode == 0, f"the job's status is {job.returncode}"
    assert len(found) == 1, f"the ranks do not agree: {told}"
    steps, digest = found.pop()
    return int(steps), digest


def question(kind: str, number: int, most_s: float, folder: Path) -> str:
    """Ask a job so many times, compare it with one that nobody asks, and say how that went in a line."""
    os.environ["XDG_STATE_HOME"] = str(folder)
    end = folder / "end"
    began_s = time.monotonic()
    with start(kind, end, str(folder)) as job:
        try:
            asked, seen = ask(job, number, most_s)
            took_s = time.monotonic() - began_s
            end.touch()
            steps, digest = trained(job)
        finally:
            processes.end_tree(job.pid)
    with start(kind, steps, str(folder)) as job:
        try:
            alone = trained(job)
        finally:
            processes.end_tree(job.pid)
    assert alone == (steps, digest), f"{kind}: other weights"
    return (f"{kind}: {asked:,} questions in {took_s:.0f} s, {seen:,} answers with all stacks; "
            f"the same weights after {steps:,} steps")


def main() -> int:
    """Ask both jobs; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("number", nargs="?", type=int, default=NUMBER)
    parser.add_argument("--seconds", type=float, default=math.inf, help="ask each job no longer than that")
    parser.add_argument("--only", choices=KINDS, help="ask this job alone")
    given = parser.parse_args()
    kinds = [given.only] if given.only else KINDS
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(question(kind, given.number // len(kinds), given.seconds, Path(folder)), flush=True)
            except (AssertionError, client.UnansweredError) as error:
                print(f"{kind}: {error}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
