"""Each impairment does what it says to one node, as plain sockets and clocks measure it, and leaves no trace."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster, impair
from tests.cluster.cluster import ADDRESSES, BRIDGE, NODES, RUN, ip, namespace, read_pid
from tests.support import DEADLINE_S, MPIS, check, first_of, need

FLOW = Path(__file__).parent / "flow.py"
GIGABIT = 125e6
OUT, IN, BESIDE = ("node2", "node1"), ("node1", "node2"), ("node1", "node3")
SPIN = """
import time
begin, used = time.perf_counter(), time.process_time()
while time.perf_counter() - begin < 0.6: pass
print((time.process_time() - used) / (time.perf_counter() - begin))
"""
CLOCKS = """
import json, socket, threading, time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
now, begin = [time.time(), time.clock_gettime(time.CLOCK_REALTIME)], time.monotonic()
threading.Event().wait(0.2)
all = MPI.COMM_WORLD.gather((socket.gethostname(), now, time.monotonic() - begin, time.monotonic()))
if all: print(json.dumps([[host, [one - now[0] for one in theirs], wait] for host, theirs, wait, _ in all]))
"""
COUNT = """
import socket, sys, time
for number in range(600):
    open(f"{sys.argv[1]}/count-{socket.gethostname()}", "a").write("x")
    time.sleep(0.05)
"""


def state(cluster: Cluster) -> dict[str, object]:
    """Return what an impairment could leave behind: of devices, their queues, rules, mounts, groups and processes."""
    inside = [["nsenter", f"--net=/run/netns/{namespace(node)}"] for node in NODES]
    commands = [[*at, *command] for at in ([], *inside) for command in (["tc", "qdisc"], ["iptables", "-S"])]
    seen: dict[str, object] = {" ".join(command): subprocess.run(command, capture_output=True, text=True, timeout=20,
                               check=True).stdout for command in commands}
    for folder in Path("/sys/class/net").glob(f"{BRIDGE}*"):
        kept = [ip("-d", "link", "show", folder.name).find(word) >= 0 for word in ("gso_max_segs 1 ", "NOARP")]
        seen[folder.name] = ((folder / "address").read_text(), (folder / "master").exists(), kept)
    groups = impair.V1 if impair.V1.is_dir() else impair.V2
    seen["groups"] = [path.name for path in groups.glob("mpiddp-test-node*")]
    seen["slurmd"] = {node: impair.own_group(read_pid(node)) for node in NODES}
    seen["shm"] = [subprocess.run([*cluster.at(node), "stat", "-f", "-c", "%b", "/dev/shm"], capture_output=True,
                                  timeout=20, check=True).stdout for node in NODES]
    seen["daemons"] = sorted(path.name for path in (RUN / "pids").iterdir())
    return seen


def missing() -> list[str]:
    """Return what this machine lacks for the impairments."""
    lacks = [f"the command {name}" for name in ("tc", "iptables", "gcc") if shutil.which(name) is None]
    limits_cpu = impair.V1.is_dir() or "cpu" in (impair.V2 / "cgroup.subtree_control").read_text().split()
    return lacks if limits_cpu else [*lacks, "a controller of CPU time that the first cgroup hands on"]


@pytest.fixture
def unharmed(cluster: Cluster) -> Iterator[Cluster]:
    """Give the cluster to a test, and check that it is as before after it."""
    need(missing())
    before = state(cluster)
    yield cluster
    assert state(cluster) == before


def seconds(cluster: Cluster, way: tuple[str, str], size: int, times: int) -> list[tuple[float, float]]:
    """Return how long messages from one host to another took, alone and with their answers."""
    sender, receiver = way
    python = [sys.executable, str(FLOW), ADDRESSES[receiver]]
    with subprocess.Popen([*cluster.at(receiver), *python], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = cluster_run(cluster, sender, *python, port, str(size), str(times))
            return [(there, back) for there, back in json.loads(done)]
        finally:
            server.kill()


def cluster_run(cluster: Cluster, host: str, *command: str) -> str:
    """Run a command in a host's namespaces, and return what it printed."""
    return subprocess.run([*cluster.at(host), *command], capture_output=True, text=True, timeout=40, check=True).stdout


def rate(cluster: Cluster, way: tuple[str, str], size: int = 2**22, times: int = 4) -> float:
    """Return the bytes a second of a connection."""
    return size / statistics.median(back for _, back in seconds(cluster, way, size, times))


def round_trip(cluster: Cluster, way: tuple[str, str]) -> float:
    """Return the seconds of a quick round trip."""
    return statistics.quantiles([back for _, back in seconds(cluster, way, 1, 60)], n=4)[0]


def one_way(cluster: Cluster, way: tuple[str, str]) -> float:
    """Return the seconds that a byte needs from one host to another, when that is quick."""
    return statistics.quantiles([there for there, _ in seconds(cluster, way, 1, 60)], n=4)[0]


def losses(cluster: Cluster, way: tuple[str, str]) -> tuple[float, float]:
    """Return the share of TCP packets that the receiver drops while 32 MiB are sent, and the share that is sent again.

    Only the first is a measure of the impairment alone: the queue of a slow link drops packets, too.
    """
    sender, receiver = way

    def received() -> tuple[int, int]:
        lines = cluster_run(cluster, receiver, "iptables", "-vxnL", "INPUT").splitlines()
        rules = [line.split() for line in lines if ADDRESSES[sender] in line.split()]
        return sum(int(rule[0]) for rule in rules if rule[2] == "DROP"), max(int(rule[0]) for rule in rules)

    def sent() -> tuple[int, int]:
        names, values = (line.split()[1:] for line in cluster_run(cluster, sender, "cat", "/proc/net/snmp").splitlines()
                         if line.startswith("Tcp:"))
        of = dict(zip(names, map(int, values), strict=True))
        return of["RetransSegs"], of["OutSegs"]

    count_all = ("INPUT", "-p", "tcp", "-s", ADDRESSES[sender])  # a rule without a target counts
    impair.iptables(receiver, "-I", *count_all)
    try:
        before = [received(), sent()]
        seconds(cluster, way, 2**22, 8)
        after = [received(), sent()]
    finally:
        impair.iptables(receiver, "-D", *count_all)
    dropped, resent = ((new[0] - old[0]) / (new[1] - old[1]) for old, new in zip(before, after, strict=True))
    return dropped, resent


@pytest.mark.alone
@pytest.mark.parametrize(("direction", "slow"), first_of([("both", (OUT, IN)), ("out", (OUT,)), ("in", (IN,))]))
def test_a_slow_link_is_slow_in_its_direction(
    unharmed: Cluster, direction: impair.Direction, slow: tuple[tuple[str, str], ...]
) -> None:
    with impair.slow_links(unharmed, GIGABIT):
        with impair.slow_link(unharmed, "node2", GIGABIT / 10, direction):
            for way in (OUT, IN, BESIDE):
                seen = rate(unharmed, way)
                if way in slow:
                    assert seen == pytest.approx(GIGABIT / 10, rel=0.4)
                else:
                    assert 0.25 * GIGABIT < seen < 1.4 * GIGABIT
        assert 0.25 * GIGABIT < rate(unharmed, slow[0]) < 1.4 * GIGABIT
    assert rate(unharmed, slow[0]) > 1.4 * GIGABIT


@pytest.mark.parametrize("size", [2**20, 2**26])
@pytest.mark.alone
@pytest.mark.thorough("other ways to make a node bad: a slow link, a small /dev/shm")
def test_all_links_have_the_same_rate_for_small_and_large_messages(unharmed: Cluster, size: int) -> None:
    with impair.slow_links(unharmed, GIGABIT):
        for way in (OUT, IN):
            assert rate(unharmed, way, size, 2**26 // size // 8 or 1) == pytest.approx(GIGABIT, rel=0.4)


@pytest.mark.parametrize(("direction", "ways"), [("out", 1), ("in", 1), ("both", 2)])
@pytest.mark.alone
@pytest.mark.thorough("other ways to make a node bad: a slow link, a small /dev/shm")
def test_a_delay_holds_each_way(unharmed: Cluster, direction: impair.Direction, ways: int) -> None:
    before = round_trip(unharmed, OUT)
    with impair.delay(unharmed, "node2", 0.005, direction):
        for way in (OUT, IN):
            assert 0.0045 * ways < round_trip(unharmed, way) - before < 0.005 * ways + 0.004
        assert (one_way(unharmed, OUT) > 0.0045) == (direction != "in")
        assert (one_way(unharmed, IN) > 0.0045) == (direction != "out")
        assert round_trip(unharmed, BESIDE) < 0.003
        assert round_trip(unharmed, ("login", "node2")) > 0.0045 * ways
        assert rate(unharmed, OUT, 2**26, 2) > 60e6
    assert round_trip(unharmed, OUT) < 0.003


@pytest.mark.parametrize(("direction", "bad"), [("out", (OUT,)), ("in", (IN,)), ("both", (OUT, IN))])
@pytest.mark.alone
@pytest.mark.thorough("other ways to make a node bad: a slow link, a small /dev/shm")
def test_lost_packets_are_sent_again(
    unharmed: Cluster, direction: impair.Direction, bad: tuple[tuple[str, str], ...]
) -> None:
    with impair.slow_links(unharmed, GIGABIT):
        with impair.drop(unharmed, "node2", 0.04, direction):
            for way in (OUT, IN, BESIDE):
                dropped, resent = losses(unharmed, way)
                assert dropped == (pytest.approx(0.04, rel=0.3) if way in bad else 0), way
                assert resent > 0.02 or way not in bad
        assert losses(unharmed, bad[0])[0] == 0


@pytest.mark.alone
@pytest.mark.thorough("other ways to make a node bad: a slow link, a small /dev/shm")
def test_half_a_cpu_is_all_that_a_nodes_steps_get(unharmed: Cluster) -> None:
    def best(node: str) -> float:
        return max(float(check(unharmed.run("srun", "-w", node, "-n1", sys.executable, "-c", SPIN,
                                            timeout=DEADLINE_S)).stdout) for _ in range(2))
    with impair.half_cpu(unharmed, "node2", 0.2) as group:
        assert 0.05 < best("node2") < 0.26
        assert best("node1") > 0.3
    assert not group.exists()
    assert best("node2") > 0.3


def test_a_small_shm_is_full_soon(unharmed: Cluster) -> None:
    def written(node: str) -> int:
        done = unharmed.run("srun", "-w", node, "-n1", "sh", "-c", "head -c 24M /dev/zero > /dev/shm/x 2>/dev/null; "
                            "stat -c %s /dev/shm/x; rm /dev/shm/x", timeout=DEADLINE_S)
        return int(check(done).stdout)
    with impair.small_shm(unharmed, "node2", 2**24):
        assert (written("node2"), written("node1")) == (2**24, 24 * 2**20)
    assert written("node2") == 24 * 2**20


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.thorough("other ways to make a node bad: a slow link, a small /dev/shm")
def test_a_wrong_clock_is_wrong_on_one_node(unharmed: Cluster, launcher: str) -> None:
    mpi = MPIS["mpich" if launcher == "srun" else "openmpi4"]
    need(mpi.missing())
    start = {"srun": ["srun", f"--mpi={mpi.pmi}", "-N3"],
             "mpirun": ["salloc", "-Q", "-N3", str(mpi.mpiexec), "--map-by", "node"]}[launcher]
    with impair.wrong_clock(unharmed, "node2", 3.0) as variables:
        export = [word for name in variables for word in ("-x", name)] if launcher == "mpirun" else []
        done = unharmed.run(*start, *export, str(mpi.python), "-c", CLOCKS, timeout=DEADLINE_S,
                            env={**mpi.environ(), **variables})
    lines = json.loads(check(done).stdout.splitlines()[-1])
    assert sorted(host for host, _, _ in lines) == list(NODES)
    assert lines[0][0] == "node1"  # against rank 0's clock
    for host, offsets, waited in lines:
        assert offsets == pytest.approx([3.0 if host == "node2" else 0.0] * 2, abs=1.0)
        assert 0.19 < waited < 1.5


@pytest.mark.thorough("other ways to make a node bad: a slow link, a small /dev/shm")
def test_frozen_processes_stand_still_and_are_killed(unharmed: Cluster) -> None:
    def counts() -> dict[str, int]:
        files = {node: RUN / f"count-{node}" for node in ("node1", "node2")}
        return {node: file.stat().st_size if file.exists() else 0 for node, file in files.items()}
    job = [*unharmed.at("login"), "srun", "-K", "-N3", sys.executable, "-c", COUNT, str(RUN)]
    env = {**MPIS["mpich"].environ(), "SLURM_CONF": f"{RUN}/slurm.conf"}
    with subprocess.Popen(job, env=env, stderr=subprocess.DEVNULL) as srun:
        try:
            with impair.frozen("node2", lambda: all(counts().values())) as stopped:
                wait_until(lambda: len(stopped) == 1)
                before = counts()
                wait_until(lambda: counts()["node1"] > before["node1"] + 5)
                assert counts()["node2"] == before["node2"]
                assert stopped[0].status() == psutil.STATUS_STOPPED
            wait_until(lambda: not stopped[0].is_running())
            assert srun.wait(30) != 0
        finally:
            srun.terminate()


def wait_until(true: Callable[[], bool], timeout: float = 20.0) -> None:
    """Return when something is true; raise TimeoutError where it does not come true."""
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for has not come")
        time.sleep(0.05)


def test_nothing_is_left_where_a_test_fails(unharmed: Cluster) -> None:
    with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as all_at_once:
        all_at_once.enter_context(impair.slow_links(unharmed, GIGABIT))
        all_at_once.enter_context(impair.slow_link(unharmed, "node3", GIGABIT / 2))
        all_at_once.enter_context(impair.delay(unharmed, "node3", 0.005))
        all_at_once.enter_context(impair.drop(unharmed, "node3", 0.5))
        all_at_once.enter_context(impair.half_cpu(unharmed, "node3", 0.5))
        all_at_once.enter_context(impair.small_shm(unharmed, "node3", 2**24))
        raise ZeroDivisionError
