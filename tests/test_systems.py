"""The book of launchers and schedulers: a row is enough for a new one, and no other module has a launcher's name."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.base.errors import LaunchError
from mpiddp.discovery.launchers import is_first_on_node, read_launch_facts
from mpiddp.discovery.mpi import Library
from mpiddp.discovery.schedulers import find_end, find_intended_size, find_job, name_logs
from mpiddp.planning.compatibility import (
    check_compatibility,
    check_nested,
    check_outer_tasks,
    check_world_size,
    warn_unlaunched,
)
from mpiddp.planning.environment import explain_env
from mpiddp.supervise.__main__ import describe_surrounding_launcher, make_plan, parse_arguments
from mpiddp.supervise.allocation import Allocation, find_allocation, find_silent_nodes, kill_step
from mpiddp.supervise.command import CommandError, make_command, parse_command
from mpiddp.systems import launchers, schedulers
from mpiddp.systems.launchers import JobStep, Launcher
from mpiddp.systems.mpi_libraries import PMIX
from mpiddp.systems.schedulers import Scheduler, read_count
from tests import systems_tables
from tests.messages import message
from tests.support import ROOT

MPICH = Library("MPICH", (5, 0, 2), "/lib/libmpi.so.12", frozenset({"pmi"}))
OPEN_MPI = Library("Open MPI", (5, 0, 11), "/lib/libmpi.so.40", frozenset({"pmix"}))


def launch_options(step: JobStep) -> Iterator[str]:
    yield from (f"--on={','.join(step.nodes)}", f"--count={step.tasks}")


GRID = Scheduler(
    "Gridlock", ("GRIDLOCK_JOB",), size=read_count("GRIDLOCK_TASKS"), unit="tasks",
    node_list="GRIDLOCK_LIST", ask_end=("gridtime", "{job}"), submit="gridsub", begin="gridsub",
    ask_nodes=("gridnodes", "{job}"), ask_state=("gridstate", "{job}"), running="ON",
    ask_steps=("gridsteps", "{job}"), cancel=("gridkill", "{step}"), tasks_option="--tasks",
    tasks_per_node=("GRIDLOCK_EACH",), cores="--cores")
LAUNCH = Launcher(
    "gridrun", ("GRIDRUN_RANK",), ("GRIDRUN_SIZE",), ("GRIDRUN_LOCAL",), own=frozenset({PMIX}),
    options={PMIX: "--wire=pmix"}, interface="--wire={}", is_task=launchers.always, command="gridrun",
    program="gridrun", counts=("--count",), per_node=("--each",),
    chooses=("--on",), values={"--wire": 1, "--count": 1}, step_options=launch_options, system=GRID)
JOB = {"GRIDLOCK_JOB": "77", "GRIDLOCK_TASKS": "4", "GRIDLOCK_NODES": "2", "GRIDLOCK_LIST": "g[1-2]"}
RANK = {**JOB, "GRIDRUN_RANK": "2", "GRIDRUN_SIZE": "4", "GRIDRUN_LOCAL": "0"}


@pytest.fixture(autouse=True)
def _made_up_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "LAUNCHERS", (*launchers.LAUNCHERS, LAUNCH))
    monkeypatch.setattr(schedulers, "SCHEDULERS", (*schedulers.SCHEDULERS, GRID))


def test_a_row_is_enough_for_detection() -> None:
    found = read_launch_facts(RANK)
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.offers) == (LAUNCH, 2, 4, frozenset())
    assert is_first_on_node(RANK)
    assert not is_first_on_node({**RANK, "GRIDRUN_LOCAL": "1"})
    assert find_job(JOB) == ("77", "")
    assert name_logs(JOB) == "77"
    assert find_intended_size(JOB) == (GRID, 4)
    line = explain_env({"RANK": "2", "GRIDRUN_RANK": "3"}, {"RANK": None})
    assert line.endswith("overrides GRIDRUN_RANK=3")


def test_a_row_is_enough_for_refusals() -> None:
    with pytest.raises(LaunchError, match="no-pmix") as caught:
        check_compatibility(read_launch_facts(RANK), OPEN_MPI)
    assert caught.value.actual.startswith("4 processes started by gridrun")
    assert caught.value.do == "use gridrun --wire=pmix"
    with pytest.raises(LaunchError, match="pmi-unsupported") as caught:
        check_compatibility(read_launch_facts({**RANK, "PMIX_NAMESPACE": "x"}), MPICH)
    assert "start with MPICH's mpiexec" in caught.value.do
    check_compatibility(read_launch_facts({**RANK, "PMIX_NAMESPACE": "x"}), OPEN_MPI)
    with pytest.raises(LaunchError, match="split-world") as caught:
        check_world_size(read_launch_facts(RANK), 1, OPEN_MPI)
    assert "start with gridrun --wire=pmix" in caught.value.do
    lines = warn_unlaunched(OPEN_MPI, *find_intended_size(JOB))
    line = message("launch/no_launcher", scheduler="Gridlock", size="4 tasks",
                   start="gridrun --wire=pmix, or Open MPI's mpirun,")
    assert lines == [line]
    assert launchers.is_command("gridrun")
    inside = {**RANK, "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}  # an mpiexec in each task
    with pytest.raises(LaunchError, match="nested-launcher") as caught:
        check_outer_tasks(read_launch_facts(inside))
    assert "runs in each of 4 tasks of gridrun" in caught.value.actual
    assert check_nested(None, None) is None


@pytest.mark.process
def test_a_row_is_enough_for_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = parse_command(["gridrun", "--wire", "pmix", "--count", "4", "python", "-m", "mpiddp", "train.py"], "",
                            {"python"}.__contains__)
    assert (command.launcher, command.tasks) == (LAUNCH, 4)
    assert make_command(command, JobStep(("g1", "g2"), 2, "s", [])) == (
        ["gridrun", "--on=g1,g2", "--count=4", "--wire", "pmix", "python", "-m", "mpiddp", "train.py"])
    with pytest.raises(CommandError, match=r"remove --on=g1: mpiddp\.supervise chooses the nodes for gridrun"):
        parse_command(["gridrun", "--on=g1", "python", "x.py"], "", {"python"}.__contains__)
    options = parse_arguments(["--dir", str(tmp_path), "gridrun", "python", "x.py"])
    with pytest.raises(CommandError, match="gridrun needs a Gridlock allocation; use gridsub"):
        make_plan(options, command, Allocation(("g1", "g2"), 0))
    with pytest.raises(CommandError, match="give -n N to gridrun, or --tasks to gridsub"):
        make_plan(options, command._replace(tasks=None), Allocation(("g1", "g2"), 0, GRID))
    assert describe_surrounding_launcher(RANK).startswith("this process is already a rank of gridrun")

    commands = {"gridnodes": "echo g2", "gridsteps": "echo 77.3 s; echo 77.4 other", "gridstate": "echo ON",
                "gridtime": "echo 2000000000", "gridkill": f'echo "$1" >> {tmp_path}/killed'}
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    given = find_allocation(JOB, "")
    assert given == Allocation(("g1", "g2"), 0, GRID, "77")
    assert find_silent_nodes(given, given.nodes) == ("g1",)
    assert find_end(JOB, asks=True) == 2e9
    kill_step(given, "s")
    killed, deadline = tmp_path / "killed", time.monotonic() + 60
    while not (killed.exists() and killed.read_text()) and time.monotonic() < deadline:  # a thread runs the command
        time.sleep(0.02)
    assert killed.read_text() == "77.3\n"


def test_rows_are_complete() -> None:
    for scheduler in schedulers.SCHEDULERS:
        assert not scheduler.tasks_option or scheduler.tasks_per_node, scheduler.name  # or nobody reads the number
        assert not scheduler.ask_steps or scheduler.cancel, scheduler.name
    for row in launchers.LAUNCHERS:
        assert not (row.asked or row.ask_interfaces) or row.interface, row.name
        assert not row.interface or row is launchers.PSSLURM or set(row.options.values()) <= {
            row.interface.format(option.partition("=")[2]) for option in row.options.values()}, row.name
        assert not row.step_options or (row.counts and row.program), row.name


def test_a_row_is_enough_for_the_documents_tables() -> None:
    assert "| gridrun | `GRIDRUN_RANK`, `GRIDRUN_SIZE` | - | pmix: `--wire=pmix` | no: from its documents |" in (
        systems_tables.format_table("launchers").splitlines())
    assert "| Gridlock | `GRIDLOCK_JOB` | tasks | `gridtime {job}` | no: from its documents |" in (
        systems_tables.format_table("schedulers").splitlines())
    assert "`GRIDRUN_RANK`" in systems_tables.format_table("variables")


def test_the_documents_tables_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the made-up rows
    text = systems_tables.DOCUMENT.read_text()
    assert systems_tables.fill(text) == text


def list_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string in a module that is no docstring."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                  if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_other_module_has_a_launchers_name() -> None:
    programs = {row.command.split()[0] for row in launchers.LAUNCHERS if row.command and row is not LAUNCH}
    assert {"srun", "mpirun", "mpiexec", "flux", "jsrun"} <= programs
    name = re.compile(rf"(?<![\w./-])({'|'.join(programs)})(?![\w-])")
    files = [path for path in (ROOT / "mpiddp").rglob("*.py") if path.parent.name != "systems"]
    assert [f"{path.relative_to(ROOT)}:{line}: {text.strip()[:60]}" for path in sorted(files)
            for line, text in list_texts(path) if name.search(text)] == []
