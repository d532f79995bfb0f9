"""An agent that is killed: the job ends, it is said why, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.messages import find, message
from tests.support import MPIS, check, mpiexec, need

pytestmark = pytest.mark.light

KILLS_AGENT = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
if os.environ["RANK"] == sys.argv[1]:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_an_agent_that_is_killed(who: int, tmp_path: Path) -> None:
    """By Open MPI's mpirun: MPICH's kills all others before anybody can say so.

    If it is the coordinator, what its rank has started lives on: no other agent knows that.
    """
    need((mpi := MPIS["openmpi4"]).missing())
    (script := tmp_path / "script.py").write_text(KILLS_AGENT)
    env = processes.marked({})
    done = check(mpiexec(mpi, 3, "--no-init", script, who, env=env), 137)  # which waits until all agents are connected
    assert len(find("launch/failed_rank", done.stderr, rank=who, cause=message("launch/agent_killed"))) == 1
    assert done.stderr.count("mpiddp: failed: ") == 1
    left = [command for command in processes.leftovers(env) if who or "sleep" not in str(command)]
    assert left == []
