"""Jobs on the hosts of a file, started over a real ssh on three nodes, by a user who is not root."""

from __future__ import annotations

import collections
import contextlib
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import NODES, ip, namespace
from tests.cluster.impair import end_daemon
from tests.cluster.ssh import UID, WORK, Ssh, end_users_processes, missing_components, signal_launcher
from tests.faults.matrix import CAUSES, FAULT, STATUSES
from tests.messages import find, message
from tests.processes import PATIENCE, end_tree
from tests.support import EACH_MPI, EXAMPLES, VENVS, Mpi, check, check_hello, need, torch_of_jobs

pytestmark = pytest.mark.light

LINES = {
    "openmpi4": "mpirun.openmpi --oversubscribe --hostfile {hosts} -x PATH -x PYTHONPATH",
    "openmpi5": "mpirun --bind-to none --hostfile {hosts} -x PATH -x PYTHONPATH",
    "mpich": "mpiexec -f {hosts} -n {ranks}", "impi": "mpiexec -machinefile {hosts} -n {ranks}",
}
SLOTS = (2, 2, 2)
WAITS = "import time; print(end='x', file=open('began', 'a')); time.sleep(600)"
OUTPUT = WORK / "output"
LOSS_S = 120  # for a job to end after a node is lost


@pytest.fixture(scope="module")
def daemons(cluster: Cluster) -> Iterator[Ssh]:
    """Start sshd on the nodes of the cluster, and end it after these tests."""
    need(missing_components())
    yield Ssh(cluster)
    for node in NODES:
        end_daemon(f"sshd-{node}")


@pytest.fixture
def ssh(daemons: Ssh) -> Iterator[Ssh]:
    """Give the daemons to a test, and check that no process is left on any node after it."""
    yield daemons
    assert end_users_processes() == []


def write_hosts(slots: tuple[int, ...], names: tuple[str, ...], mpi: Mpi) -> Path:
    """Write the file of hosts in the form of an MPI's launcher."""
    form = "{} slots={}\n" if mpi.name.startswith("openmpi") else "{}:{}\n"
    hosts = WORK / f"hosts-{time.monotonic_ns()}"
    hosts.write_text("".join(form.format(name, number) for name, number in zip(names, slots, strict=True)))
    return hosts


def job(mpi: Mpi, *arguments: object, slots: tuple[int, ...] = SLOTS, names: tuple[str, ...] = NODES) -> str:
    """Return the script of the shell that starts a job."""
    need(mpi.missing())
    line = LINES[mpi.name].format(hosts=write_hosts(slots, names, mpi), ranks=sum(slots))
    return f"{exports(mpi)} exec {line} python -m mpiddp {' '.join(map(str, arguments))}"


def exports(mpi: Mpi) -> str:
    """Return what the user's shell sets first."""
    torch = torch_of_jobs.get("PYTHONPATH", "")
    return f"export PATH={VENVS}/{mpi.name}/bin:$PATH PYTHONPATH={torch};"


@pytest.mark.parametrize("mpi", EACH_MPI)
def test_uneven_ranks_on_three_nodes(ssh: Ssh, mpi: Mpi) -> None:
    slots = (1, 3, 2)
    done = ssh.run(job(mpi, EXAMPLES / "hello_world.py", slots=slots))
    hosts = collections.Counter(line["host"] for line in check_hello(done, sum(slots)))
    assert hosts == dict(zip(NODES, slots, strict=True))
    assert "6 ranks on 3 nodes" in done.stderr


@pytest.mark.thorough("test_hosts_of_a_file")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_hosts_by_other_names(ssh: Ssh, mpi: Mpi) -> None:
    """The file has the names of another network; the hosts call themselves otherwise."""
    done = ssh.run(job(mpi, EXAMPLES / "hello_world.py", names=tuple(f"fabric-{node}.cluster" for node in NODES)))
    hosts = {line["host"] for line in check_hello(done, 6)}
    assert hosts == set(NODES)


@pytest.mark.thorough("tests/faults on one node, and under srun")
@pytest.mark.parametrize("mpi", EACH_MPI)
@pytest.mark.parametrize("kind", ["raise", "exit", "SIGKILL", "SIGSEGV"])
def test_a_rank_that_fails(ssh: Ssh, mpi: Mpi, kind: str) -> None:
    done = check(ssh.run(job(mpi, FAULT, kind, "loop", 5)), STATUSES[kind])
    (report,) = find("launch/failed_rank", done.stderr, rank=5, host="node3")
    assert CAUSES.get(kind, kind) in report["cause"]


@contextlib.contextmanager
def waiting_job(ssh: Ssh, mpi: Mpi) -> Iterator[subprocess.Popen[str]]:
    """Start a job whose ranks wait, and whose output goes into a file; yield when their scripts run."""
    (began := WORK / "began").unlink(missing_ok=True)
    with ssh.start(f"{{ {job(mpi, '-c', shlex.quote(WAITS))}; }} > {OUTPUT} 2>&1") as running:
        try:
            deadline = time.monotonic() + PATIENCE * 60
            while not began.exists() or began.read_text().count("x") < sum(SLOTS):
                if time.monotonic() > deadline:
                    raise TimeoutError(OUTPUT.read_text())
                time.sleep(0.05)
            yield running
        finally:
            end_tree(running.pid)


@pytest.mark.thorough("a signal to the launcher, on one node and under srun")
@pytest.mark.parametrize("mpi", EACH_MPI)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_launcher_that_is_signalled(ssh: Ssh, mpi: Mpi, number: signal.Signals) -> None:
    with waiting_job(ssh, mpi) as running:
        signal_launcher(number)
        assert running.wait(PATIENCE * 60)
    assert len(find("launch/outside_signal", OUTPUT.read_text())) <= 1
    assert "mpiddp: failed" not in OUTPUT.read_text()


@pytest.mark.thorough("test_an_mpirun_that_waits_for_a_node, in a Slurm job")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_a_node_that_is_cut_off(ssh: Ssh, mpi: Mpi) -> None:
    """It takes 80 to 100 seconds, until TCP gives up: 60 for the agents, the rest for the launcher."""
    link = "-n", namespace("node3"), "link", "set", "eth0"
    with waiting_job(ssh, mpi) as running:
        try:
            ip(*link, "down")
            assert running.wait(PATIENCE * LOSS_S)
        finally:
            ip(*link, "up")
    (report,) = find("launch/failed_rank", OUTPUT.read_text(), host="node3")
    assert report["cause"].startswith(message("launch/node_unreachable", error="").partition(" (")[0])


@pytest.mark.thorough("the same on one node, and under srun")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_where_on_the_first_node(ssh: Ssh, mpi: Mpi) -> None:
    """The others have homes of their own, and know nothing of the job."""
    ask = f"{exports(mpi)} python -m mpiddp.where"
    with waiting_job(ssh, mpi) as running:
        deadline = time.monotonic() + PATIENCE * 20
        while (seen := ssh.run(ask)).returncode and time.monotonic() < deadline:
            time.sleep(0.2)  # the scripts begin a moment before the job can be found
        assert "6 ranks" in check(seen).stdout
        other = ssh.run(ask, "node2")
        assert other.returncode == 1 and "no job of yours runs" in other.stderr + other.stdout
        signal_launcher(signal.SIGTERM)
        running.wait(PATIENCE * 60)


@pytest.mark.thorough("both on one node")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_logs_and_folded_output(ssh: Ssh, mpi: Mpi) -> None:
    logs = WORK / f"logs-{mpi.name}"
    done = check(ssh.run(job(mpi, "--show", "fold", "--log-dir", logs, "-c", "\"print('same')\"")))
    assert done.stdout == "[0-5] same\n"
    (index,) = logs.glob("*/ranks.json")
    records = json.loads(index.read_text())
    assert [(record["rank"], record["host"], record["status"]) for record in records] == [
        (rank, NODES[rank // 2], 0) for rank in range(6)]
    said = [(index.parent / record["file"]).read_text() for record in records]
    assert [text.splitlines()[0] for text in said] == ["same"] * 6, said
    assert index.stat().st_uid == UID


FAILS_ONCE = """\
import os, socket
import mpiddp
print(f"{mpiddp.restart_count} rank {os.environ['RANK']} on {socket.gethostname()}\\n", end="", flush=True)
if mpiddp.restart_count == 0 and socket.gethostname() == "node2":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""


@pytest.mark.thorough("the same under srun")
@pytest.mark.parametrize("mpi", EACH_MPI)
def test_a_job_starts_again_on_the_spare_node(ssh: Ssh, mpi: Mpi) -> None:
    hosts = WORK / "supervised"
    hosts.write_text("".join(f"{node}\n" for node in NODES for _ in range(2)))
    (script := WORK / "fails_once.py").write_text(FAILS_ONCE)
    launcher = LINES[mpi.name].partition(" -")[0]
    exported = " --bind-to none -x PATH -x PYTHONPATH" * mpi.name.startswith("openmpi")
    done = check(ssh.run(f"{exports(mpi)} python -m mpiddp.supervise --hostfile {hosts} --nodes 2 "
                         f"{launcher}{exported} python -m mpiddp {script}"))
    said = sorted(line for line in done.stdout.splitlines() if " rank " in line)
    assert said == [f"{restart} rank {rank} on {nodes[rank // 2]}"
                    for restart, nodes in enumerate([NODES[:2], (NODES[0], NODES[2])]) for rank in range(4)], done
