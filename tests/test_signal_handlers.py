"""Signals are their owners': handlers of preloaded tools stay."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.messages import find, message
from tests.support import MPICH_FIRST, Mpi, first_of, mpiexec, need, on_path

pytestmark = pytest.mark.light

# A tool that is there before us; its handler, in C, leaves with the signal's number.
PRELOADED = """
import ctypes
library = ctypes.CDLL(None)
for number in {numbers}:
    library.signal(number, ctypes.cast(library._exit, ctypes.c_void_p))
"""


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize("number", first_of([signal.SIGSEGV, signal.SIGUSR2]), ids=lambda number: number.name)
def test_a_handler_of_a_preloaded_tool_stays(mpi: Mpi, number: int, tmp_path: Path) -> None:
    need(mpi.missing())
    (tmp_path / "sitecustomize.py").write_text(PRELOADED.format(numbers=[int(number)]))
    script = tmp_path / "script.py"
    script.write_text(f"import os\nprint('sent', flush=True)\nos.kill(os.getpid(), {int(number)})\nprint('back')\n")
    done = mpiexec(mpi, 1, script, env=on_path(tmp_path))
    assert done.stdout == "sent\n"
    assert done.returncode == number


def test_under_stop_before_too(quick: Mpi, tmp_path: Path) -> None:
    need(quick.missing())
    (tmp_path / "sitecustomize.py").write_text(PRELOADED.format(numbers=[int(signal.SIGUSR1)]))
    script = tmp_path / "script.py"
    script.write_text(f"import os\nos.kill(os.getpid(), {int(signal.SIGUSR1)})\nprint('back')\n")
    done = mpiexec(quick, 1, "--stop-before=1", script, env=on_path(tmp_path))
    assert done.stdout == ""
    cause = message("launch/native_exit", status=int(signal.SIGUSR1))
    assert len(find("launch/failed_rank", done.stderr, rank=0, cause=cause)) == 1
