"""--stage in real jobs: on this machine, with the environments behind a FUSE file system, and on three nodes."""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mpiddp.staging.mirror import STAMP
from tests import processes
from tests.benchmarks.staging import Bench
from tests.cluster import Cluster
from tests.cluster.shared import Speed, State, environment, here, shared
from tests.messages import find
from tests.support import MPIS, PROGRAMS, VENVS, Done, check, need, scratch, single_node_environ

MPI = MPIS["openmpi4"]
TIMEOUT_S = 240
STAGED = PROGRAMS / "staged.py"

Job = Callable[..., Done]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Return the Python of an environment in which mpiddp is installed as by pip."""
    need(["root"] if os.geteuid() else [] if Path("/dev/fuse").exists() else ["/dev/fuse"])
    with environment(MPI) as found:
        yield found


class Machine:
    """Runs jobs on this machine, with all environments on a shared file system; mirrors lie in `ours`."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.ours = python, folder / "ours"
        self.ours.mkdir()
        self.state = State(Path(scratch()))
        self.environ = {**single_node_environ(MPI), "XDG_CACHE_HOME": str(folder / "cache")}

    def command(self, *arguments: object, ranks: int = 1, prepare: str = "true") -> list[str]:
        """Return the command of a job with these arguments of mpiddp."""
        job = [str(MPI.mpiexec), *MPI.options, "-n", str(ranks), str(self.python), "-m", "mpiddp", "--quiet"]
        return [*here(self.state, VENVS.resolve(), prepare), *job, *map(str, arguments)]

    def run(self, *arguments: object, ranks: int = 1, status: int = 0, prepare: str = "true",
            env: dict[str, str] | None = None) -> Done:
        """Run a job to its end."""
        done = processes.run(*self.command(*arguments, ranks=ranks, prepare=prepare), timeout=TIMEOUT_S,
                             env={**self.environ, **(env or {})})
        return check(done, status)

    def left(self) -> list[Path]:
        """Return the mirrors on this machine, whole or not."""
        return sorted(self.ours.glob("mpiddp-stage-*/*"))


@pytest.fixture
def machine(python: Path, tmp_path: Path) -> Machine:
    """Return this machine."""
    return Machine(python, tmp_path)


@pytest.mark.long
@pytest.mark.process
def test_a_start_is_recorded_then_staged_then_reused(machine: Machine) -> None:
    option = f"--stage={machine.ours}"
    first = machine.run(option, "-c", "import torch; print('rank', torch.__file__)")
    assert "rank /" in first.stdout
    assert str(machine.ours) not in first.stdout
    assert machine.left() == []
    machine.state.set(Speed())
    second = machine.run(option, "--stage-keep", "--trace", machine.ours / "trace.json", STAGED)
    assert '"staging"' in (machine.ours / "trace.json").read_text()
    assert {line.split()[0] for line in second.stdout.splitlines() if f" {machine.ours}/mpiddp-stage-" in line} == {
        "rank", "subprocess", "spawn"}
    assert [line for line in second.stderr.splitlines() if not line.startswith("mpiddp: trace: ")] == []
    assert "differ []" in second.stdout
    assert "ranks 1" in second.stdout
    assert len(machine.left()) == 1
    machine.state.set(Speed())
    third = machine.run(option, "-c", "import torch; print(torch.__file__)", ranks=2)
    assert third.stdout.count(str(machine.ours)) == 2
    counts = machine.state.counts()
    assert counts["open"] < 600, counts
    assert counts["bytes"] < 2.5e7, counts
    assert machine.left() == []


@pytest.mark.process
@pytest.mark.thorough("--stage on this machine: recorded, staged, reused, noexec")
def test_killed_at_any_moment(machine: Machine) -> None:
    """What is staged then is right, and nothing is left of the killed one."""
    option, draw = f"--stage={machine.ours}", random.Random(22)
    machine.state.set(Speed(latency_s=5e-4, bytes_per_s=100_000_000))
    machine.run(option, STAGED)
    begun = time.monotonic()
    machine.run(option, "-c", "import torch")
    whole_s = time.monotonic() - begun
    moments = set()
    for _ in range(10):
        process = processes.start(machine.command(option, STAGED, 30), machine.environ)
        time.sleep(draw.uniform(0.2, 1.1) * whole_s)
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(20)
        whole = [(path / STAMP).exists() for path in machine.left()]
        moments.add("none" if not whole else "whole" if all(whole) else "half")
        done = machine.run(option, STAGED)
        assert f"rank {machine.ours}" in done.stdout
        assert "differ []" in done.stdout
        assert machine.left() == []
    assert len(moments) > 1, moments
    assert "half" in moments


@pytest.mark.light
@pytest.mark.process
@pytest.mark.parametrize(("options", "problem"), [
    ("size=9g,noexec", "launch/folder_mounted_noexec"),
    pytest.param("size=8m", "launch/folder_too_small", marks=[pytest.mark.torch, pytest.mark.thorough]),
    pytest.param("ro", "", marks=pytest.mark.thorough)])
def test_a_folder_that_will_not_do(machine: Machine, options: str, problem: str) -> None:
    hello = "import torch; print('rank', torch.__file__)"
    machine.run("--stage", "-c", hello)
    prepare = f"mount -t tmpfs -o {options} tmpfs {machine.ours}"
    done = machine.run(f"--stage={machine.ours}", "-c", hello, prepare=prepare)
    (refusal,) = find("launch/not_staged", done.stderr)
    assert find(problem, refusal["reason"], folder=machine.ours) if problem else (
        "Read-only file system" in refusal["reason"])
    assert str(machine.ours) not in done.stdout
    assert "rank /" in done.stdout


@pytest.mark.process
@pytest.mark.thorough("--stage on this machine: recorded, staged, reused, noexec")
def test_a_disk_that_gets_full_meanwhile(machine: Machine) -> None:
    """statvfs(3) promises what is not there: another tenant's files, made while this job writes."""
    need(["fallocate"] if not Path("/usr/bin/fallocate").exists() else [])
    hello = "import torch; print('rank', torch.__file__)"
    machine.run("--stage", "-c", hello)
    fill = f"{machine.ours}/mpiddp-stage-{os.geteuid()}"
    prepare = (f"mount -t tmpfs -o size=700m tmpfs {machine.ours} && "
               f"(while [ ! -d {fill} ] || [ -z \"$(ls {fill})\" ]; do sleep 0.005; done; "
               f"fallocate -l 690m {machine.ours}/others) & true")
    done = machine.run(f"--stage={machine.ours}", "--stage-keep", "-c", hello, prepare=prepare)
    (refusal,) = find("launch/not_staged", done.stderr)
    assert refusal["reason"].endswith("No space left on device")
    assert "rank /" in done.stdout
    assert str(machine.ours) not in done.stdout


SAME = {
    "test_sync of Accelerate": ("-m", "accelerate.test_utils.scripts.test_sync"),
    "workers": (PROGRAMS / "loader_workers.py",),
    "compiled": (PROGRAMS / "compiled.py",),
    "Lightning": (PROGRAMS / "lightning_trainer.py",),
}


@pytest.mark.process
@pytest.mark.thorough("--stage on this machine: recorded, staged, reused, noexec")
@pytest.mark.parametrize("name", SAME)
def test_programs_do_the_same(machine: Machine, name: str) -> None:
    arguments, env = SAME[name], {"ACCELERATE_USE_CPU": "true", }
    results = []
    for options in ((), (f"--stage={machine.ours}",), (f"--stage={machine.ours}", "--stage-keep")):
        done = machine.run(*options, *arguments, ranks=2, env=env)
        results.append(sorted(re.sub(r"[\d.]+ s\b", "", line) for line in done.stdout.splitlines()))
    assert results[0] == results[1] == results[2]
    assert results[0]
    assert len(machine.left()) == 1


@pytest.mark.process
@pytest.mark.thorough("--stage on this machine: recorded, staged, reused, noexec")
def test_what_is_edited_or_installed_is_seen(machine: Machine, tmp_path: Path) -> None:
    """An editable install, by a .pth file of the environment, and a package that comes after a mirror was kept."""
    site = next(machine.python.parents[1].glob("lib/python*/site-packages"))
    source = tmp_path / "source/edited"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("VALUE = 1\n")
    code = ("from importlib.util import find_spec; import edited, torch; "
            "print(edited.VALUE, edited.__file__, *(name for name in ('edited.later', 'fresh') if find_spec(name)))")
    options = (f"--stage={machine.ours}", "--stage-keep", "-c", code)
    try:
        (site / "edited.pth").write_text(f"{source.parent}\n")
        for _ in range(2):
            assert machine.run(*options).stdout == f"1 {source}/__init__.py\n"
        (source / "__init__.py").write_text("VALUE = 22\n")
        (source / "later.py").touch()
        (site / "fresh.py").touch()
        assert machine.run(*options).stdout == f"22 {source}/__init__.py edited.later fresh\n"
    finally:
        for name in ("edited.pth", "fresh.py"):
            (site / name).unlink(missing_ok=True)


@pytest.mark.thorough("--stage on this machine: recorded, staged, reused, noexec")
def test_three_nodes_read_once(cluster: Cluster, python: Path) -> None:
    """As tests.benchmarks.staging counts: operations beside those of one rank; and a node that sees another folder."""
    ours, hello = ("-m", "mpiddp", "--quiet"), ("-c", "import torch; print(torch.__file__)")
    with shared(cluster, VENVS.resolve(), Speed()) as server:
        bench = Bench(cluster, server, python)
        bench.there(*ours, "--stage", *hello, nodes=1)
        alone = bench.there(*ours, *hello, nodes=1).operations
        for nodes in (1, 2, 3):
            took = bench.there(*ours, "--stage", *hello, nodes=nodes)
            assert bench.said.count("mpiddp-stage-") == nodes
            print(f"{nodes} nodes: {took.operations} operations; one rank alone {alone}")
            assert took.operations <= alone + nodes * alone / 4  # each node reads what is imported before staging
    with shared(cluster, VENVS.resolve(), Speed(), nodes=("node1", "node2")) as server:
        bench = Bench(cluster, server, python)
        bench.there(*ours, "--stage", *hello)
        assert find("launch/folders_differ", bench.said)
        assert bench.said.count("mpiddp-stage-") == 0
