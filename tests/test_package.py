"""The package as a whole: layers, imports, metadata, linters."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

import mpiddp
from tests.support import ROOT, Mpi, alone, check

PACKAGE = ROOT / "mpiddp"
GROUND = {"config", "environment", "errors", "exits", "say", "stages", "version", "waiting"}


def rooms() -> dict[str, set[str]]:
    """Return each room of the table in the package's README, and what it may import besides the ground and itself."""
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\|([^|]*)\|$", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    return {room: set(re.findall(r"`([\w.]+)`", cell)) for room, cell in rows}


MAY_IMPORT = rooms()
FILES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    """Return a module's name below the package, empty for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {name(path) for path in FILES}


def imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere in it, by their names below the package."""
    package = list(path.relative_to(PACKAGE).parts)[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                found.add(whole if whole in MODULES else ".".join(base))
    return found


def outside(path: Path) -> set[str]:
    """Return the modules outside the package that a file imports anywhere in it."""
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}


def test_each_folder_is_a_room() -> None:
    assert {str(path.parent.relative_to(PACKAGE)) for path in FILES} - {"."} == set(MAY_IMPORT)
    assert GROUND <= MODULES


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_it_may(room: str) -> None:
    allowed = MAY_IMPORT[room] | GROUND | {room.replace("/", ".")}
    found = {f"{path.name}: {one}" for path in (PACKAGE / room).glob("*.py") for one in imports(path)
             if not any(one == other or one.startswith(f"{other}.") for other in allowed)}
    assert found == set()


def test_the_ground_imports_nothing_but_itself() -> None:
    for module in GROUND:
        assert imports(PACKAGE / f"{module}.py") <= GROUND, module


def test_no_import_goes_round_in_a_circle() -> None:
    graph = networkx.DiGraph([(name(path), other) for path in FILES for other in imports(path)])
    assert len(graph) > len(MAY_IMPORT)
    assert list(networkx.simple_cycles(graph)) == []


def test_sentinels_know_neither_mpi_nor_torch() -> None:
    found = {one.split(".")[0] for path in (PACKAGE / "sentinel").glob("*.py") for one in outside(path)}
    assert "psutil" in found
    assert not found & {"mpi4py", "torch"}


@pytest.mark.parametrize("room", ["plan", "check/stats"])
def test_the_plan_is_pure(room: str) -> None:
    """No MPI, no torch, no environment: nothing but the facts, Python's own modules and a library that is pure."""
    for path in (PACKAGE / room).glob("*.py"):
        assert outside(path) <= {"__future__", "collections", "collections.abc", "functools", "ipaddress", "itertools",
                                 "math", "random", "re", "statistics", "string", "typing", "ClusterShell.NodeSet"}, path


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_python_code_runs_between_fork_and_exec(path: Path) -> None:
    """Beside a thread that holds a lock at the fork it may wait for ever (subprocess, `preexec_fn`)."""
    assert "preexec_fn=" not in path.read_text()


def test_importing_the_package_imports_neither_torch_nor_mpi(quick: Mpi) -> None:
    done = check(alone(quick, "-X", "importtime", "-c", "import mpiddp"))
    assert "mpiddp" in done.stderr
    assert "torch" not in done.stderr
    assert "mpi4py" not in done.stderr


def test_the_version_is_the_metadatas() -> None:
    assert importlib.metadata.version("mpiddp") == mpiddp.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("command", [["ruff", "check"], ["mypy", "--strict", "mpiddp"]], ids=lambda command: command[0])
def test_linters_are_clean(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    check(done)
