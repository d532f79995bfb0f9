"""Jobs planned at a desk, from the facts of nodes that are elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.base.config import LaunchConfig, Script
from mpiddp.base.version import __version__
from mpiddp.discovery import serialization
from mpiddp.discovery.cpus import CpuGrant
from mpiddp.discovery.host import HostFacts
from mpiddp.planning.job import plan_dry_run
from mpiddp.reporting.map import format_map
from tests import test_cores, test_gpus, test_plan
from tests.messages import find
from tests.support import EXAMPLES, Mpi, alone, bare_starts, check, first_of, mpiexec

pytestmark = pytest.mark.light

JOB = LaunchConfig(Script("train.py"))


def with_gpus(machine: tuple[test_gpus.Gpu, ...], facts: list[HostFacts]) -> list[HostFacts]:
    """Return the facts of ranks that all see the GPUs of a machine."""
    return [one._replace(gpus=machine, visible_gpus=machine) for one in facts]


def dgx(ranks: int) -> list[HostFacts]:
    """Return a DGX H100 with so many ranks, which nobody has bound."""
    return with_gpus(test_gpus.DGX_H100, test_cores.ranks(test_cores.DGX_H100, *[range(224)] * ranks))


MACHINES = {
    **{f"DGX H100, {ranks} ranks": dgx(ranks) for ranks in range(1, 9)},
    "a shared node of 112 cores": test_cores.ranks(
        test_cores.machine(112, numa=2), *[range(112)] * 4, given=CpuGrant(16, False, 4711)),
    "MI250X": [one._replace(gpus=()) for one in with_gpus(
        test_gpus.FRONTIER, test_cores.ranks(test_cores.FRONTIER, *[range(128)] * 8))],
    "MIG": with_gpus(test_gpus.SLICES[::2], test_cores.ranks(test_cores.A100_NODE, *[range(64)] * 4)),
    "four Slingshot NICs": [test_plan.host(node, f"n{node}", test_plan.LO, *nics)
                            for node, nics in enumerate(test_plan.HSN)],
    "eight rails and a bond": [test_plan.routed(0), test_plan.routed(1)],
    "GPUs numbered against the cores": test_gpus.bound(test_gpus.A100_NODE, 0, 1, 2, 3),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_file_has_all_that_a_plan_needs(name: str, tmp_path: Path) -> None:
    facts = MACHINES[name]
    serialization.write_facts(str(tmp_path / "facts.json"), facts)
    assert serialization.read_facts(str(tmp_path / "facts.json")) == facts
    assert len(plan_dry_run(facts, JOB._replace(idle_gpus=True))[0]) == len(facts)


def test_a_desk_needs_neither_mpi_nor_torch(quick: Mpi, tmp_path: Path) -> None:
    for name, facts in MACHINES.items():
        file = tmp_path / f"{name}.json"
        serialization.write_facts(str(file), facts)
        done = check(alone(quick, "-X", "importtime", "-m", "mpiddp", "--dry-run", "--facts", file))
        assert done.stdout.splitlines() == format_map(plan_dry_run(facts, JOB)[0])
        assert not {"torch", "mpi4py"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.alone
@pytest.mark.parametrize("name", first_of(["DGX H100, 8 ranks", *list(MACHINES)[:7], *list(MACHINES)[8:]]))
def test_a_desk_takes_few_starts_of_python(name: str, quick: Mpi, tmp_path: Path) -> None:
    """A machine takes 0.1 s where a bare Python takes 0.02."""
    file = tmp_path / "facts.json"
    serialization.write_facts(str(file), MACHINES[name])
    assert bare_starts(quick, "-m", "mpiddp", "--dry-run", "--facts", file) < 10


def test_a_job_writes_the_facts_and_the_desk_finds_its_plan(quick: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    done = check(mpiexec(quick, 2, "--facts", file, EXAMPLES / "hello_world.py"))
    planned = check(alone(quick, "-m", "mpiddp", "--dry-run", "--facts", file)).stdout.splitlines()
    assert planned == [line for line in done.stderr.splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("content", [None, "{}", "nonsense", '{"ranks": [{"hostname": "n1"}]}'])
def test_a_file_without_facts(content: str | None, quick: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    if content is not None:
        file.write_text(content)
    done = check(alone(quick, "-m", "mpiddp", "--dry-run", "--facts", file), 2)
    assert len(done.stderr.splitlines()) == 1
    assert ("No such file or directory" in done.stderr) if content is None else find(
        "launch/no_facts_file", done.stderr, file=file, version=__version__)


def test_a_job_that_could_not_start(quick: Mpi, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    serialization.write_facts(str(file), [one._replace(task_gpus=8) for one in dgx(1)])
    done = check(alone(quick, "-m", "mpiddp", "--dry-run", "--facts", file), 3)
    assert "mpiddp: cannot start: idle-gpus" in done.stderr
