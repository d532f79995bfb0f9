"""The package as a whole: layers, imports, metadata, linters."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import mpiddp
from tests.support import ROOT, Mpi, alone, check

PACKAGE = ROOT / "mpiddp"
ROOMS = ["leaf", "facts", "plan", "act", "launch", "cli"]  # each may import those before it, and its own
LEAVES = {"errors", "config", "environment", "version"}
ENTRIES = {"__init__", "__main__", "cli", "api"}


def room(module: str) -> str:
    """Return the room of a module, from its name below the package."""
    first = module.split(".")[0]
    if first in LEAVES:
        return "leaf"
    return "cli" if first in ENTRIES else first


def imports(path: Path) -> list[str]:
    """Return the modules of the package that a file imports, by their names below the package."""
    package = list(path.relative_to(PACKAGE).with_suffix("").parts)[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found += [".".join([*base, alias.name]) for alias in node.names]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    own = ROOMS.index(room(".".join(path.relative_to(PACKAGE).with_suffix("").parts)))
    upward = [name for name in imports(path) if ROOMS.index(room(name)) > own]
    assert upward == []


def test_the_plan_is_pure() -> None:
    """No MPI, no torch, no environment: nothing but the facts, Python's own modules and two libraries that are pure."""
    for path in (PACKAGE / "plan").glob("*.py"):
        tree = ast.parse(path.read_text())
        outside = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        outside |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        assert outside <= {"__future__", "collections", "collections.abc", "itertools", "typing",
                           "ClusterShell.NodeSet", "networkx"}, path


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
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    check(done)
