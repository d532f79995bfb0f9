"""Write the timeline of all ranks in Chrome's trace format, for --trace."""

from __future__ import annotations

import array
import itertools
import os
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ..base.clock import measure_clock_offset_ns
from ..base.files import read_text, write_json
from ..base.polling import sleep_until
from ..base.stderr import write_line
from ..base.timeline import WAIT_PREFIX, begun_stages

if TYPE_CHECKING:
    from mpi4py import MPI

Stages = list[tuple[str, int]]  # the name and begin (ns) of each stage, which ends when the next one begins
# Stages that mpiddp does not count as its own: Python, MPI, torch, the script and what follows, and waiting.
FOREIGN_STAGES = ("interpreter", "import mpi4py", "MPI_Init", "import torch", "process group", "first collective",
                  "script", "exit", WAIT_PREFIX)


def write_trace(path: str, comm: MPI.Comm, host: str) -> None:
    """Write the stages of all ranks to a file on rank 0, and print the slowest stage. Collective."""
    now = time.monotonic_ns()
    stages = [("interpreter", now - read_process_age_ns(os.getppid())), *begun_stages, ("", now)]  # the agent's
    epoch = time.time_ns() - now
    offset = share_clock_offsets_ns(comm)
    ranks = comm.gather((host, offset, [(name, time_ns + epoch - offset) for name, time_ns in stages]), root=0)
    if ranks is not None:
        write_json(path, make_chrome_trace(ranks))
        write_line(f"mpiddp: trace: {describe_slowest(ranks)}")


def read_process_age_ns(pid: int) -> int:
    """Return how long ago a process began, to the kernel's clock tick of 10 ms (man 5 proc, starttime)."""
    ticks = int(read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**7


def share_clock_offsets_ns(comm: MPI.Comm) -> int:
    """Return how far this rank's clock is ahead of rank 0's, in nanoseconds. Collective.

    Ranks sleep until their turn, so that they take no core from the two ranks that are measured.
    """
    offset = array.array("q", [0])
    if comm.rank == 0:
        for rank in range(1, comm.size):
            offset[0] = measure_clock_offset_ns(partial(comm.Send, dest=rank), partial(comm.Recv, source=rank), True)
            comm.Send(offset, dest=rank)
        offset[0] = 0
    else:
        sleep_until(lambda: comm.Iprobe(source=0))
        measure_clock_offset_ns(partial(comm.Send, dest=0), partial(comm.Recv, source=0), False)
        comm.Recv(offset, source=0)
    sleep_until(comm.Ibarrier().Test)
    return offset[0]


def make_chrome_trace(ranks: list[tuple[str, int, Stages]]) -> dict[str, Any]:
    """Return the timeline in Chrome's trace format: a process for each rank, times in microseconds.

    `ranks` holds each rank's host, the offset of its clock in nanoseconds, and its stages.
    """
    start = min(begin_ns for _, _, stages in ranks for _, begin_ns in stages)
    events: list[dict[str, Any]] = []
    for rank, (host, _, stages) in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {host}"}})
        events += [
            {"ph": "X", "name": name, "cat": "start", "pid": rank, "tid": 0, "ts": (begin_ns - start) / 1000,
             "dur": (end_ns - begin_ns) / 1000}
            for (name, begin_ns), (_, end_ns) in itertools.pairwise(stages)]
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"clock_offsets_us": [offset / 1000 for _, offset, _ in ranks]}}


def describe_slowest(ranks: list[tuple[str, int, Stages]]) -> str:
    """Describe the slowest stage of the start, its rank, and the time of mpiddp itself.

    The script, the exit and waiting for other ranks do not count as the start.
    """
    took: dict[str, list[tuple[int, int]]] = {}
    own_ns = [0] * len(ranks)
    for rank, (_, _, stages) in enumerate(ranks):
        for (name, begin_ns), (_, end_ns) in itertools.pairwise(stages):
            if not name.startswith(("script", "exit", WAIT_PREFIX)):
                took.setdefault(name, []).append((end_ns - begin_ns, rank))
            if not name.startswith(FOREIGN_STAGES):
                own_ns[rank] += end_ns - begin_ns
    stage = max(took, key=lambda name: max(took[name]))
    longest, rank = max(took[stage])
    median = statistics.median(took_ns for took_ns, _ in took[stage])
    return (f"slowest stage of the start: {stage} on rank {rank} on {ranks[rank][0]}, {longest / 1e9:.2f} s "
            f"(median of all ranks {median / 1e9:.2f} s); "
            f"mpiddp itself took {statistics.median(own_ns) / 1e6:.0f} ms (median; maximum {max(own_ns) / 1e6:.0f} ms)")
