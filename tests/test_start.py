"""What keeps a job on three nodes from starting is named, with its node, and the job ends."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import NODES, RUN
from tests.messages import find, message
from tests.support import DEADLINE_S, EXAMPLES, MPIS, ROOT, Done, Mpi, first_of, need

pytestmark = pytest.mark.light

HELLO = EXAMPLES / "hello_world.py"
HANGING_TORCH = "import time\ntime.sleep(600)\n"
CRASHING = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
OTHER_TORCH = """\
import os, sys
sys.path.remove(os.path.dirname(__file__))
del sys.modules["torch"]
import torch
torch.__version__ = type(torch.__version__)("2.12.0")
"""


def on_nodes(cluster: Cluster, mpi: Mpi, first: str, *arguments: object, prefix: str = "", per_node: int = 1) -> Done:
    """Run mpiddp on three nodes after a shell command `first` in each rank."""
    need(mpi.missing()[:1])
    start = " ".join(["exec", prefix, *map(shlex.quote, [str(mpi.python), "-m", "mpiddp", *map(str, arguments)])])
    return cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", f"--ntasks-per-node={per_node}", "sh", "-c",
                       f"{first}; {start}", timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)


def on(node: str, command: str) -> str:
    """Return a shell command that does something on one node alone."""
    return f'if [ "$SLURMD_NODENAME" = {node} ]; then {command}; fi'


def check_refused(done: Done, *words: str) -> None:
    """Fail unless the job was refused once, with the words."""
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("mpiddp: cannot start:") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture(autouse=True)
def nothing_left(cluster: Cluster) -> Iterator[None]:
    """Fail where a process of the job outlives it on a node."""
    yield
    deadline = time.monotonic() + 5
    while (left := ranks()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def ranks() -> list[psutil.Process]:
    """Return the processes that run mpiddp on the nodes of the cluster."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "mpiddp" in words and "python" in Path(words[0]).name and process.info["status"] != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if any(in_node(process, node) for node in NODES):
                    found.append(process)
    return found


@pytest.fixture
def mpi() -> Mpi:
    """Return the MPI for tests in which it makes no difference."""
    return MPIS["openmpi4"]


def test_a_script_that_differs_on_a_node(cluster: Cluster, mpi: Mpi) -> None:
    copy = f"cp {HELLO} /tmp/t.py; {on('node2', 'echo >> /tmp/t.py')}"
    check_refused(on_nodes(cluster, mpi, copy, "/tmp/t.py"), "script-differs", " on node2\n")


@pytest.mark.torch
def test_another_torch_on_a_node(cluster: Cluster, mpi: Mpi) -> None:
    shim = f"mkdir -p /tmp/other; printf %s {shlex.quote(OTHER_TORCH)} > /tmp/other/torch.py"
    done = on_nodes(cluster, mpi, on("node3", f"{shim}; export PYTHONPATH=/tmp/other"), HELLO)
    check_refused(done, "version-skew")
    (skew,) = find("launch/version_skew", done.stderr, software="torch", others="2.12.0 on node3")
    assert skew["common"].startswith("2.13.0")


@pytest.mark.thorough("test_another_torch_on_a_node")
def test_another_python_on_a_node(cluster: Cluster, mpi: Mpi) -> None:
    """Open MPI 5's environment on node1, with Debian's library in it: another prefix, and all else the same."""
    other = MPIS["openmpi5"].python
    need([str(other)] if not other.exists() else [])
    command = f'python={mpi.python}; {on("node1", f"python={other}; export MPI4PY_LIBMPI=libmpi.so.40")}'
    done = cluster.run("srun", "--mpi=pmix", "-N3", "-n3", "sh", "-c", f"{command}; exec $python -m mpiddp {HELLO}",
                       timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = find("launch/python_differs", done.stderr)
    assert (Path(line["common"]).name, Path(line["others"]).name) == ("openmpi4", "openmpi5 on node1")
    assert len(done.stdout.splitlines()) == 3


def test_a_small_shared_memory_on_a_node_is_a_warning(cluster: Cluster, mpi: Mpi) -> None:
    small = "unshare --mount sh -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm; exec \"$@\"' sh"
    done = on_nodes(cluster, mpi, f"small=; {on('node2', f'set -- {small}')}", HELLO, prefix='"$@"')
    assert done.returncode == 0, done.stderr
    assert len(find("launch/shm_small", done.stderr, mib=16, hosts="node2")) == 1, done.stderr
    assert len(done.stdout.splitlines()) == 3


RANKS_PER_NODE = first_of([("openmpi4", 2), ("mpich", 1), ("openmpi5", 1)], 2)  # of jobs in which a rank never comes
AT_ONCE = 3  # more would start so slowly that others seem to hang, too


@pytest.fixture(scope="module")
def waits(cluster: Cluster, request: pytest.FixtureRequest) -> dict[str, Done]:
    """Return what came of the jobs that wait for a rank until a deadline: those of the tests that are selected."""
    cases = [one.callspec.params for one in request.session.items
             if getattr(one, "originalname", "") == "test_a_rank_that_never_reaches_mpiddp"]
    return side_by_side({"is stopped": partial(with_a_stopped_rank, cluster)} | {
        case["name"]: partial(on_nodes, cluster, MPIS[case["name"]], on("node2", "sleep 600"), "--startup-timeout", 12,
                              HELLO, per_node=case["per_node"])
        for case in cases})


@pytest.fixture(scope="module")
def hangs(cluster: Cluster) -> dict[str, Done]:
    """Return what came of the jobs in which a rank's import hangs."""
    jobs = {}
    for name in ("openmpi4", "mpich"):
        shim = f"mkdir -p /tmp/{name}; printf %s {shlex.quote(HANGING_TORCH)} > /tmp/{name}/torch.py"
        hang = on("node2", f"{shim}; export PYTHONPATH=/tmp/{name}")
        jobs[name] = partial(on_nodes, cluster, MPIS[name], hang, "--startup-timeout", 30, HELLO)
    return side_by_side(jobs)


def side_by_side(jobs: Mapping[str, Callable[[], Done]]) -> dict[str, Done]:
    """Run jobs at once, and return what came of each."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {name: pool.submit(job) for name, job in jobs.items()}
    return {name: one.result() for name, one in found.items()}


def with_a_stopped_rank(cluster: Cluster) -> Done:
    """Run a job whose rank 1 is stopped with SIGSTOP as soon as it imports torch."""
    deadline = "25"  # seconds in which the others are there on a slow machine, and by which its processes are known
    stopper = threading.Thread(target=stop_rank, args=("node2", deadline))
    stopper.start()
    done = on_nodes(cluster, MPIS["openmpi4"], ":", "--startup-timeout", deadline, HELLO)
    stopper.join()
    return done


@pytest.mark.thorough("test_a_rank_that_hangs_ends_the_job_at_the_deadline")
@pytest.mark.parametrize("name", ["openmpi4", "mpich"])
def test_a_rank_that_hangs_in_an_import(hangs: dict[str, Done], name: str) -> None:
    done = hangs[name]
    waiting = find("launch/waiting_for_ranks", done.stderr, seconds=10, ranks=3)
    assert waiting, done.stderr
    assert "rank 1 on node2 (importing torch)" in waiting[0]["names"]  # others may still import it on a slow machine
    words = message("launch/startup_timeout", seconds=30, missing=1, ranks=3, names="rank 1 on node2 (importing torch)")
    if MPIS[name].pmi == "pmix":
        check_refused(done, "startup-timeout", words)
    else:  # Slurm's pmi2 kills the ranks before their status is known
        assert done.returncode == 137
        assert words in done.stderr


@pytest.mark.parametrize(("name", "module", "stage"), [
    ("openmpi4", "torch", "the start after MPI_Init"), ("impi", "mpi4py", "starting"),
    *(pytest.param("openmpi5", *one, marks=pytest.mark.thorough) for one in (
        ("torch", "the start after MPI_Init"), ("mpi4py", "starting"))),
])
def test_a_rank_that_crashes_in_its_start(cluster: Cluster, name: str, module: str, stage: str) -> None:
    """As with a CUDA or MPI that does not belong to the node: the others would wait for it."""
    shim = f"mkdir -p /tmp/crash; printf %s {shlex.quote(CRASHING)} > /tmp/crash/{module}.py"
    try:
        done = on_nodes(cluster, MPIS[name], on("node2", f"{shim}; export PYTHONPATH=/tmp/crash"), HELLO)
    finally:
        cluster.run("srun", "-N3", "rm", "-rf", "/tmp/crash", timeout=30)
    assert done.returncode != 0
    crash = message("launch/killed_by_signal", signal="SIGSEGV", description="Segmentation fault")
    death = message("launch/startup_death", rank=1, host="node2", cause=crash, stage=stage)
    gone = message("launch/startup_exit", rank=1, host="node2")  # before its agent had a look at it
    assert death in done.stderr or (module == "mpi4py" and gone in done.stderr), done.stderr


@pytest.mark.torch
@pytest.mark.parametrize(("name", "per_node"), RANKS_PER_NODE)
def test_a_rank_that_never_reaches_mpiddp(waits: dict[str, Done], name: str, per_node: int) -> None:
    """The first rank of each node that waits speaks, and the job ends on all."""
    done = waits[name]
    assert done.returncode != 0
    assert done.stderr.count("in MPI_Init, which returns") == 2
    for node, rank in (("node1", 0), ("node3", 2 * per_node)):
        assert done.stderr.count(f"mpiddp: rank {rank} on {node} has waited 3 s in MPI_Init") == 1, done.stderr
        assert done.stderr.count(f"mpiddp: ending rank {rank} on {node}: still in MPI_Init") == 1, done.stderr


@pytest.mark.torch
def test_a_rank_that_is_stopped(waits: dict[str, Done]) -> None:
    check_refused(waits["is stopped"], "startup-timeout", "rank 1 on node2 (")


def stop_rank(node: str, argument: str) -> None:
    """Stop the first rank on a node whose command has this argument, once it has loaded MPI and begins with torch."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in ranks():
            try:
                imports_torch = "/torch/" in Path(f"/proc/{process.pid}/maps").read_text()
                if imports_torch and in_node(process, node) and argument in process.cmdline():
                    os.kill(process.pid, signal.SIGSTOP)
                    return
            except (psutil.Error, OSError):
                continue
        time.sleep(0.02)


def in_node(process: psutil.Process, node: str) -> bool:
    """Tell whether a process runs on a node of the cluster."""
    daemon = int((RUN / "pids" / node).read_text().split()[0])
    return Path(f"/proc/{process.pid}/ns/net").stat().st_ino == Path(f"/proc/{daemon}/ns/net").stat().st_ino


@pytest.mark.parametrize("trap", first_of(["", "trap '' CHLD; "]), ids=["default", "SIGCHLD ignored"])
def test_a_script_finds_no_child_of_ours(cluster: Cluster, mpi: Mpi, trap: str) -> None:
    """The agent is no child of the rank."""
    need(mpi.missing())
    code = "import psutil, sys; print(len(psutil.Process().children()), flush=True)"
    done = on_nodes(cluster, mpi, f"{trap}echo {shlex.quote(code)} > /tmp/children.py", "/tmp/children.py")
    assert done.stdout == "0\n" * 3, done.stderr


@pytest.mark.torch
def test_a_process_group_that_fails_on_one_node(cluster: Cluster) -> None:
    """The others wait for it in gloo; the one that knows says why, once."""
    done = on_nodes(cluster, MPIS["openmpi4"], on("node2", "export GLOO_SOCKET_IFNAME=none0"), HELLO)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.count("mpiddp: failed: ") == 1
    assert re.search(r"mpiddp: failed: rank 1 on node2: .*none0", done.stderr), done.stderr
