"""Every way to start a job with every MPI that can be started so: hello, and what a rank finds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPICH_FIRST,
    MPIS,
    PROGRAMS,
    ROOT,
    Done,
    Mpi,
    alone,
    check,
    check_hello,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    noise,
    single_node_environ,
    srun,
)

MPIRUN = [pytest.param(mpi, id=mpi.name, marks=pytest.mark.row("mpirun on one node", mpi.title))
          for mpi in MPIS.values()]
LIKE_OTHERS = ("openmpi5", "mpich")  # under srun: the interfaces are those of Open MPI 4.1 and of Intel MPI
SRUN = [pytest.param(mpi, id=mpi.name, marks=[pytest.mark.row(f"srun --mpi={mpi.pmi} on 3 nodes", mpi.title)]
                     + [pytest.mark.light] * (mpi.name in LIKE_OTHERS)) for mpi in MPIS.values()]
NOTHING = [pytest.param(mpi, id=mpi.name, marks=[pytest.mark.row("nothing", mpi.title)]
                        + [pytest.mark.light] * (mpi.name != "mpich")) for mpi in MPIS.values()]


@pytest.mark.parametrize("mpi", MPIRUN)
def test_mpirun_says_hello(mpi: Mpi) -> None:
    done = mpiexec(mpi, 2, EXAMPLES / "hello_world.py")
    lines = check_hello(done, 2)
    assert noise(done) == []
    assert {(one["address"], one["backend"]) for one in lines} == {("127.0.0.1", "gloo")}


@pytest.mark.light
@pytest.mark.parametrize(("hostname", "nodes"), [(None, "1 node"), ("n07", "2 nodes")])
def test_a_library_without_shared_memory(hostname: str | None, nodes: str, quick: Mpi) -> None:
    """MPICH then says that each rank has a node of its own; a rank in another UTS namespace has one."""
    need([*quick.missing(), *([] if os.geteuid() == 0 else ["root"])])
    rank = [str(quick.python), "-m", "mpiddp", str(EXAMPLES / "hello_world.py")]
    other = ["unshare", "--uts", "sh", "-c", f'hostname {hostname}; exec "$@"', "other"] if hostname else []
    command = [*mpiexec_command(quick, 2)[:-1], *rank, ":", "-n", "1", *other, *rank]
    done = processes.run(*command, timeout=DEADLINE_S, cwd=ROOT,
                         env={**single_node_environ(quick), "MPIR_CVAR_NOLOCAL": "1"})
    check_hello(done, 3)
    assert noise(done) == []
    assert f" 3 ranks on {nodes}, " in done.stderr


@pytest.mark.parametrize("mpi", SRUN)
def test_srun_says_hello(mpi: Mpi, cluster: Cluster) -> None:
    done = srun(cluster, mpi, "-N3 -n4", EXAMPLES / "hello_world.py")
    lines = check_hello(done, 4)
    assert [one["host"] for one in lines] == ["node1", "node1", "node2", "node3"]
    assert {one["address"] for one in lines} == {"10.77.0.11"}


@pytest.mark.parametrize("mpi", NOTHING)
def test_no_launcher_is_a_world_of_one(mpi: Mpi) -> None:
    check_hello(alone(mpi, "-m", "mpiddp", EXAMPLES / "hello_world.py"), 1)


@pytest.mark.row("sbatch with mpirun inside, 3 nodes", MPIS["openmpi4"].title)
def test_sbatch_with_mpirun_says_hello(cluster: Cluster) -> None:
    done = sbatch(cluster, MPIS["openmpi4"], EXAMPLES / "hello_world.py")
    lines = check_hello(done, 6)
    assert sorted(one["host"] for one in lines) == ["node1", "node1", "node2", "node2", "node3", "node3"]


def sbatch(cluster: Cluster, mpi: Mpi, script: Path) -> Done:
    """Submit a batch script with `mpirun python -m mpiddp SCRIPT` inside and wait for its output."""
    need(mpi.missing())
    output = ROOT / ".sbatch.out"
    command = f"{mpi.mpiexec} --bind-to none {mpi.python} -m mpiddp {script}"
    try:
        done = check(cluster.run("sbatch", "--parsable", "-N3", "--ntasks-per-node=2", f"--output={output}",
                                 "--error=/dev/null", f"--wrap={command}", timeout=30, env=mpi.environ(), cwd=ROOT))
        status, _ = cluster.wait_for_job(done.stdout.strip(), timeout=120)["ExitCode"].split(":")
        return Done(command, int(status), output.read_text(), done.stderr)
    finally:
        output.unlink(missing_ok=True)


@pytest.mark.light
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_mpirun_gives_every_rank_its_place(mpi: Mpi) -> None:
    assert places(mpiexec(mpi, 2, PROGRAMS / "whoami.py")) == ["localhost"] * 2


@pytest.mark.thorough("any order of nodes, Open MPI 4.1")
@pytest.mark.parametrize("mpi", [MPIS["openmpi4"], MPIS["mpich"]], ids=lambda mpi: mpi.name)
def test_cyclic_and_uneven_placement(mpi: Mpi, cluster: Cluster) -> None:
    nodes = places(srun(cluster, mpi, "-n5 -N3 --distribution=cyclic", PROGRAMS / "whoami.py"))
    assert nodes[:3] == ["node1", "node2", "node3"]
    assert len(nodes) == 5


@pytest.mark.light
def test_arbitrary_placement(cluster: Cluster) -> None:
    options = "-n4 -N3 --distribution=arbitrary -w node2,node1,node2,node3"
    done = srun(cluster, MPIS["openmpi4"], options, PROGRAMS / "whoami.py")
    assert places(done) == ["node2", "node1", "node2", "node3"]


@pytest.mark.parametrize("name", first_of(["localhost", "same"]))
def test_nodes_with_one_hostname(cluster: Cluster, name: str) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    command = f"hostname {name} && exec {mpi.python} -m mpiddp {PROGRAMS / 'whoami.py'}"
    done = cluster.run("srun", "--mpi=pmix", "-N3", "-n3", "unshare", "--uts", "sh", "-c", command,
                       timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    assert places(done) == ["node1", "node2", "node3"]
    assert {one["host"] for one in whoamis(done)} == {name}
    assert f"mpiddp: warning: {message('launch/same_hostname', nodes=3, host=name)}" in done.stderr


def whoamis(done: Done) -> list[dict[str, Any]]:
    """Return what the ranks of a whoami job printed, in rank order."""
    return sorted(map(json.loads, check(done).stdout.splitlines()), key=lambda one: int(one["mpi"][0]))


def places(done: Done) -> list[str]:
    """Return the node of each rank as the launcher says it; fail unless all that a rank finds fits them."""
    ranks = whoamis(done)
    nodes = [one["node"] for one in ranks]
    order = list(dict.fromkeys(nodes))
    for rank, one in enumerate(ranks):
        found = one["environ"]
        assert {name: found[name] for name in found if "RANK" in name or "SIZE" in name} == {
            "RANK": str(rank), "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(len(nodes)), "ROLE_WORLD_SIZE": str(len(nodes)),
            "LOCAL_RANK": str(nodes[:rank].count(one["node"])), "LOCAL_WORLD_SIZE": str(nodes.count(one["node"])),
            "GROUP_RANK": str(order.index(one["node"])), "NODE_RANK": str(order.index(one["node"])),
            "GROUP_WORLD_SIZE": str(len(order)),
        }
        assert one["group"] == [rank, len(nodes), "gloo"]
        assert one["mpi"] == [rank, len(nodes)]
        assert one["sum"] == len(nodes)
        assert one["elastic"]
        assert int(found["OMP_NUM_THREADS"]) >= 1
        assert found["GLOO_SOCKET_IFNAME"] == ("lo" if len(order) == 1 else "eth0")
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert len({one["environ"][name] for one in ranks}) == 1
    return nodes
