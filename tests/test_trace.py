"""The timeline of a job's ranks, as tools for Chrome's trace format read it."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.messages import find
from tests.support import EXAMPLES, MPIS, Mpi, check, mpiexec, srun

pytestmark = pytest.mark.light

HELLO = EXAMPLES / "hello_world.py"
STAGES = [
    "interpreter", "import mpiddp", "agent", "import mpi4py", "check launcher", "MPI_Init", "facts",
    "wait: collecting host facts", "plan: collecting host facts", "variables and cores", "import torch", "devices",
    "wait: importing torch", "plan: importing torch", "store", "wait: connecting to the store",
    "plan: connecting to the store", "connecting agents", "process group", "wait: process group",
    "plan: process group", "first collective", "ready", "script", "exit",
]


def check_trace(file: Path, hosts: list[str]) -> None:
    """Fail unless a trace has all stages of all ranks, one after the other, on one clock."""
    trace = json.loads(file.read_text())
    assert trace["displayTimeUnit"] == "ms"
    names = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["ph"] == "M"}
    assert names == {rank: f"rank {rank} on {host}" for rank, host in enumerate(hosts)}
    ranks: dict[int, list[dict[str, Any]]] = {rank: [] for rank in names}
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            ranks[one["pid"]].append(one)
    for rank, events in ranks.items():
        assert [one["name"] for one in events] == [one for one in STAGES if rank == 0 or not one.startswith("plan: ")]
        for before, after in itertools.pairwise(events):
            assert abs(before["ts"] + before["dur"] - after["ts"]) < 0.01
            assert before["dur"] >= 0
    assert min(events[0]["ts"] for events in ranks.values()) == 0
    assert max(map(abs, trace["otherData"]["clock_offsets_us"])) < 20_000  # one machine, as busy as it may be


def test_a_trace(quick: Mpi, tmp_path: Path) -> None:
    done = check(mpiexec(quick, 2, "--trace", tmp_path / "trace.json", HELLO))
    check_trace(tmp_path / "trace.json", [os.uname().nodename] * 2)
    (slowest,) = find("launch/slowest_stage", done.stderr)
    assert slowest["stage"] in STAGES
    assert re.fullmatch(r"rank [01] on \S+", slowest["rank"])
    assert float(slowest["seconds"]) >= float(slowest["median"]) > 0
    assert int(slowest["most"]) >= int(slowest["own"])


@pytest.mark.thorough("the same on one node")
def test_a_trace_of_three_nodes(cluster: Cluster) -> None:
    file = RUN / "trace.json"
    check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", "--trace", file, HELLO))
    check_trace(file, [f"node{rank // 2 + 1}" for rank in range(6)])
