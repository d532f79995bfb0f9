"""A check of three nodes, one bad in eight ways, or none: python -m tests.benchmarks.checking [RUNS] [FAULT].

For each fault, of how many runs the node was named with it, how many accused anybody else, and the median of seconds.
The cluster is that of the tests: three nodes that share a machine's cores, with links of 1 Gbit/s. The first row is a
job of hello_world.py with as many ranks, as often: a check has such a start in its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.cluster import Cluster, impair
from tests.cluster.cluster import RUN
from tests.messages import find
from tests.support import EXAMPLES, MPIS, ROOT, Mpi, srun

BAD = "node2"
LINK, SLOW = 125e6, 12.5e6  # bytes per second
SHM = 16 * 2**20
LIMIT_S = 120
TCP = {"UCX_TLS": "tcp,self"}  # else MPICH finds that the nodes share a machine, and uses no network

Begin = Callable[[Cluster, contextlib.ExitStack], Mapping[str, str]]


class Fault(NamedTuple):
    """What is bad: a function that makes it so and returns variables for the job, and messages that name it."""

    begin: Begin
    named: dict[str, dict[str, str]]  # known fields by the message's name


class Outcome(NamedTuple):
    """What a check said: whether it named the bad node with its fault, what else it said, and how long it took."""

    named: bool
    others: list[str]
    seconds: float
    said: str


def shaped(begin: Callable[[Cluster], contextlib.AbstractContextManager[object]]) -> Begin:
    """Return what makes a node bad whose link is as fast as the others'."""
    def enter(cluster: Cluster, undo: contextlib.ExitStack) -> Mapping[str, str]:
        undo.enter_context(impair.slow_links(cluster, LINK))
        undo.enter_context(begin(cluster))
        return {}

    return enter


def plain(begin: Callable[[Cluster], contextlib.AbstractContextManager[object]]) -> Begin:
    """Return what makes a node bad, whatever its link."""
    def enter(cluster: Cluster, undo: contextlib.ExitStack) -> Mapping[str, str]:
        undo.enter_context(begin(cluster))
        return {}

    return enter


FAULTS = {
    "none": Fault(lambda _cluster, _undo: {}, {}),
    "none, 1 Gbit/s": Fault(shaped(lambda _: contextlib.nullcontext()), {}),
    "a tenth": Fault(shaped(lambda cluster: impair.slow_link(cluster, BAD, SLOW)),
                     {"check/slow_both_ways": {}}),
    "a tenth, out": Fault(shaped(lambda cluster: impair.slow_link(cluster, BAD, SLOW, "out")),
                          {"check/slow_sender": {}}),
    "a tenth, in": Fault(shaped(lambda cluster: impair.slow_link(cluster, BAD, SLOW, "in")),
                         {"check/slow_receiver": {}}),
    "5 ms": Fault(plain(lambda cluster: impair.delay(cluster, BAD, 0.005, "out")), {"check/high_latency": {}}),
    "2 % lost": Fault(shaped(lambda cluster: impair.drop(cluster, BAD, 0.02)), {"check/lost_segments": {}}),
    "half the CPU": Fault(plain(lambda cluster: impair.half_cpu(cluster, BAD, 1.0)),
                          {"check/slow_node": {"metric": "matrix product"},
                           "check/slow_rank": {"metric": "matrix product"},
                           "check/worse_value": {"metric": "CPU time throttled by its cgroup"}}),
    "/dev/shm": Fault(plain(lambda cluster: impair.small_shm(cluster, BAD, SHM)),
                      {"check/folder_small": {"folder": "/dev/shm", "size": "16 MiB"},
                       "check/worse_value": {"metric": "size of /dev/shm", "value": "16 MiB"}}),
    "clock": Fault(lambda cluster, undo: undo.enter_context(impair.wrong_clock(cluster, BAD, 3.0)),
                   {"check/clock_ahead": {"offset": "3.0 s"}, "check/clock_behind": {"offset": "3.0 s"}}),
}


def check(cluster: Cluster, fault: Fault, mpi: Mpi, *options: str, ranks: int = 2) -> Outcome:
    """Check the cluster's nodes, one of which has a fault, and return what was said."""
    with contextlib.ExitStack() as undo, tempfile.TemporaryDirectory(dir=RUN) as folder:
        variables = fault.begin(cluster, undo)
        file = Path(folder, "check.json")
        began = time.monotonic()
        done = srun(cluster, mpi, f"-N3 --ntasks-per-node={ranks}", *options, "--json", file, timeout=LIMIT_S,
                    env={**TCP, **variables}, module="mpiddp.check")
        seconds = time.monotonic() - began
        assert done.returncode in (0, 1) and file.exists(), done.stdout + done.stderr
        findings = json.loads(file.read_text())["findings"]
    assert done.returncode == bool(findings), done.stdout + done.stderr
    words = [one["text"] for one in findings]
    mine = [one["text"] for one in findings if one["hosts"] in ([BAD], []) and set(one["nodes"]) == {1}]
    named = (any(find(name, one, **known) for name, known in fault.named.items() for one in mine) if fault.named
             else not words)
    return Outcome(named, [one for one in words if one not in mine or not fault.named], seconds, done.stdout)


def start_s(cluster: Cluster, mpi: Mpi, ranks: int = 2) -> float:
    """Return the seconds of a job that says hello, and nothing else."""
    began = time.monotonic()
    done = srun(cluster, mpi, f"-N3 --ntasks-per-node={ranks}", EXAMPLES / "hello_world.py", timeout=LIMIT_S, env=TCP)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - began


def main() -> None:
    """Print a table of what was named."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.checking", description=__doc__)
    parser.add_argument("runs", type=int, nargs="?", default=10)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mpi", choices=list(MPIS), default="openmpi4")
    given = parser.parse_args()
    options = ["--quick"] if given.quick else []
    print("| fault | named | accused others | median s | longest |\n| --- | --- | --- | --- | --- |")
    with Cluster(visible=[ROOT]) as cluster:
        seconds = [start_s(cluster, MPIS[given.mpi]) for _ in range(given.runs)]
        print(f"| a start alone | | | {statistics.median(seconds):.1f} | {max(seconds):.1f} |", flush=True)
        for name in given.faults:
            found = [check(cluster, FAULTS[name], MPIS[given.mpi], *options) for _ in range(given.runs)]
            seconds = [one.seconds for one in found]
            accused = sum(bool(one.others) for one in found)
            print(f"| {name} | {sum(one.named for one in found)} of {len(found)} | {accused} | "
                  f"{statistics.median(seconds):.1f} | {max(seconds):.1f} |", flush=True)
            for one in found:
                if one.others or not one.named:
                    print(f"\n{one.said}\n{one.others}\n", flush=True)


if __name__ == "__main__":
    main()
