"""What a script puts in the place of Python's own functions stays there, and is called as by Python."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from mpiddp.bootstrap.prepare import restore_env, set_env
from tests import processes
from tests.support import (
    DEADLINE_S,
    MPICH_FIRST,
    PROGRAMS,
    ROOT,
    Mpi,
    check,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

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


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_job_that_has_left_leaves_no_hook_behind(mpi: Mpi) -> None:
    need(mpi.missing())
    environ = {**single_node_environ(mpi), "PYTHONPATH": str(ROOT)}
    command = mpiexec_command(mpi, 2, PROGRAMS / "unhooked.py")
    done = check(processes.run(*command, timeout=DEADLINE_S, env=environ, cwd=ROOT))
    replaced, *left = sorted(done.stdout.splitlines(), reverse=True)
    assert left == ["left", "left"]
    assert {"sys.exit", "multiprocessing.util.spawnv_passfds"} <= {*replaced.split()}


def test_the_register_names_what_exists() -> None:
    """Each `file.py` in mpiddp/hooks.md is followed by names of functions in that file."""
    named = re.findall(r"`([a-z_/0-9]+\.py)`((?: `\w+`,?)+)", (ROOT / "mpiddp/hooks.md").read_text())
    assert len(named) > 35
    for file, names in named:
        functions = {node.name for node in ast.walk(ast.parse((ROOT / "mpiddp" / file).read_text()))
                     if isinstance(node, ast.FunctionDef)}
        assert {*re.findall(r"\w+", names)} <= functions, file


def test_variables_that_somebody_else_has_changed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_FIRST", "before")
    former = set_env({"TESTS_FIRST": "ours", "TESTS_SECOND": "ours", "TESTS_THIRD": "ours"})
    monkeypatch.setenv("TESTS_SECOND", "the script's")
    restore_env(former)
    assert {name: os.environ.get(name) for name in former} == {
        "TESTS_FIRST": "before", "TESTS_SECOND": "the script's", "TESTS_THIRD": None}
