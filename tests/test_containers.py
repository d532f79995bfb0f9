"""A job in containers: Charliecloud, with Slurm's PMIx across the container's wall; ranks that are a container's first.

Open MPI itself crashes where each rank has process numbers of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    PROGRAMS,
    ROOT,
    VENVS,
    Done,
    Mpi,
    check,
    check_hello,
    first_of,
    mpiexec_command,
    need,
    single_node_environ,
)

ETC = ("group", "hosts", "ld.so.cache", "ld.so.conf", "nsswitch.conf", "passwd", "resolv.conf")


@pytest.fixture
def image(cluster: Cluster) -> Path:
    """Return a root file system with this machine's programs, into which what lies elsewhere is mounted."""
    assert cluster
    need([] if shutil.which("ch-run") else ["the command ch-run"])
    found = RUN / f"image-{time.monotonic_ns()}"
    for name in ("dev", "etc", "home", "mnt", "proc", "root", "run", "sys", "tmp", "usr", "var/tmp", *mounts()):
        (found / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (found / name).symlink_to(f"usr/{name}")
    for name in ETC:
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), found / "etc")
    shutil.copytree("/etc/alternatives", found / "etc/alternatives", symlinks=True)
    return found


def mounts() -> list[str]:
    """Return the folders with programs and the checkout."""
    return list(dict.fromkeys(["/usr", str(ROOT), str(VENVS.resolve()), str(RUN), sys.base_prefix]))


PLAIN = {"OMPI_MCA_pml": "ob1"}  # with what it takes by itself, no message of Debian's Open MPI 4.1 gets through


@pytest.mark.parametrize(("name", "env"), first_of([("openmpi4", PLAIN), ("openmpi5", {})]))
def test_hello_from_containers_on_two_nodes(cluster: Cluster, image: Path, name: str, env: dict[str, str]) -> None:
    mpi = MPIS[name]
    binds = [f"--bind={path}:{path}" for path in mounts()]
    done = cluster.run("srun", "--mpi=pmix", "-N2", "--ntasks-per-node=2", "ch-run", *binds, f"--cd={ROOT}", str(image),
                       "--", str(mpi.python), "-m", "mpiddp", str(EXAMPLES / "hello_world.py"),
                       timeout=DEADLINE_S, env={**mpi.environ(), **env, "USER": "root"}, cwd=ROOT)
    assert {one["host"] for one in check_hello(done, 4)} == {"node1", "node2"}


CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc", "setsid")  # out of reach of what ends the process outside
FIRST_PROCESS = PROGRAMS / "first_process.py"


def test_ranks_that_are_the_first_processes_of_their_containers(quick: Mpi) -> None:
    need([] if os.geteuid() == 0 else ["root"])
    done = check(contained(quick, "end"))
    assert done.stdout == "done\n" * 3


def test_a_first_process_in_native_code_is_ended(quick: Mpi) -> None:
    """The kernel keeps SIGKILL from it, where that comes from inside; the launcher kills only what is around it."""
    need([] if os.geteuid() == 0 else ["root"])
    env = processes.marked(single_node_environ(quick))
    done = contained(quick, "stuck", env)
    assert done.stderr.count("mpiddp: failed: rank 2 on ") == done.stderr.count("mpiddp: failed:") == 1
    assert processes.leftovers(env) == []


def contained(mpi: Mpi, how: str, env: Mapping[str, str] | None = None) -> Done:
    """Run the program, each rank in a container of its own."""
    need(mpi.missing())
    command = mpiexec_command(mpi, 3, "-m", "mpiddp", "--abort-grace=0.5", FIRST_PROCESS, how)
    python = command.index(str(mpi.python))
    return processes.run(*command[:python], *CONTAINED, *command[python:], timeout=DEADLINE_S,
                         env=single_node_environ(mpi) if env is None else env, cwd=ROOT)


def test_a_first_process_that_crashes_is_named_by_the_others(cluster: Cluster) -> None:
    """Its sentinel goes with it; there may be time for its last word."""
    mpi = MPIS["mpich"]
    done = cluster.run("srun", "--mpi=pmi2", "-N3", "-n3", *CONTAINED, str(mpi.python), "-m", "mpiddp",
                       str(FIRST_PROCESS), "crash", timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    known = "(is gone, and all else in its container with it|ended by SIGSEGV)"
    assert re.search(f"^mpiddp: failed: rank 1 on node2: {known}", done.stderr, re.M)
    assert done.stderr.count("mpiddp: failed:") == 1
    assert done.returncode != 0
