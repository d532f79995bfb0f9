"""What reaches an agent, or ends its launcher, reaches its rank too."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.faults.matrix import LAUNCHERS
from tests.faults.test_signals import Job, message_in, started
from tests.support import ROOT, Mpi, need, single_node_environ

pytestmark = pytest.mark.light

WAITS = "import time\nprint('READY\\n', end='', flush=True)\ntime.sleep(600)\n"


@pytest.mark.mpi
def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Open MPI's mpirun ends like that at a second Ctrl-C, too. Its agents get no signal."""
    file = tmp_path / "error.json"
    (script := tmp_path / "waits.py").write_text(WAITS)
    with started(LAUNCHERS[0], None, "--error-file", file, script) as job:
        job.await_ready(LAUNCHERS[0].ranks)
        job.process.kill()
        job.process.wait()
    assert message_in(file).endswith(": its launcher has ended")


def test_a_signal_to_a_command_at_a_terminal_ends_its_rank(quick: Mpi, tmp_path: Path) -> None:
    """Where the rank may read, because it is in the terminal's process group with its agent."""
    need(quick.missing())
    (script := tmp_path / "waits.py").write_text(WAITS)
    ours, its = os.openpty()
    with processes.start([str(quick.python), "-m", "mpiddp", str(script)], single_node_environ(quick), ROOT,
                         stdin=its, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            (job := Job(process)).await_ready(1)
            rank, = psutil.Process(process.pid).children()
            assert os.getpgid(rank.pid) == os.getpgid(process.pid)
            process.send_signal(signal.SIGTERM)
            text = job.output()
        finally:
            processes.end_tree(process.pid)
            os.close(ours)
            os.close(its)
    assert process.returncode in (143, -signal.SIGTERM), text
