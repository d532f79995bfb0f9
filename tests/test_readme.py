"""Every command of the README runs, as it stands there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.support import DEADLINE_S, MPIS, ROOT, alone, check, need

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
FIRST, *REST = COMMANDS
ON_CLUSTER = [command for command in REST if command.startswith(("srun ", "sbatch "))]
ACCURACY = re.compile(r"held-out accuracy (\d\.\d+) with (\d+) ranks")


def accuracy(text: str, ranks: int) -> float:
    """Return the accuracy that a run printed once."""
    (share, size), = ACCURACY.findall(text)
    assert int(size) == ranks
    return float(share)


def test_every_command_has_its_test() -> None:
    assert FIRST.startswith("python3 -m venv ")
    assert [command for command in REST if command not in ON_CLUSTER] == ["tests/run"]  # which runs this
    assert "tests/run" in (ROOT / ".ci/run").read_text()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a fresh copy of what git tracks, as a stranger who clones the repository has it."""
    listed = check(processes.run("git", "ls-files", "-z", timeout=60, cwd=ROOT)).stdout
    for name in filter(None, listed.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    yield tmp_path
    shutil.rmtree(tmp_path)


def test_the_first_command_trains(clone: Path) -> None:
    """In an environment with nothing of this one but the way to Python and to packages."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("HOME", "PIP_", "LANG", "SSL_"))}
    venvs = str(ROOT / ".venvs")
    path = ":".join(part for part in os.environ["PATH"].split(":") if not part.startswith(venvs))
    done = check(processes.run("sh", "-c", FIRST, timeout=600, cwd=clone, env={**kept, "PATH": path}))
    assert accuracy(done.stdout, 2) >= 0.95


@pytest.mark.parametrize("command", ON_CLUSTER)
def test_commands_for_a_cluster_train_on_it(command: str, cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    output = ROOT / ".readme.out"
    submit = re.sub("^sbatch ", f"sbatch --wait --output={output} ", command)
    environ = {**mpi.environ(), "PATH": f"{mpi.python.parent}:/usr/bin:/bin:/usr/sbin:/sbin"}
    try:
        done = check(cluster.run("sh", "-c", submit, timeout=DEADLINE_S, env=environ, cwd=ROOT))
        text = output.read_text() if output.exists() else done.stdout
    finally:
        output.unlink(missing_ok=True)
    assert accuracy(text, 6) >= 0.95


def test_the_options_are_told_of() -> None:
    """The README's table of options and `--help` name the same ones."""
    helped = alone(MPIS["mpich"], "-m", "mpiddp", "--help").stdout
    table = README.split("## Options")[1].split("## ")[0]
    found = [set(re.findall(r"--[a-z][a-z-]+", text.split("Options come before")[0])) for text in (table, helped)]
    assert found[0] == found[1] - {"--mpi"}


def test_the_names_of_problems_are_told_of() -> None:
    """The README's table and the code name the same ones."""
    sources = "\n".join(path.read_text() for path in (ROOT / "mpiddp").rglob("*.py"))
    raised = set(re.findall(r'LaunchError\(\s*"([a-z-]+)"', sources))
    raised |= {line.split(":")[0] for line in re.findall(r'f?"([a-z]+-[a-z]+: )', sources)}
    table = README.split("## When it does not start")[1].split("## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == raised
