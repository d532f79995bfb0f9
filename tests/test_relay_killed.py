"""A relay that is killed: its rank continues, and reports it once."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests import processes
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    MPICH_FIRST,
    MPIS,
    PROGRAMS,
    ROOT,
    Mpi,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

PROGRAM = PROGRAMS / "loses_relay.py"
LINES = 50


@pytest.mark.light
@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("options", "how"), [
    pytest.param(("--prefix",), "ends", id="prefix"),
    pytest.param(("--log-dir", "LOGS"), "raises", id="log"),
    pytest.param(("--show=fold",), "ends", id="fold", marks=pytest.mark.thorough),
])
def test_a_rank_goes_on_without_its_relay(options: tuple[str, ...], how: str, mpi: Mpi, tmp_path: Path) -> None:
    """What the relay has not read is shown; so is what a thread, a worker and a program write from then on."""
    logs = tmp_path / "logs"
    done = mpiexec(mpi, 2, *(str(logs) if one == "LOGS" else one for one in options), PROGRAM, how)
    assert len(find("launch/relay_killed", done.stderr, rank=1, status=120)) == 1, done.stderr
    assert "BrokenPipeError" not in done.stderr
    for line in ("unread", "program", "own", f"thread {LINES - 1} ", f"worker {LINES - 1} "):
        assert line in done.stdout, (line, done.stderr)
    assert re.search("^error$", done.stderr, re.M)
    if how == "raises":
        log, = logs.glob("*/rank-00001.*.log")
        assert message("launch/log_ends", path=log) in done.stderr
        assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
        assert "ValueError: seven" in done.stderr
        assert done.returncode == 1
    else:
        assert done.returncode == 120  # some may be lost


@pytest.mark.light
@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi5"], MPIS["openmpi4"]]), ids=lambda mpi: mpi.name)
def test_the_lines_of_other_ranks_are_shown_before_one_exits_with_120(mpi: Mpi) -> None:
    """Open MPI kills the other ranks then; rank 0 holds lines back, since it waits for a relay that never connects."""
    need(mpi.missing())
    env = processes.marked(single_node_environ(mpi))
    job = processes.start(mpiexec_command(mpi, 2, "-m", "mpiddp", "--show=fold", PROGRAMS / "prints_at_its_end.py"),
                          env, ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline, killed = time.monotonic() + DEADLINE_S, False
        while not killed and job.poll() is None and time.monotonic() < deadline:
            for process, words in processes.with_mark(env[processes.MARK]).items():
                if words and words[0].startswith("mpiddp: output of rank 1 on "):
                    process.kill()
                    killed = True
        stdout, stderr = job.communicate(timeout=DEADLINE_S)
    finally:
        processes.end_tree(job.pid)
    assert killed and job.returncode == 120, stderr
    assert re.findall(r"line (\d+)", stdout) == [str(number) for number in range(100)], stderr
