"""The package as a whole: imports, metadata, types."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import pytest

import mpiddp
from tests.support import ROOT, Mpi, alone, check

PACKAGE = ROOT / "mpiddp"
FILES = sorted(PACKAGE.rglob("*.py"))
PURE = {"__future__", "collections", "collections.abc", "enum", "functools", "ipaddress", "itertools", "math", "random",
        "re", "statistics", "string", "typing", "ClusterShell.NodeSet"}


def name(path: Path) -> str:
    """Return a module's name below the package, empty for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def outside(path: Path) -> set[str]:
    """Return the modules outside the package that a file imports anywhere in it."""
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}


@pytest.mark.parametrize("package", ["planning", "check.stats"])
def test_what_plans_and_judges_is_pure(package: str) -> None:
    """No MPI, no torch, no environment: nothing but Python's own modules and a library that is pure."""
    paths = list((PACKAGE / package.replace(".", "/")).glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        assert outside(path) <= PURE, path


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_python_code_runs_between_fork_and_exec(path: Path) -> None:
    """Beside a thread that holds a lock at the fork it may wait for ever (subprocess, `preexec_fn`)."""
    assert "preexec_fn=" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_names_say_what_they_stand_for(path: Path) -> None:
    fields = ("id", "arg", "attr", "name")  # of variables, parameters, attributes, functions and classes
    names = {getattr(node, field, None) for node in ast.walk(ast.parse(path.read_text())) for field in fields}
    assert names & {"at", "found", "one", "seen", "some", "those", "told", "way", "ways"} == set()


def test_importing_the_package_imports_neither_torch_nor_mpi(quick: Mpi) -> None:
    done = check(alone(quick, "-X", "importtime", "-c", "import mpiddp"))
    assert "mpiddp" in done.stderr
    assert "torch" not in done.stderr
    assert "mpi4py" not in done.stderr


def test_the_version_is_the_metadatas() -> None:
    assert importlib.metadata.version("mpiddp") == mpiddp.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
