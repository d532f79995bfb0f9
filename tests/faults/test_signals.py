"""Signals from outside, and nodes that are lost: the job ends, says so, and leaves nothing."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN, ip, namespace
from tests.faults.matrix import LAUNCHERS, Launcher
from tests.support import ROOT, mpiexec_command, need

FAULTS = Path(__file__).parent
OUTSIDE = re.compile(r"mpiddp: ended by SIG(?:INT|TERM|KILL) after .* s, sent to the job from outside")
STATUS_OF_INTERRUPTED = {"Open MPI 4.1 mpirun": 1, "Open MPI 5 mpirun": 1, "MPICH mpiexec": 130}
START_S, END_S = 90, 40


class Job:
    """A job that runs in the background, ended with the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def await_ready(self, ranks: int) -> None:
        """Read its output until every rank is at work."""
        assert self.process.stdout
        deadline = time.monotonic() + START_S
        while self.lines.count("READY\n") < ranks:
            assert time.monotonic() < deadline, self.lines
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line)

    def output(self) -> str:
        """Return what it printed on stdout and stderr once it has ended."""
        rest, _ = self.process.communicate(timeout=END_S)
        return "".join(self.lines) + rest


@contextlib.contextmanager
def started(launcher: Launcher, cluster: Cluster | None, *arguments: object, nodes: int = 3) -> Iterator[Job]:
    """Hold a running job of mpiddp; fail where a process of it is left."""
    mpi, python = launcher.mpi, ["-m", "mpiddp", *map(str, arguments)]
    need(mpi.missing())
    env = processes.marked(launcher.environ())
    if cluster is None:
        command = mpiexec_command(mpi, launcher.ranks, *python)
    else:
        command = [*cluster.at("login", ROOT), "srun", f"--mpi={mpi.pmi}", f"-N{nodes}",
                   f"-n{launcher.ranks}", str(mpi.python), *python]
        env["SLURM_CONF"] = f"{RUN}/slurm.conf"
    with processes.start(command, env, ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield Job(process)
        finally:
            processes.end_tree(process.pid)
    assert processes.leftovers(env) == []


def by_name(name: str) -> Launcher:
    """Return a launcher of the matrix."""
    return next(launcher for launcher in LAUNCHERS if launcher.name == name)


@pytest.mark.parametrize("launcher", LAUNCHERS[:3], ids=lambda launcher: launcher.name)
def test_an_interrupted_mpirun(launcher: Launcher) -> None:
    with started(launcher, None, FAULTS / "busy.py") as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(signal.SIGINT)
        text = job.output()
    told = len(OUTSIDE.findall(text))
    assert told == 1 or (launcher.name.startswith("Open MPI") and told == 0), text  # it may drop what ranks print then
    assert "mpiddp: failed" not in text
    assert job.process.returncode == STATUS_OF_INTERRUPTED[launcher.name], text


@pytest.mark.parametrize("launcher", LAUNCHERS[3:], ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("how", ["Ctrl-C", "scancel"])
def test_an_srun_that_is_ended(launcher: Launcher, how: str, cluster: Cluster) -> None:
    with started(launcher, cluster, FAULTS / "busy.py") as job:
        job.await_ready(launcher.ranks)
        if how == "Ctrl-C":
            for _ in range(2):  # the first makes srun tell the state of its tasks
                job.process.send_signal(signal.SIGINT)
                time.sleep(0.3)
        else:
            cluster.run("scancel", "--user=root", timeout=30)
        text = job.output()
    if how == "scancel":
        assert len(OUTSIDE.findall(text)) == 1, text
        assert "mpiddp: failed" not in text
        assert job.process.returncode == 143, text
    else:  # srun kills the ranks right after it has sent them SIGINT
        assert "srun: sending Ctrl-C to StepId=" in text
        assert len(re.findall("mpiddp: (?:failed|ended)", text)) <= 1, text
        assert job.process.returncode in (130, 137), text


@pytest.mark.parametrize("launcher", LAUNCHERS[3:], ids=lambda launcher: launcher.name)
@pytest.mark.parametrize(("number", "nodes"), [(signal.SIGTERM, 3), (signal.SIGHUP, 3), (signal.SIGTERM, 1)],
                         ids=["SIGTERM", "SIGHUP", "SIGTERM-one-node"])
def test_an_srun_that_is_sent_a_signal(
    launcher: Launcher, number: signal.Signals, nodes: int, cluster: Cluster
) -> None:
    """As at a logout: srun kills all ranks with SIGKILL, and none of them has run out of memory."""
    with started(launcher, cluster, FAULTS / "patient.py", nodes=nodes) as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(number)
        text = job.output()
    assert OUTSIDE.findall(text) == re.findall("mpiddp: ended by SIGKILL .*", text) != [], text
    assert "mpiddp: failed" not in text
    assert job.process.returncode == 137, text


@pytest.mark.parametrize("launcher", [LAUNCHERS[0], LAUNCHERS[3]], ids=lambda launcher: launcher.name)
def test_nothing_is_left_of_loader_workers_and_children(launcher: Launcher, request: pytest.FixtureRequest) -> None:
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    with started(launcher, cluster, FAULTS / "busy.py", 1) as job:
        text = job.output()
    assert job.process.returncode == 1, text
    assert text.count("Traceback (most recent call last)") == 1, text
    assert "mpiddp: failed: rank 1 on " in text


def test_a_node_that_loses_its_network(cluster: Cluster) -> None:
    """The others notice at the timeout of their collective; nothing comes from the node."""
    launcher = by_name("srun pmix")
    try:
        with started(launcher, cluster, FAULTS / "patient.py") as job:
            job.await_ready(launcher.ranks)
            ip("-n", namespace("node2"), "link", "set", "eth0", "down")
            text = job.output()
            ip("-n", namespace("node2"), "link", "set", "eth0", "up")
            assert job.process.returncode != 0
            assert re.search(r"nothing is heard of rank \d on node2", text), text
    finally:
        ip("-n", namespace("node2"), "link", "set", "eth0", "up")


def test_a_rank_that_is_killed_with_its_nodes_slurmd(cluster: Cluster) -> None:
    launcher = by_name("srun pmix")
    with started(launcher, cluster, FAULTS / "patient.py") as job:
        job.await_ready(launcher.ranks)
        victim = next(process for process in psutil.process_iter(["cmdline"])
                      if "patient.py" in " ".join(process.info["cmdline"] or []) and in_node(process, "node3"))
        psutil.Process(int((RUN / "pids" / "node3").read_text().split()[0])).kill()
        victim.kill()
        text = job.output()
        cluster.restart("node3")
    assert job.process.returncode != 0
    assert re.search(r"mpiddp: failed: rank \d on node3: ended by SIGKILL", text), text


def in_node(process: psutil.Process, node: str) -> bool:
    """Tell whether a process is in a node's network."""
    return Path(f"/proc/{process.pid}/ns/net").stat().st_ino == Path("/run/netns", namespace(node)).stat().st_ino
