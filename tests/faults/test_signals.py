"""Signals from outside, and nodes that are lost: the job ends, says so, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN, ip, namespace
from tests.faults.matrix import CHILD, LAUNCHERS, Launcher
from tests.messages import find, message
from tests.support import MPIS, ROOT, Mpi, check, first_of, mpiexec_command, need, single_node_environ

FAULTS = Path(__file__).parent
INTERRUPTED = re.compile(r"rank \d on \S+: (?:KeyboardInterrupt \(SIGINT\)$|.* SIG(?:TERM|KILL)\b)")
STATUS_OF_INTERRUPTED = {"Open MPI 4.1 mpirun": 1, "Open MPI 5 mpirun": 1, "MPICH mpiexec": 130}
START_S, END_S = 200, 120


class Job:
    """A job that runs in the background, ended with the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def await_ready(self, ranks: int) -> None:
        """Read its output until every rank is at work; end it if that takes too long.

        A prompt, which is no whole line, may precede another rank's word.
        """
        assert self.process.stdout
        with processes.ended_after(START_S, self.process.pid):
            while sum(line.endswith("READY\n") for line in self.lines) < ranks:
                line = self.process.stdout.readline()
                assert line, self.lines
                self.lines.append(line)

    def output(self) -> str:
        """Return what it printed on stdout and stderr once it has ended."""
        rest, _ = self.process.communicate(timeout=END_S)
        return "".join(self.lines) + rest


@contextlib.contextmanager
def started(launcher: Launcher, cluster: Cluster | None, *arguments: object, nodes: int = 3,
            prepare: Callable[[], None] = processes.default_signals,
            env: Mapping[str, str] | None = None, is_hurried: bool = False) -> Iterator[Job]:
    """Hold a running job of mpiddp; fail where a process of it is left. The launcher runs `prepare` as it starts.

    If it `is_hurried`, it kills the agents so soon that on a slow machine children of the script may be left.
    """
    mpi, python = launcher.mpi, ["-m", "mpiddp", *map(str, arguments)]
    need(mpi.missing())
    env = processes.marked({**launcher.environ(), **(env or {})})
    if cluster is None:
        command = mpiexec_command(mpi, launcher.ranks, *python)
    else:
        command = [*cluster.at("login", ROOT), "srun", f"--mpi={mpi.pmi}", f"-N{nodes}",
                   f"-n{launcher.ranks}", str(mpi.python), *python]
        env["SLURM_CONF"] = f"{RUN}/slurm.conf"
    with processes.start(command, env, ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         preexec_fn=prepare) as process:
        try:
            yield Job(process)
        finally:
            processes.end_tree(process.pid)
    assert set(processes.leftovers(env)) <= ({CHILD} if is_hurried else set())


def message_in(error_file: Path) -> str:
    """Return what an error file says of the failure."""
    return str(json.loads(error_file.read_text())["message"]["message"])


def and_whole(launchers: list[Launcher]) -> pytest.MarkDecorator:
    """Run a test under the first of these launchers, and in a thorough run under all, with more ranks too."""
    return pytest.mark.parametrize("launcher", first_of([
        *(pytest.param(one, id=one.name) for one in launchers),
        *(pytest.param(replace(one, whole=True), id=f"{one.name}-whole") for one in launchers)]))


@pytest.mark.mpi
@and_whole(LAUNCHERS[:3])
def test_an_interrupted_mpirun(launcher: Launcher, tmp_path: Path) -> None:
    """Open MPI's may drop what ranks print from then on; the error file has it, if 5.0 leaves the time."""
    file = tmp_path / "error.json"
    is_hurried = launcher.name.startswith("Open MPI 5")
    with started(launcher, None, "--error-file", file, FAULTS / "busy.py", is_hurried=is_hurried) as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(signal.SIGINT)
        text = job.output()
    outside = len(find("launch/outside_signal", text))
    assert outside in ((0, 1) if launcher.name.startswith("Open MPI") else (1,)), text
    if file.exists() or not is_hurried:
        assert INTERRUPTED.match(message_in(file))
    assert "mpiddp: failed" not in text
    assert job.process.returncode == STATUS_OF_INTERRUPTED[launcher.name], text


INTEL = Launcher("Intel MPI mpiexec", MPIS["impi"], False)
SLEEPS = "import time\ndef nap():\n    print('READY\\n', end='', flush=True)\n    time.sleep(600)\nnap()\n"


@pytest.mark.light
@pytest.mark.mpi
@pytest.mark.parametrize("launcher", first_of([LAUNCHERS[2], INTEL]), ids=lambda one: one.name)
def test_an_interrupted_job_shows_where_rank_0_was(launcher: Launcher, tmp_path: Path) -> None:
    """One Ctrl-C is enough."""
    (script := tmp_path / "sleeps.py").write_text(SLEEPS)
    with started(launcher, None, script) as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(signal.SIGINT)
        lines = job.output().splitlines()
    begin = next(at for at, line in enumerate(lines) if find("launch/outside_signal", line, signal="SIGINT"))
    assert find("launch/waiting_rank", lines[begin + 1], rank=0, place=f"{script}:4 nap"), lines
    assert job.process.returncode == 130


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", first_of([*LAUNCHERS[:3], INTEL], 3), ids=lambda one: one.name)
def test_an_mpirun_that_is_terminated_in_collectives(launcher: Launcher, tmp_path: Path) -> None:
    """Ranks die of the signal, or lose one that it has ended: neither is what ended the job."""
    file = tmp_path / "error.json"
    with started(launcher, None, "--error-file", file, FAULTS / "patient.py") as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(signal.SIGTERM)
        text = job.output()
    is_hurried = launcher.name.startswith("Open MPI")  # SIGKILL follows soon, and 5.0 forwards no more output
    assert len(find("launch/outside_signal", text, signal="SIGTERM")) in ((0, 1) if is_hurried else (1,)), text
    assert "mpiddp: failed" not in text
    if file.exists() or not is_hurried:
        record = json.loads(file.read_text())["message"]["extraInfo"]
        assert (record["outside"], record["signal"]) == (True, "SIGTERM")
    assert job.process.returncode != 0


@and_whole(LAUNCHERS[3:])
@pytest.mark.parametrize("how", ["Ctrl-C", "scancel"])
def test_an_srun_that_is_ended(launcher: Launcher, how: str, cluster: Cluster) -> None:
    file = RUN / f"error-{time.monotonic_ns()}.json"  # on all nodes
    with started(launcher, cluster, "--error-file", file, FAULTS / "busy.py") as job:
        job.await_ready(launcher.ranks)
        if how == "Ctrl-C":
            for _ in range(2):  # the first makes srun tell the state of its tasks
                job.process.send_signal(signal.SIGINT)
                time.sleep(0.3)
        else:
            cluster.run("scancel", "--user=root", timeout=30)
        text = job.output()
    if how == "scancel":
        assert INTERRUPTED.match(message_in(file))
        assert len(find("launch/outside_signal", text)) == 1, text
        assert "mpiddp: failed" not in text
        assert job.process.returncode == 143, text
    else:  # srun kills agents and ranks right after it has sent them SIGINT
        assert "srun: sending Ctrl-C to StepId=" in text
        assert "mpiddp: failed" not in text
        assert job.process.returncode in (130, 137), text


@and_whole(LAUNCHERS[3:])
@pytest.mark.parametrize(("number", "nodes"), [
    pytest.param(signal.SIGTERM, 3, id="SIGTERM"),
    *(pytest.param(number, nodes, id=name, marks=pytest.mark.thorough) for number, nodes, name in (
        (signal.SIGTERM, 1, "SIGTERM-one-node"), (signal.SIGHUP, 3, "SIGHUP")))])
def test_an_srun_that_is_sent_a_signal(
    launcher: Launcher, number: signal.Signals, nodes: int, cluster: Cluster
) -> None:
    """As at a logout: srun kills all processes of the step with SIGKILL, agents too, and says so itself."""
    with started(launcher, cluster, FAULTS / "patient.py", nodes=nodes) as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(number)
        text = job.output()
    assert re.search(r"\*\*\* STEP \d+\.\d+ ON node\d CANCELLED", text), text
    assert "mpiddp: failed" not in text
    assert job.process.returncode == 137, text


def as_nohup_does() -> None:
    """Ignore SIGHUP, and nothing else."""
    processes.default_signals()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.light
@pytest.mark.mpi
@pytest.mark.parametrize(("launcher", "goes_on"), first_of([
    (LAUNCHERS[2], True), (LAUNCHERS[0], False), (LAUNCHERS[1], False), (LAUNCHERS[3], False), (LAUNCHERS[4], False),
    (INTEL, True),
]), ids=lambda one: one.name if isinstance(one, Launcher) else "")
def test_a_hangup_of_a_launcher_under_nohup(
    launcher: Launcher, goes_on: bool, request: pytest.FixtureRequest
) -> None:
    """Hydra leaves an ignored SIGHUP ignored, in the ranks too; others take it and end the job, whatever they run."""
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    with started(launcher, cluster, FAULTS / "hangup.py", prepare=as_nohup_does) as job:
        job.await_ready(launcher.ranks)
        job.process.send_signal(signal.SIGHUP)
        text = job.output()
    assert len(re.findall("^SIGHUP is ignored$", text, re.MULTILINE)) == (launcher.ranks if goes_on else 0), text
    assert text.count("came to the end\n") == (launcher.ranks if goes_on else 0), text
    assert (job.process.returncode == 0) == goes_on, text
    assert "mpiddp: failed" not in text


@pytest.mark.light
def test_a_hangup_of_a_lone_rank_under_nohup(quick: Mpi) -> None:
    need(quick.missing()[:1])
    command = [str(quick.python), "-m", "mpiddp", "--quiet", str(FAULTS / "hangup.py")]
    with processes.start(command, single_node_environ(quick), ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         preexec_fn=as_nohup_does) as process:
        (job := Job(process)).await_ready(1)
        process.send_signal(signal.SIGHUP)
        assert job.output() == "SIGHUP is ignored\nREADY\ncame to the end\n"
    assert process.returncode == 0


@pytest.mark.mpi
@and_whole([LAUNCHERS[0], LAUNCHERS[3]])
def test_nothing_is_left_of_loader_workers_and_children(launcher: Launcher, request: pytest.FixtureRequest) -> None:
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    with started(launcher, cluster, FAULTS / "busy.py", 1) as job:
        text = job.output()
    assert job.process.returncode == 1, text
    assert "[rank1]: Traceback (most recent call last)" in text
    ignored = text.count("Exception ignored in")  # torch's, where srun kills a worker before the rank it belongs to
    assert text.count("Traceback (most recent call last)") <= 1 + ignored, text
    assert "mpiddp: failed: rank 1 on " in text


@and_whole([LAUNCHERS[3]])
def test_a_node_that_loses_its_network(launcher: Launcher, cluster: Cluster) -> None:
    """The others notice at the timeout of their collective; nothing comes from the node."""
    try:
        with started(launcher, cluster, FAULTS / "patient.py") as job:
            job.await_ready(launcher.ranks)
            ip("-n", namespace("node2"), "link", "set", "eth0", "down")
            text = job.output()
            ip("-n", namespace("node2"), "link", "set", "eth0", "up")
            assert job.process.returncode != 0
            assert any(re.fullmatch(r"rank \d on node2.*", silent["ranks"])
                       for silent in find("launch/no_response", text)), text
    finally:
        ip("-n", namespace("node2"), "link", "set", "eth0", "up")
    cluster.take_back("node2")


@pytest.mark.parametrize("launcher", first_of(LAUNCHERS[3:]), ids=lambda one: one.name)
def test_the_coordinators_node_loses_its_network(launcher: Launcher, cluster: Cluster) -> None:
    """One agent of another node reports it for all."""
    try:
        with started(launcher, cluster, FAULTS / "patient.py") as job:
            job.await_ready(launcher.ranks)
            ip("-n", namespace("node1"), "link", "set", "eth0", "down")
            text = job.output()
            ip("-n", namespace("node1"), "link", "set", "eth0", "up")
            assert job.process.returncode != 0
            (report,) = find("launch/failed_rank", text)
            assert (report["rank"], report["host"]) == ("0", "node1"), text
            assert find("launch/node_unreachable", report["cause"])
            assert not find("launch/coordinator_unreachable", text)
    finally:
        ip("-n", namespace("node1"), "link", "set", "eth0", "up")
    cluster.take_back("node1")


@pytest.mark.parametrize("name", first_of(["openmpi4", "openmpi5", "impi"]))
def test_an_mpirun_that_waits_for_a_node(name: str, cluster: Cluster) -> None:
    """It never ends by itself: rank 0's agent ends it."""
    need((mpi := MPIS[name]).missing())
    (output := ROOT / ".lost-node.out").touch()
    command = f"{mpi.mpiexec} {mpi.python} -m mpiddp {FAULTS / 'patient.py'}; echo mpirun returned $?"
    env = processes.marked(mpi.environ())
    submitted = check(cluster.run("sbatch", "--parsable", "--no-requeue", "-N3", "--ntasks-per-node=1",
                                  f"--output={output}", f"--wrap={command}", timeout=30, env=env, cwd=ROOT))
    try:
        await_words(output, "READY", 3)
        ip("-n", namespace("node3"), "link", "set", "eth0", "down")
        text = await_words(output, "mpirun returned ", 1)
    finally:
        ip("-n", namespace("node3"), "link", "set", "eth0", "up")
        output.unlink()
        cluster.run("scancel", submitted.stdout.strip(), timeout=30)
        cluster.take_back("node3")
    assert processes.leftovers(env) == []
    assert "mpirun returned 137" in text
    assert text.count("mpiddp: failed: ") == 1, text


def await_words(file: Path, words: str, number: int) -> str:
    """Return what a file holds once it has these words so many times."""
    deadline = time.monotonic() + START_S
    while (text := file.read_text()).count(words) < number:
        assert time.monotonic() < deadline, text
        time.sleep(0.3)
    return text


@and_whole([LAUNCHERS[3]])
def test_a_rank_that_is_killed_with_its_nodes_slurmd(launcher: Launcher, cluster: Cluster) -> None:
    with started(launcher, cluster, FAULTS / "patient.py") as job:
        job.await_ready(launcher.ranks)
        victim = next(process for process in psutil.process_iter(["cmdline"])
                      if "patient.py" in " ".join(process.info["cmdline"] or []) and in_node(process, "node3"))
        psutil.Process(int((RUN / "pids" / "node3").read_text().split()[0])).kill()
        victim.kill()
        text = job.output()
        cluster.restart("node3")
    assert job.process.returncode != 0
    assert find("launch/failed_rank", text, host="node3", cause=message("launch/killed_by_sigkill")), text


@pytest.mark.thorough("a node's slurmd is killed")
@pytest.mark.parametrize("launcher", [LAUNCHERS[4], LAUNCHERS[3]], ids=lambda one: one.name)
def test_a_step_daemon_that_is_killed(launcher: Launcher, cluster: Cluster) -> None:
    """Under pmi2 nobody else notices, and srun waits; under pmix Open MPI ends the node's ranks, with no word why."""
    with started(launcher, cluster, FAULTS / "patient.py") as job:
        job.await_ready(launcher.ranks)
        step = next(process for process in psutil.process_iter(["name"])
                    if process.info["name"] == "slurmstepd" and in_node(process, "node2") and process.children())
        step.kill()
        text = job.output()
    assert job.process.returncode != 0
    assert len(find("launch/failed_rank", text, host="node2", cause=message("launch/step_daemon_killed"))) == 1, text
    assert text.count("mpiddp: failed:") == 1, text


def in_node(process: psutil.Process, node: str) -> bool:
    """Tell whether a process is in a node's network."""
    return Path(f"/proc/{process.pid}/ns/net").stat().st_ino == Path("/run/netns", namespace(node)).stat().st_ino
