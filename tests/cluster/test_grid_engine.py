"""A real Grid Engine on three nodes: an mpirun that does not know it, and the batch script."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.cluster.grid_engine import GridEngine, missing_components
from tests.messages import find, message
from tests.processes import PATIENCE
from tests.support import EXAMPLES, MPIS, Mpi, first_of, need
from tests.test_batch import edited

pytestmark = [pytest.mark.light, pytest.mark.thorough("sge.sh, and a warning, with the variables of Grid Engine")]

JOB_TIMEOUT_S = 300.0
STOPS_ONCE = """\
import os, time
import mpiddp
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, {mpiddp.restart_count}\\n", end="", flush=True)
while mpiddp.restart_count == 0 and not mpiddp.should_stop():
    time.sleep(0.1)
if mpiddp.restart_count == 0:
    mpiddp.stop_for_requeue()
"""


@pytest.fixture(scope="module")
def engine(cluster: Cluster) -> GridEngine:
    """Start Grid Engine on the cluster."""
    need(missing_components())
    return GridEngine(cluster)


@pytest.fixture
def folder(engine: GridEngine) -> Path:
    """Return a folder that all nodes see."""
    assert engine
    found = RUN / f"grid-engine-{time.monotonic_ns()}"
    found.mkdir()
    return found


def run(engine: GridEngine, script: Path, mpi: Mpi) -> str:
    """Submit a script, wait until the job is over, and return its output."""
    number = engine.submit(script, mpi.environ())
    deadline = time.monotonic() + PATIENCE * JOB_TIMEOUT_S
    output = script.parent / f"mpiddp.o{number}"
    while engine.has(number):
        if time.monotonic() > deadline:
            engine.run(f"qdel {number}")
            raise TimeoutError(output.read_text() if output.exists() else "it has not begun")
        time.sleep(0.5)
    return output.read_text()


@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi5"], MPIS["mpich"]]), ids=lambda mpi: mpi.name)
def test_a_job_stops_before_its_walltime_and_is_requeued(engine: GridEngine, folder: Path, mpi: Mpi) -> None:
    """The ranks stop 45 seconds after the job's start."""
    (program := folder / "stops.py").write_text(STOPS_ONCE)
    script = edited(folder, "sge.sh", MODULES="", ENVIRONMENT=mpi.python.parent / "activate", STOP="--stop-before 555",
                    MPIRUN="mpirun -x PYTHONPATH" if mpi.pmi == "pmix" else "mpiexec",
                    COMMAND=f"python -m mpiddp {program}")
    script.write_text(script.read_text().replace("h_rt=01:00:00", "h_rt=00:10:00"))
    output = run(engine, script, mpi)
    assert message("launch/walltime_near") in output, output
    said = sorted(line for line in output.splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank} of 4, {restart}" for rank in range(4) for restart in (0, 1)], output


def test_the_line_that_a_warning_names_uses_all_nodes(engine: GridEngine, folder: Path) -> None:
    """The wheel's Open MPI 5 has no support for Grid Engine."""
    mpi = MPIS["openmpi5"]
    command = f"python -m mpiddp {EXAMPLES / 'hello_world.py'}"
    head = f"#!/bin/bash\n#$ -N mpiddp\n#$ -j y\n#$ -cwd\n#$ -pe mpi 6\nexport PATH={mpi.python.parent}:$PATH\n"
    (script := folder / "job.sh").write_text(f"{head}mpirun -x PYTHONPATH {command}\n")
    output = run(engine, script, mpi)
    (found,) = find("launch/idle_nodes", output, scheduler="SGE", nodes=3)
    line, _, before = found["start"].partition(", after ")
    script.write_text(f"{head}{before}\n{line} -x PYTHONPATH {command}\n")
    output = run(engine, script, mpi)
    assert "6 ranks on 3 nodes" in output, output
    assert not find("launch/idle_nodes", output)
