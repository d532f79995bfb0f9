"""Nodes meet where hosts files mislead, on a network that all of them have, and on the one that the user names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import ip, namespace
from tests.support import DEADLINE_S, EXAMPLES, MPIS, ROOT, Done, check, check_hello, srun

HELLO, TRAIN = EXAMPLES / "hello_world.py", EXAMPLES / "train_digits.py"
# As Debian's installer and cloud images write it: a node's own name is a loopback address.
OWN_NAME_IS_LOOPBACK = """
grep -v "$SLURMD_NODENAME" /etc/hosts > /tmp/hosts; echo 127.0.1.1 "$SLURMD_NODENAME" >> /tmp/hosts
mount --bind /tmp/hosts /etc/hosts; exec "$@"
"""


def misled(cluster: Cluster, *command: object) -> Done:
    """Run a command in two tasks on each node, whose name is a loopback address in its own hosts file."""
    mpi = MPIS["openmpi4"]
    return cluster.run("srun", f"--mpi={mpi.pmi}", "-N3", "--ntasks-per-node=2", "unshare", "--mount", "sh", "-c",
                       OWN_NAME_IS_LOOPBACK, "sh", *map(str, command), timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)


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


@pytest.mark.usefixtures("second_network")
def test_a_training_where_names_are_loopback_and_one_node_has_a_network_of_its_own(cluster: Cluster) -> None:
    done = check(misled(cluster, MPIS["openmpi4"].python, "-m", "mpiddp", TRAIN, "--epochs", 1))
    assert "tcp://10.77.0.11:" in done.stderr
    assert done.stdout.count("held-out accuracy") == 1


def test_the_interface_that_the_user_names(cluster: Cluster) -> None:
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--interface", "eth0", "--master-addr", "10.77.0.11", HELLO)
    assert {one["address"] for one in check_hello(done, 3)} == {"10.77.0.11"}
    done = srun(cluster, MPIS["openmpi4"], "-N3 -n3", "--interface", "ib7", HELLO)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: no-network") == 1
    assert "--interface=ib7, but rank 0's node node1 has eth0 10.77.0.11" in done.stderr
