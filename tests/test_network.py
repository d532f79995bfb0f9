"""Nodes meet where hosts files mislead, on a network that all of them have, and on the one that the user names."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mpiddp.base.config import LaunchConfig
from mpiddp.bootstrap import probe as probing
from mpiddp.bootstrap.probe import CONNECT_TIMEOUT_S, OTHER_ADDRESS_TIMEOUT_S, AddressProber, ProbeTarget
from mpiddp.bootstrap.rank0 import BootstrapHost
from mpiddp.bootstrap.rollcall import Rendezvous
from mpiddp.discovery.host import Interface
from mpiddp.ipc.event_loop import EventLoop
from mpiddp.ipc.probe_responder import ProbeResponder
from mpiddp.planning.network import ProbeResult
from tests.cluster import Cluster
from tests.cluster.cluster import NODES, ip, namespace
from tests.messages import find, message
from tests.support import DEADLINE_S, EXAMPLES, MPIS, ROOT, Done, check, check_hello, srun

pytestmark = pytest.mark.light

LO = Interface("lo", "127.0.0.1", "127.0.0.0/8", loopback=True, speed_mbps=0)
HELLO, TRAIN = EXAMPLES / "hello_world.py", EXAMPLES / "train_digits.py"
# As Debian's installer and cloud images write it: a node's own name is a loopback address.
OWN_NAME_IS_LOOPBACK = """
grep -v "$SLURMD_NODENAME" /etc/hosts > /tmp/hosts; echo 127.0.1.1 "$SLURMD_NODENAME" >> /tmp/hosts
mount --bind /tmp/hosts /etc/hosts; exec "$@"
"""


@pytest.fixture
def door() -> Iterator[ProbeTarget]:
    """Return where a loop like an agent's answers."""
    errors: list[Exception] = []
    loop = EventLoop(errors.append)
    found = ProbeResponder("token")
    loop.watch(found, found.respond)

    def end() -> None:
        found.close()
        loop.stop()

    stop, stopping = socket.socketpair()
    loop.watch(stopping, end)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield ProbeTarget(("127.0.0.1",), found.port, "token")
    stop.close()
    thread.join(10)
    stopping.close()
    assert not errors
    assert not thread.is_alive()


def test_an_address_that_answers_is_found_with_the_interface_that_leads_there(door: ProbeTarget) -> None:
    assert AddressProber(door, [LO]).await_trials() == (ProbeResult("lo"),)


def test_a_thread_answers_where_rank_0_has_no_agent() -> None:
    host = BootstrapHost(cast(Rendezvous, SimpleNamespace(hosts=["n0"])), LaunchConfig(), None)
    host._offered = [LO]
    target = host._open_probe_target()
    assert AddressProber(target, [LO]).await_trials() == (ProbeResult("lo"),)
    host._all_have_probed.set()


@pytest.fixture
def doors() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return two servers on one port, of 127.0.0.1 and 127.0.0.2, to which the kernel connects whoever comes."""
    with (socket.create_server(("127.0.0.1", 0)) as one,
          socket.create_server(("127.0.0.2", one.getsockname()[1])) as other):
        yield one, other


def answered(one: socket.socket, addresses: Sequence[str]) -> tuple[tuple[ProbeResult, ...], float]:
    """Return what came of addresses of which this server alone answers, and how long that was waited for."""
    start = time.monotonic()
    probe = AddressProber(ProbeTarget(tuple(addresses), one.getsockname()[1], "token"), [LO])
    connection, _ = one.accept()
    with connection:
        connection.sendall(b"token")
        return probe.await_trials(), time.monotonic() - start


def test_an_address_that_does_not_answer_costs_no_more_than_its_time(doors: tuple[socket.socket, ...]) -> None:
    (dead, alive), waited_s = answered(doors[0], ["127.0.0.2", "127.0.0.1"])
    assert (dead, alive) == (ProbeResult(error="no answer"), ProbeResult("lo"))
    assert OTHER_ADDRESS_TIMEOUT_S <= waited_s < OTHER_ADDRESS_TIMEOUT_S + 60


def test_nobody_waits_for_others_when_the_best_address_answers(
    doors: tuple[socket.socket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "OTHER_ADDRESS_TIMEOUT_S", 600.0)
    monkeypatch.setattr(probing, "CONNECT_TIMEOUT_S", 600.0)
    (alive, dead), waited_s = answered(doors[0], ["127.0.0.1", "127.0.0.2"])
    assert (alive, dead) == (ProbeResult("lo"), ProbeResult(error="no answer"))
    assert waited_s < 300


def test_answers_that_came_in_the_meantime_are_heard(door: ProbeTarget) -> None:
    probe = AddressProber(door, [LO])
    time.sleep(OTHER_ADDRESS_TIMEOUT_S + 0.1)  # torch is imported
    assert probe.await_trials() == (ProbeResult("lo"),)


@pytest.mark.parametrize("import_s", [0.0, OTHER_ADDRESS_TIMEOUT_S + 0.5])
@pytest.mark.parametrize("first", [0, 1])
def test_who_has_waited_for_one_address_waits_for_others_that_answer_with_it(
    first: int, import_s: float, doors: tuple[socket.socket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's node was busy, and answers one after the other: nodes would not agree if each took its first one."""
    monkeypatch.setattr(probing, "OTHER_ADDRESS_GRACE_S", 1.0)
    probe = AddressProber(ProbeTarget(("127.0.0.1", "127.0.0.2"), doors[0].getsockname()[1], "token"), [LO])
    with doors[0].accept()[0] as one, doors[1].accept()[0] as other:
        for number, connection in enumerate((one, other)[::1 - 2 * first]):
            late = threading.Timer(OTHER_ADDRESS_TIMEOUT_S + 0.4 + 0.2 * number, connection.sendall, [b"token"])
            late.daemon = True
            late.start()
        time.sleep(import_s)
        assert [trial.error for trial in probe.await_trials()] == ["", ""]


def test_a_node_without_ipv6_tries_the_other_addresses(door: ProbeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel's `ipv6.disable=1` leaves it."""
    def make(family: socket.AddressFamily) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return socket.socket(family)

    kernels = SimpleNamespace(socket=make, AF_INET=socket.AF_INET, AF_INET6=socket.AF_INET6)
    monkeypatch.setattr(probing, "socket", kernels)
    both = door._replace(addresses=("fd77::1", *door.addresses))
    assert AddressProber(both, [LO]).await_trials() == (ProbeResult(error=os.strerror(errno.EAFNOSUPPORT)),
                                                        ProbeResult("lo"))


@pytest.mark.parametrize("silent_s", [OTHER_ADDRESS_TIMEOUT_S + 0.2, 60.0])
def test_a_lone_address_has_as_long_as_three_packets_take(silent_s: float) -> None:
    """The kernel drops what would connect to a server with a full queue, as a bad link does."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as full, contextlib.ExitStack() as ends:
        for _ in range(2):
            ends.enter_context(socket.create_connection(full.getsockname(), timeout=10))
        start = time.monotonic()
        probe = AddressProber(ProbeTarget(("127.0.0.1",), full.getsockname()[1], "token"), [LO])
        answering = threading.Timer(silent_s, answer_all, [full])
        answering.start()
        ends.callback(answering.join)
        ends.callback(full.shutdown, socket.SHUT_RDWR)
        ends.callback(answering.cancel)
        found, waited_s = probe.await_trials(), time.monotonic() - start
    assert found == ((ProbeResult("lo"),) if silent_s < CONNECT_TIMEOUT_S else (ProbeResult(error="no answer"),))
    assert OTHER_ADDRESS_TIMEOUT_S < waited_s < CONNECT_TIMEOUT_S + 50


def answer_all(server: socket.socket) -> None:
    """Answer as rank 0 until the server is shut down."""
    with contextlib.suppress(OSError):
        while True:
            with server.accept()[0] as connection:
                connection.sendall(b"token")


@pytest.mark.parametrize(("busy_s", "timeout_s"), [
    (OTHER_ADDRESS_TIMEOUT_S + 0.5, 60.0), (60.0, OTHER_ADDRESS_TIMEOUT_S + 2)])
def test_a_busy_node_is_waited_for_while_its_kernel_keeps_the_connection(
    busy_s: float, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "ANSWER_TIMEOUT_S", timeout_s)
    with socket.create_server(("127.0.0.1", 0)) as one:
        probe = AddressProber(ProbeTarget(("127.0.0.1", "127.0.0.2"), one.getsockname()[1], "token"), [LO])
        connection, _ = one.accept()
        with connection:
            late = threading.Timer(busy_s, connection.sendall, [b"token"])
            late.daemon = True
            late.start()
            found, _ = probe.await_trials()
    late.cancel()
    assert found == (ProbeResult("lo") if busy_s < timeout_s else ProbeResult(error="no answer"))


def test_a_port_where_nobody_or_another_answers_is_not_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        probe = AddressProber(ProbeTarget(("127.0.0.1",), port, "token"), [LO])
        connection, _ = other.accept()
        connection.sendall(b"SSH-2.0")
        assert probe.await_trials() == (ProbeResult(error=message("launch/foreign_answer")),)
        connection.close()
    prober = AddressProber(ProbeTarget(("127.0.0.1",), port, "token"), [LO])
    assert prober.await_trials() == (ProbeResult(error="Connection refused"),)


def misled(cluster: Cluster, *command: object) -> Done:
    """Run a command on each node, whose name is a loopback address in its own hosts file."""
    mpi = MPIS["openmpi4"]
    return cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", "-n3", "unshare", "--mount", "sh", "-c",
                       OWN_NAME_IS_LOOPBACK, "sh", *map(str, command), timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)


BUSY = """
import ctypes, os, sys
sys.path.remove(os.path.dirname(__file__))
del sys.modules["torch"]
if os.environ.get("SLURM_PROCID") == "0":
    ctypes.PyDLL(None).sleep(%d)  # as a dlopen() from a slow file system: it holds the interpreter
import torch
"""


def test_rank_0s_node_answers_while_rank_0_is_busy_with_its_import(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(BUSY % (OTHER_ADDRESS_TIMEOUT_S + 4))
    mpi = MPIS["openmpi4"]
    done = cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", "-n3", f"--export=ALL,PYTHONPATH={tmp_path}",
                       str(mpi.python), "-m", "mpiddp", str(HELLO), timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    check_hello(done, 3)


@pytest.fixture
def second_network(cluster: Cluster) -> Iterator[None]:
    """Give node1 another network, which no other node has."""
    inside = ("-n", namespace("node1"))
    ip(*inside, "link", "add", "fast0", "type", "veth", "peer", "name", "fast1")
    try:
        ip(*inside, "address", "add", "10.99.0.1/24", "dev", "fast0")
        for end in ("fast0", "fast1"):
            ip(*inside, "link", "set", end, "up")
        yield
    finally:
        ip(*inside, "link", "del", "fast0")


@pytest.mark.torch
@pytest.mark.usefixtures("second_network")
def test_a_job_where_names_are_loopback_and_one_node_has_a_network_of_its_own(cluster: Cluster) -> None:
    """On the same nodes torchrun (torch 2.13, gloo) was not through after 60 s with --master-addr=node1.

    With node1's address instead it failed after 22 s: gloo takes each node's own name for its address.
    """
    done = check(misled(cluster, MPIS["openmpi4"].python, "-m", "mpiddp", HELLO))
    assert "tcp://10.77.0.11:" in done.stderr
    check_hello(done, 3)


def test_the_interface_that_the_user_names(cluster: Cluster) -> None:
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--interface", "eth0", "--master-addr", "10.77.0.11", HELLO)
    assert {one["address"] for one in check_hello(done, 3)} == {"10.77.0.11"}
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--interface", "ib7", HELLO)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: no-network") == 1
    assert find("launch/network_missing", done.stderr, options="--interface=ib7", host="node1",
                interfaces="eth0 10.77.0.11")


DATA = "mpiddpdata"


@contextlib.contextmanager
def another_network(name: str, addresses: str, cut_off: str = "") -> Iterator[None]:
    """Give all nodes an interface of this name, with an address in which the node's number is put.

    Nothing comes to or from the node that is cut off, although its link is up.
    """
    ip("link", "add", DATA, "type", "bridge")
    try:
        ip("link", "set", DATA, "up")
        for number, node in enumerate(NODES, start=1):
            outside, inside = f"{DATA}{number}", ("-n", namespace(node))
            ip("link", "add", outside, "type", "veth", "peer", "name", name, "netns", namespace(node))
            ip(*inside, "address", "add", addresses.format(number), "dev", name, *["nodad"] * (":" in addresses))
            ip(*inside, "link", "set", name, "up")
            ip("link", "set", outside, "up")
            if node != cut_off:
                ip("link", "set", outside, "master", DATA)
        yield
    finally:
        for number, node in enumerate(NODES, start=1):
            if f"{DATA}{number}" in ip("link", "show"):
                ip("-n", namespace(node), "link", "del", name)
        ip("link", "del", DATA)


@contextlib.contextmanager
def listening_in(node: str, port: int) -> Iterator[None]:
    """Let a process on a node listen on a port of all its addresses."""
    code = f"import socket; one = socket.create_server(('', {port})); print(flush=True); input()"
    with subprocess.Popen(["ip", "netns", "exec", namespace(node), sys.executable, "-c", code], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        yield
        process.stdin.write("\n")


def test_the_ports_that_the_user_names(cluster: Cluster) -> None:
    """The one after it is the agent's, where other nodes try rank 0's addresses before that."""
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--port", "29531", HELLO)
    assert {one["port"] for one in check_hello(done, 3)} == {"29531"}
    with listening_in("node1", 29532):
        done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--port", "29531", HELLO)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: port-taken") == 1, done.stderr
    assert message("launch/port_taken", port=29532, host="node1", error="Address already in use") in done.stderr


@pytest.fixture
def six_network(cluster: Cluster) -> Iterator[None]:
    """Give all nodes a second network, `six0`, which has addresses of IPv6 alone."""
    with another_network("six0", "fd77::{}/64"):
        yield


@pytest.mark.torch
@pytest.mark.usefixtures("six_network")
def test_a_network_of_ipv6_alone(cluster: Cluster) -> None:
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--interface", "six0", HELLO)
    assert {one["address"] for one in check_hello(done, 3)} == {"fd77::1"}
    assert "tcp://[fd77::1]:" in done.stderr


def test_a_node_whose_link_is_down_is_named(cluster: Cluster) -> None:
    """It goes down when Slurm has started the ranks, and before they do anything: without it Slurm starts none.

    srun waits for more than a minute where it has not yet heard that they were started.
    """
    mpi, inside = MPIS["openmpi4"], ("-n", namespace("node2"))
    cut = 'if [ "$SLURMD_NODENAME" = node2 ]; then sleep 1; ip link set eth0 down; fi; exec "$@"'
    try:
        done = cluster.run("srun", "--mpi=pmix", "-N3", "-n3", "sh", "-c", cut, "sh", str(mpi.python), "-m", "mpiddp",
                           "--startup-timeout", "12", str(HELLO), timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    finally:
        ip(*inside, "link", "set", "eth0", "up")
    cluster.take_back("node2")
    assert done.returncode != 0
    assert "mpiddp: rank 0 on node1 has waited" in done.stderr
    assert "; no answer from node2\n" in done.stderr


@pytest.fixture
def data_network(cluster: Cluster) -> Iterator[None]:
    """Give all nodes a second network, `data0`, on which nothing comes to or from node2."""
    with another_network("data0", "10.88.0.{}/24", cut_off="node2"):
        yield


@pytest.mark.usefixtures("data_network")
def test_a_network_that_does_not_reach_a_node_is_left_alone_or_named_with_it(cluster: Cluster) -> None:
    """Open MPI uses every network that it finds, and would wait for ever on this one."""
    mpi_network = {"OMPI_MCA_btl_tcp_if_include": "eth0"}
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", HELLO, env=mpi_network)
    assert {one["address"] for one in check_hello(done, 3)} == {"10.77.0.11"}
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--interface", "data0", HELLO, env=mpi_network)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: address-unreachable") == 1
    assert find("launch/unreachable_from", done.stderr, address="10.88.0.1", interface="data0", hosts="node2")
