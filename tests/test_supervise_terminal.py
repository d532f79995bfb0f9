"""A supervised job on a terminal, and in a requeued Slurm job."""

from __future__ import annotations

import json
import os
import pty
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from mpiddp.supervise.supervisor import AttemptCounter
from tests import processes
from tests.messages import message
from tests.support import DEADLINE_S, MPICH_FIRST, ROOT, Mpi, mpiexec_command, need, single_node_environ

pytestmark = pytest.mark.light

WAITS = """\
import os, sys, time
import torch.distributed as dist
print("READY", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
dist.barrier()
print("through", flush=True)
"""
FAILS = "import os, mpiddp\nprint('count', mpiddp.restart_count, flush=True)\nos.abort()\n"


class Terminal:
    """A pseudo-terminal with the command that it controls, and the command's output."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.pid, self._ours = pty.fork()
        if self.pid == 0:
            processes.default_signals()
            os.chdir(ROOT)
            os.execve(command[0], command, env)
        self._said = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._ours, 65536):
                self._said += chunk
        except OSError:  # Linux: the other side is closed
            pass

    def said(self) -> str:
        """Return what the command has written so far."""
        return self._said.decode(errors="replace")

    def press(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._ours, key)

    def await_text(self, text: str, times: int = 1) -> None:
        """Wait until the command has written a text `times` times."""
        deadline = time.monotonic() + DEADLINE_S
        while self.said().count(text) < times:
            assert time.monotonic() < deadline, self._said
            time.sleep(0.05)

    def await_end(self) -> int:
        """Wait until the command has ended; return the wait status."""
        deadline = time.monotonic() + DEADLINE_S
        while (found := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < deadline, self._said
            time.sleep(0.05)
        return found[1]

    def close(self) -> None:
        """End what is left."""
        processes.end_tree(self.pid)
        self._reader.join(10)
        os.close(self._ours)


def supervise(mpi: Mpi, folder: Path, *job: object) -> Terminal:
    """Start a supervised job of two ranks on a terminal."""
    need(mpi.missing())
    command = [sys.executable, "-m", "mpiddp.supervise", "--dir", str(folder),
               *mpiexec_command(mpi, 2, "-m", "mpiddp", "--quiet", *job)]
    return Terminal(command, single_node_environ(mpi))


@pytest.mark.parametrize("mpi", [one for one in MPICH_FIRST if one.id in ("mpich", "impi")])
def test_ctrl_backslash_asks_and_ends_nothing(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    terminal = supervise(mpi, tmp_path, tmp_path / "waits.py", tmp_path / "go")
    try:
        terminal.await_text("READY", 2)
        time.sleep(1.5)  # the ranks answer from about a second after the start on
        terminal.press(b"\x1c")
        terminal.await_text(message("launch/sigquit"))
        terminal.await_text("waits.py:")
        (tmp_path / "go").touch()
        assert terminal.await_end() == 0
        terminal.await_text("through", 2)
    finally:
        terminal.close()


@pytest.mark.long
def test_attempts_are_counted_on_when_the_job_is_queued_again(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    counts: list[int] = []
    for restarts in ("", "1"):
        terminal = Terminal(
            [sys.executable, "-m", "mpiddp.supervise", "--dir", str(tmp_path), "--max-restarts=1", "--history",
             str(tmp_path / "history"), "--progress-file", str(tmp_path), str(quick.python), "-m", "mpiddp", "--quiet",
             "--log-dir", str(tmp_path / "logs"), str(tmp_path / "fails.py")],
            {**single_node_environ(quick), "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": restarts, "PATH": "/nowhere"})
        try:
            terminal.await_end()
        finally:
            terminal.close()
        counts += map(int, re.findall(r"count (\d+)", terminal.said()))
    assert counts == [0, 1, 2, 3]
    assert [one["number"] for one in json.loads((tmp_path / "history").read_text())["attempts"]] == [2, 3]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"77-attempt-{count}" for count in counts]


def test_each_supervisor_of_a_job_has_its_own_count(tmp_path: Path) -> None:
    first, again = {"SLURM_JOB_ID": "77"}, {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    one, two = AttemptCounter(str(tmp_path), first), AttemptCounter(str(tmp_path), first)
    assert [one.take(), two.take(), one.take(), one.take()] == [0, 0, 1, 2]
    assert [AttemptCounter(str(tmp_path), again).take(), AttemptCounter(str(tmp_path), again).take()] == [3, 1]
    two.forget()
    assert AttemptCounter(str(tmp_path / "no_folder"), {"SLURM_RESTART_COUNT": "2"}).take() == 2
