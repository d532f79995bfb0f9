"""A relay that is killed: its rank goes on, and says so once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import MPICH_FIRST, PROGRAMS, Mpi, mpiexec

PROGRAM = PROGRAMS / "loses_relay.py"
GONE = re.compile(r"^mpiddp: the output relay of rank 1 on \S+ exited unexpectedly: .*$", re.M)
LINES = 50


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
    assert len(GONE.findall(done.stderr)) == 1, done.stderr
    assert "BrokenPipeError" not in done.stderr
    for line in ("unread", "program", "own", f"thread {LINES - 1} ", f"worker {LINES - 1} "):
        assert line in done.stdout, (line, done.stderr)
    assert re.search("^error$", done.stderr, re.M)
    if how == "raises":
        log, = logs.glob("*/rank-00001.*.log")
        assert f"its log ends here: {log}" in done.stderr
        assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
        assert "ValueError: seven" in done.stderr
        assert done.returncode == 1
    else:
        assert done.returncode == 120  # some may be lost
