"""Who is blamed for what scripts catch, hide, raise and exit by, on real launchers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.messages import find, message
from tests.support import MPIS, Mpi, check, mpiexec

HEAD = "import os, signal, sys, time\nimport torch, torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
CATCHES = """
def main():
    for step in range(10**6):
        if rank == 1 and step == 3:
            {fault}
        dist.all_reduce(torch.ones(1))
try:
    main()
except Exception as error:
    print("caught", type(error).__name__, flush=True)
    {end}
"""
KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('seven')"
ENDS = ["sys.exit(1)", pytest.param("os._exit(1)", marks=pytest.mark.thorough),
        pytest.param("raise RuntimeError('training failed') from None", marks=pytest.mark.thorough)]
METRICS = """
import socket
if rank == 1:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        socket.create_connection(free.getsockname(), timeout=5)
time.sleep(600)
"""
WRONG_RANK = """
from mpi4py import MPI
import numpy
if rank == 1:
    MPI.COMM_WORLD.Send(numpy.zeros(3), dest=77)
time.sleep(600)
"""
INTERRUPTED = """
import _thread, threading
if rank == 0:
    {how}
while True:
    time.sleep(0.1)  # which interrupt_main() does not cut short
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return where to write a script."""
    return tmp_path / "script.py"


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["mpich", pytest.param("openmpi4", marks=pytest.mark.light),
                                  pytest.param("openmpi5", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_was_killed_is_blamed_also_where_another_catches_its_loss(
    name: str, end: str, script: Path
) -> None:
    """MPICH's launcher kills the other one at once; with Open MPI it lives on, and exits."""
    script.write_text(HEAD + CATCHES.format(fault=KILL, end=end))
    done = mpiexec(MPIS[name], 2, script)
    assert done.returncode != 0
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause=message("launch/killed_by_sigkill"))) == 1, done
    assert done.stderr.count("mpiddp: failed: ") == 1


@pytest.mark.light
def test_an_exit_is_reported_with_what_was_caught(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + CATCHES.format(fault=RAISE, end="sys.exit(5)"))
    done = check(mpiexec(quick, 2, script), 5)
    (report,) = find("launch/failure_report", done.stderr, rank=1)
    then = message("launch/then_error", error="sys.exit(5)")
    assert report["cause"] == f"ValueError: seven ({then}, script.py:8 main)"
    assert report["where"] == f"{script}:8 main"


@pytest.mark.light
def test_a_server_of_the_scripts_own_is_no_peer(quick: Mpi, script: Path, tmp_path: Path) -> None:
    script.write_text(HEAD + METRICS)
    done = check(mpiexec(quick, 2, "--error-file", tmp_path / "error.json", script), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    assert report["cause"].startswith("ConnectionRefusedError: ")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["kind"] == "own"


@pytest.mark.light
@pytest.mark.parametrize("how", [
    "raise KeyboardInterrupt",
    *(pytest.param(how, marks=pytest.mark.thorough) for how in (
        "threading.Timer(0.2, _thread.interrupt_main).start()", "os.kill(os.getpid(), signal.SIGINT)"))])
def test_an_interrupt_that_no_agent_got(how: str, quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + INTERRUPTED.format(how=how))
    done = mpiexec(quick, 1, script)
    assert len(find("launch/failed_rank", done.stderr, rank=0, cause="KeyboardInterrupt")) == 1, done.stderr
    assert "KeyboardInterrupt\nmpiddp: failed: " in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert find("launch/outside_signal", done.stderr) == []




@pytest.mark.light
@pytest.mark.mpi
@pytest.mark.parametrize(("name", "cause"), [
    ("mpich", r"Exception: Invalid rank: .*Invalid rank has value 77"),
    pytest.param("openmpi4", r"Exception: MPI_ERR_RANK: invalid rank", marks=pytest.mark.thorough),
    pytest.param("impi", r"Exception: Invalid rank: .*Invalid rank has value 77", marks=pytest.mark.thorough)])
def test_an_error_of_mpis_in_a_script_that_a_runner_runs(name: str, cause: str, script: Path) -> None:
    script.write_text(HEAD + WRONG_RANK)
    done = mpiexec(MPIS[name], 2, "-m", "mpi4py", script)
    (report,) = find("launch/failure_report", done.stderr, rank=1)
    assert re.match(cause, report["cause"])
    assert report["where"].startswith(f"{script}:")
