"""What a script leaves open and alive at its end is closed and destroyed, as by Python's own end."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mpiddp.base.termination import exit_status
from tests.messages import find
from tests.support import (
    MPICH_FIRST,
    MPIS,
    PROGRAMS,
    Mpi,
    check,
    first_of,
    mpiexec,
)

pytestmark = pytest.mark.light

SCRIPT = PROGRAMS / "open_files.py"
TEXTS = ("text", "csv", "tee", "library", "local")
PACKED = ("gz", "zip")


def contents(folder: Path, rank: int, kinds: tuple[str, ...]) -> dict[str, str]:
    """Return what a rank has written into its files of some kinds."""
    def content(kind: str) -> str:
        file = folder / f"{kind}.{rank}"
        if kind == "gz":
            return gzip.open(file, "rt").read()
        return zipfile.ZipFile(file).read("kept").decode() if kind == "zip" else file.read_text()

    return {kind: content(kind).strip() for kind in kinds}


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("end", "status"), first_of(
    [("return", 0), ("raise", 1), ("handler", 0), ("exit", 0)], number=3))
def test_files_are_closed_and_objects_destroyed(mpi: Mpi, end: str, status: int, tmp_path: Path) -> None:
    """Also in the place of sys.stdout, held by a library, and held by the frames of an error; logs have it, too.

    If both ranks raise, the first one may end the other before that has come so far.
    """
    logs = tmp_path / "logs"
    done = check(mpiexec(mpi, 2, "--log-dir", logs, SCRIPT, tmp_path, end), status)
    ranks = [int(report["rank"]) for report in find("launch/failed_rank", done.stderr)] if status else [0, 1]
    assert ranks
    for rank in ranks:
        assert contents(tmp_path, rank, TEXTS + PACKED) == dict.fromkeys(TEXTS + PACKED, "kept")
        said = [f"{where} of rank {rank} is destroyed" for where in ("global", "local")]
        [log] = logs.glob(f"*/rank-{rank:05}.*")
        for line in ["kept", *said]:
            assert log.read_text().splitlines().count(line) == 1, line
            assert line in done.stdout.splitlines()
    ignored, errors = (done.stderr.count(text) for text in ("Exception ignored in", "ValueError: raised at the end"))
    assert ignored == errors == 2 if not status else ignored >= errors >= len(ranks)
    assert status or list(tmp_path.glob("*.temporary")) == []


@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi4"], *(MPIS[name] for name in ("mpich", "openmpi5", "impi"))]),
                         ids=lambda mpi: mpi.name)
def test_files_of_a_rank_that_is_ended_are_flushed(mpi: Mpi, tmp_path: Path) -> None:
    """It sleeps, and its agent kills it. Under Open MPI the other one ends the job by MPI_Abort, after Python's end."""
    check(mpiexec(mpi, 2, SCRIPT, tmp_path, "raise on rank 0"), 1)
    assert contents(tmp_path, 0, TEXTS + PACKED) == dict.fromkeys(TEXTS + PACKED, "kept")
    flushed = ("text", "csv", "library", "local", "tee")
    assert contents(tmp_path, 1, flushed) == dict.fromkeys(flushed, "kept")


def test_a_forked_child_closes_its_files(quick: Mpi, tmp_path: Path) -> None:
    code = (f"import os; child = os.fork(); file = open({str(tmp_path)!r} + f'/{{child == 0}}', 'w'); "
            "file.write('kept'); child and os.waitpid(child, 0)")
    check(mpiexec(quick, 1, "-c", code))
    assert [(tmp_path / name).read_text() for name in ("True", "False")] == ["kept"] * 2


def test_os_exit_leaves_objects_as_they_are(quick: Mpi, tmp_path: Path) -> None:
    """As by Python."""
    code = ("import os, weakref\nclass Last:\n    def __del__(self):\n        os.write(1, b'destroyed')\n"
            "last = Last()\nos._exit(0)")
    assert check(mpiexec(quick, 2, "-c", code)).stdout == ""


def test_a_file_that_takes_nothing_is_given_up(quick: Mpi, tmp_path: Path) -> None:
    """Then the rank is killed when its grace is over; the status is that of its error."""
    os.mkfifo(fifo := tmp_path / "full")
    held = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(held, bytes(4096)):
            pass
    code = f"file = open({str(fifo)!r}, 'wb'); file.write(b'more'); raise ValueError('own')"
    try:
        done = check(mpiexec(quick, 2, "--abort-grace", "1", "-c", code), 1)
    finally:
        os.close(held)
    assert len(find("launch/cleanup_timeout", done.stderr, limit="1 s")) == 2  # both ranks raise


def test_odd_modules_and_streams_are_no_failure(quick: Mpi, tmp_path: Path) -> None:
    code = (f"import sys, types\nfile = open({str(tmp_path / 'file')!r}, 'w')\nfile.write('kept')\n"
            "sys.modules[5] = types.ModuleType('odd')\ndel sys.stdout, sys.__stdout__")
    check(mpiexec(quick, 1, "-c", code))
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_in_the_place_of_stderr_does_not_close_it(quick: Mpi) -> None:
    """What mpiddp says after the script is printed, and no other file gets that number."""
    done = check(mpiexec(quick, 2, "-c", "import os, sys; sys.stderr = os.fdopen(sys.stderr.fileno(), 'w', 1)"))
    assert "mpiddp: warning: independent-ranks: " in done.stderr


def test_a_destructor_that_hangs_is_cut_off(quick: Mpi) -> None:
    code = ("import time\nclass Hangs:\n    def __del__(self):\n        time.sleep(600)\n"
            "hangs = Hangs()\nraise ValueError('seven')")
    done = check(mpiexec(quick, 1, "--abort-grace", "2", "-c", code), 1)
    assert re.search(r"mpiddp: failed: rank 0 on \S+: ValueError: seven\n", done.stderr)


@pytest.mark.process
@pytest.mark.parametrize("code", [
    "None", "0", "1", "-1", "255", "256", "256 + 3", "2**31", "2**32 + 5", "2**63 - 1", "-2**63", "2**63", "2**70",
    "-2**70", "True", "False", "0.0", "3.0", "''", "'a word'", "[]", "(1, 2)", "object"])
def test_sys_exit_has_the_status_that_python_gives_it(code: str) -> None:
    expression = f"import sys; sys.exit({code})"
    done = subprocess.run([sys.executable, "-S", "-c", expression], capture_output=True, timeout=60)
    with pytest.raises(SystemExit) as raised:
        exec(expression)
    assert exit_status(raised.value.code) == done.returncode


@pytest.mark.parametrize(("line", "words"), [
    ("sys.exit(2**70)", r"sys\.exit\(1180591620717411303424\)"),
    ("os._exit(2**70)", "OverflowError: Python int too large to convert to C int"),
])
def test_a_status_too_large_is_no_success(quick: Mpi, line: str, words: str) -> None:
    done = check(mpiexec(quick, 1, "-c", f"import os, sys\n{line}"), 255 if line.startswith("sys") else 1)
    assert re.search(rf"mpiddp: failed: rank 0 on \S+: {words}", done.stderr)
