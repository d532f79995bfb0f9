"""What a script puts in the place of Python's own functions stays there, and is called as by Python."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpiddp.bootstrap import variables
from tests.support import MPICH_FIRST, Mpi, check, mpiexec

# Rank 0 waits in its atexit function for rank 1, as long as --abort-grace lets it.
HOOK = """
import atexit, os, sys, time
from datetime import timedelta
rank, folder = os.environ["RANK"], sys.argv[1]
former = sys.excepthook
def note(what):
    os.write(1, f"{rank} {what}\\n".encode())
    open(f"{folder}/{what}.{rank}", "w").close()
def hook(*arguments):
    note("hook")
    if rank == "0" or "chain" in sys.argv:
        former(*arguments)
    else:
        print("the hook of rank 1", file=sys.stderr)
def last():
    note("atexit")
    deadline = time.monotonic() + 50
    while not os.path.exists(f"{folder}/atexit.{1 - int(rank)}") and time.monotonic() < deadline:
        time.sleep(0.05)
sys.excepthook = hook
atexit.register(last)
import torch.distributed as dist
if "replace" in sys.argv:
    dist.init_process_group(timeout=timedelta(seconds=77))
raise ValueError("seven")
"""


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_each_rank_that_raises_calls_its_hook_first(mpi: Mpi, tmp_path: Path) -> None:
    """Those of trackers note by it that a run has failed; a group that replaces ours leaves it where it is."""
    script = tmp_path / "script.py"
    script.write_text(HOOK)
    done = check(mpiexec(mpi, 2, "--abort-grace", "60", script, tmp_path, "replace", "chain"), 1)
    for rank in "01":
        assert [line for line in done.stdout.splitlines() if line[0] == rank] == [f"{rank} hook", f"{rank} atexit"]
    assert done.stderr.count("ValueError: seven\n") == 2  # in the traceback and in the report of one rank
    assert done.stderr.count("mpiddp: failed: ") == 1


@pytest.mark.thorough("test_each_rank_that_raises_calls_its_hook_first")
def test_what_a_hook_prints_besides_a_traceback_is_shown(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HOOK.replace("raise V", "if rank == '1': time.sleep(1)\nraise V"))
    done = check(mpiexec(quick, 2, "--abort-grace", "60", script, tmp_path), 1)
    assert done.stderr.count("the hook of rank 1") == 1


def test_variables_that_somebody_else_has_changed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_FIRST", "before")
    former = variables.set_all({"TESTS_FIRST": "ours", "TESTS_SECOND": "ours", "TESTS_THIRD": "ours"})
    monkeypatch.setenv("TESTS_SECOND", "the script's")
    variables.restore(former)
    assert {name: os.environ.get(name) for name in former} == {
        "TESTS_FIRST": "before", "TESTS_SECOND": "the script's", "TESTS_THIRD": None}
