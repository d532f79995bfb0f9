"""A launcher that waits for ever for its daemon on a lost node: rank 0's agent ends it, if it runs beside that."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.agent.process_cleanup import find_waiting_launcher
from mpiddp.systems.launchers import HYDRA, LAUNCHERS, MPIRUN
from tests import processes
from tests.messages import message
from tests.support import ROOT

AGENT = """
import os
from mpiddp.agent import process_cleanup
process_cleanup.WAITING_LAUNCHER_TIMEOUT_S = float(os.environ["TIMEOUT_S"])
process_cleanup.end_launcher(process_cleanup.find_waiting_launcher("Open MPI's mpirun"))
"""


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_a_launcher_that_runs_elsewhere(launcher: object, capfd: pytest.CaptureFixture[str]) -> None:
    """What to do is printed for those that wait for ever."""
    name = launcher.name  # type: ignore[attr-defined]
    assert find_waiting_launcher(name) == 0
    line = message("launch/waiting_launcher", launcher=name)
    assert capfd.readouterr().err == f"{line}\n" * (launcher in (MPIRUN, HYDRA))


@pytest.mark.process
def test_a_launcher_whose_daemons_slurm_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its job, also behind a script; of two nobody knows which one has started the rank."""
    (mpiexec := tmp_path / "mpiexec").symlink_to(shutil.which("bash") or "")
    (script := tmp_path / "mpirun").symlink_to(shutil.which("bash") or "")
    monkeypatch.setenv("SLURM_JOB_ID", f"test-{os.getpid()}")
    env, started = processes.marked(dict(os.environ)), "echo $$; read"

    def start(*command: object) -> subprocess.Popen[str]:
        return processes.start([*map(str, command)], env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with start(script, "-c", f"{mpiexec} -c '{started}'; true") as first:
        assert first.stdout
        pid = int(first.stdout.readline())
        assert find_waiting_launcher(HYDRA.name) == pid
        with start(mpiexec, "-c", started) as second:
            assert second.stdout
            second.stdout.readline()
            assert find_waiting_launcher(HYDRA.name) == 0
            second.communicate("\n", timeout=60)
        first.communicate("\n", timeout=60)
    assert processes.leftovers(env) == []


@pytest.mark.process
@pytest.mark.parametrize("waits", [True, False])
def test_a_launcher_that_does_not_end_by_itself_is_killed(waits: bool, tmp_path: Path) -> None:
    """One that ends in time is left alone, and gets the end of its pipes. It is found behind a user's own script."""
    (mpirun := tmp_path / "mpirun").symlink_to(shutil.which("bash") or "")
    (script := tmp_path / "agent.py").write_text(AGENT)
    last = "exec 1>&-; while :; do sleep 0.1; done" if waits else "exit 7"
    env = processes.marked({**os.environ, "PYTHONPATH": str(ROOT), "TIMEOUT_S": "0.2" if waits else "600"})
    with processes.start([str(mpirun), "-c", f"sh -c '{sys.executable} {script}; true'; echo ended; {last}"], env,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate(timeout=60)
    assert waits or output == "ended\n"
    assert process.returncode == (-signal.SIGKILL if waits else 7)
    assert processes.leftovers(env) == []
