"""A job in containers: Charliecloud, with Slurm's PMIx across the container's wall; ranks that are a container's first.

Open MPI itself crashes where each rank has process numbers of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.messages import find, message
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

pytestmark = pytest.mark.light

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


@pytest.mark.thorough("test_a_first_process_that_crashes_is_named_by_the_others")
@pytest.mark.parametrize(("name", "env"), [("openmpi4", PLAIN), ("openmpi5", {})])
def test_hello_from_containers_on_two_nodes(cluster: Cluster, image: Path, name: str, env: dict[str, str]) -> None:
    mpi = MPIS[name]
    binds = [f"--bind={path}:{path}" for path in mounts()]
    done = cluster.run("srun", "--mpi=pmix", "-wnode[1-2]", "--ntasks-per-node=2", "ch-run", *binds, f"--cd={ROOT}",
                       str(image), "--", str(mpi.python), "-m", "mpiddp", str(EXAMPLES / "hello_world.py"),
                       timeout=DEADLINE_S, env={**mpi.environ(), **env, "USER": "root"}, cwd=ROOT)
    assert {one["host"] for one in check_hello(done, 4)} == {"node1", "node2"}


# Each rank is process 2 of its own container, and UCX asks /proc of its own whether the peer still lives: in one job of
# thirty MPI_Init fails with "Endpoint timeout" or "Shared memory error" where MPICH talks through shared memory.
WITHOUT_SHARED_MEMORY = {"UCX_TLS": "tcp,self"}
CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc", "setsid")  # out of reach of what ends the process outside
FIRST_PROCESS = PROGRAMS / "first_process.py"


def test_ranks_that_are_the_first_processes_of_their_containers(quick: Mpi) -> None:
    need([] if os.geteuid() == 0 else ["root"])
    done = check(contained(quick, "end"))
    assert done.stdout == "done\n" * 3


def in_containers(name: str, *command: str) -> list[str]:
    """Return a command whose ranks, of which it starts each, have containers of their own, with a hostname each."""
    python = command.index(str(MPIS["mpich"].python))
    hostname = f"import os, socket; socket.sethostname(f{name!r}.encode()); os.execv({command[python]!r}, "
    return [*command[:python], "unshare", "--pid", "--fork", "--mount-proc", "--uts", "--ipc", command[python], "-c",
            f"{hostname}{list(command[python:])!r})"]


@pytest.mark.parametrize(("name", "hosts"), [("c{os.environ['PMI_RANK']}", ["c0", "c1"]), ("", ["unnamed"])])
def test_ranks_of_one_node_in_containers_of_their_own(
    quick: Mpi, name: str, hosts: list[str], tmp_path: Path
) -> None:
    """They are on one node all the same; a host without a name is called something."""
    need([*([] if os.geteuid() == 0 else ["root"]), *quick.missing()])
    line = mpiexec_command(quick, 2, "-m", "mpiddp", "--log-dir", tmp_path, "--map", tmp_path / "map.json",
                           EXAMPLES / "hello_world.py")
    command, env = in_containers(name, *line), {**single_node_environ(quick), **WITHOUT_SHARED_MEMORY}
    done = check(processes.run(*command, timeout=DEADLINE_S, env=env, cwd=ROOT))
    assert "2 ranks on 1 node, gloo on cpu, tcp://127.0.0.1:" in done.stderr
    seats = json.loads((tmp_path / "map.json").read_text())
    assert sorted({seat["host"] for seat in seats}) == hosts
    logs = sorted(file.name for file in tmp_path.glob("*/*.log"))
    assert logs == [f"rank-{rank:05d}.{hosts[min(rank, len(hosts) - 1)]}.log" for rank in range(2)]


@pytest.mark.torch
@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi4"], MPIS["mpich"], MPIS["openmpi5"], MPIS["impi"]]),
                         ids=lambda mpi: mpi.name)
def test_a_laptop_that_calls_itself_localhost(mpi: Mpi) -> None:
    need([*([] if os.geteuid() == 0 else ["root"]), *mpi.missing()])
    line = mpiexec_command(mpi, 2, "-m", "mpiddp", EXAMPLES / "hello_world.py")
    done = processes.run("unshare", "--uts", "sh", "-c", 'hostname localhost; exec "$@"', "sh", *line,
                         timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
    assert {one["host"] for one in check_hello(done, 2)} == {"localhost"}


def test_a_first_process_in_native_code_is_ended(quick: Mpi) -> None:
    """The kernel keeps SIGKILL from it, where that comes from inside; the launcher kills only what is around it.

    Its agent ends it when its grace is over, which may be after the launcher's end.
    """
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
                         env={**(single_node_environ(mpi) if env is None else env), **WITHOUT_SHARED_MEMORY}, cwd=ROOT)


def test_a_first_process_that_crashes_is_named_by_the_others(cluster: Cluster) -> None:
    """Its agent goes with it; there may be time for its last word."""
    mpi = MPIS["mpich"]
    done = cluster.run("srun", "--mpi=pmi2", "-N3", "-n3", *CONTAINED, str(mpi.python), "-m", "mpiddp",
                       str(FIRST_PROCESS), "crash", timeout=DEADLINE_S, env={**mpi.environ(), **WITHOUT_SHARED_MEMORY},
                       cwd=ROOT)
    (report,) = find("launch/failed_rank", done.stderr, rank=1, host="node2")
    assert report["cause"] in (
        message("launch/agent_killed"),
        message("launch/killed_by_signal", signal="SIGSEGV", description="Segmentation fault"))
    assert done.returncode != 0
