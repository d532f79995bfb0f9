"""Rank 0's store: where it listens, and for how long."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    LIGHT,
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

WITHOUT_LIBUV = """\
import os
import torch.distributed as dist
from mpiddp.bootstrap.store import connect_store, serve_store
TCPStore = dist.TCPStore
def without_libuv(*arguments, use_libuv=True, **options):
    if use_libuv:
        raise dist.DistStoreError("use_libuv was requested but PyTorch was built without libuv support, run with ...")
    return TCPStore(*arguments, use_libuv=False, **options)
dist.TCPStore = without_libuv
store, endpoint = serve_store("127.0.0.1", timeout_s=10)
client, reason = connect_store(endpoint, timeout_s=10)
assert client is not None, reason
client.set("key", "met")
print(f"{store.get('key').decode()}, USE_LIBUV={os.environ['USE_LIBUV']}")
"""


def listeners(done: Done) -> dict[int, dict[str, Any]]:
    """Return what store_ports.py printed, by rank."""
    ranks = map(json.loads, check(done).stdout.splitlines())
    return {one["rank"]: one for one in ranks}


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["openmpi4", "mpich"]))
def test_on_one_node_gloo_listens_on_loopback_only(name: str) -> None:
    """More ports than the store's and gloo's can only be the MPI library's, which both have alike."""
    bare = listeners(mpiexec(MPIS[name], 2, "--no-init", PROGRAMS / "store_ports.py", "--no-group", env=LIGHT))
    ranks = listeners(mpiexec(MPIS[name], 2, PROGRAMS / "store_ports.py"))
    outside = [[one for one in found[1]["listening"] if one[0] not in ("127.0.0.1", "::ffff:127.0.0.1")]
               for found in (bare, ranks)]
    assert len(outside[0]) == len(outside[1])
    assert len(ranks[1]["listening"]) > len(bare[1]["listening"])


@pytest.mark.thorough("test_on_one_node_gloo_listens_on_loopback_only")
def test_ranks_meet_with_a_torch_that_was_built_without_libuv(quick: Mpi) -> None:
    """As Debian 13's torch was."""
    assert check(alone(quick, "-c", WITHOUT_LIBUV)).stdout == "met, USE_LIBUV=0\n"


def test_across_nodes_the_store_listens_on_the_chosen_interface_only(cluster: Cluster) -> None:
    ranks = listeners(srun(cluster, MPIS["openmpi4"], "-N3 -n3", PROGRAMS / "store_ports.py"))
    address, port = ranks[0]["meeting"]
    assert address == "10.77.0.11"
    assert [one[0] for one in ranks[0]["listening"] if one[1] == port] == [address]


def test_a_rank_that_ends_early_takes_nothing_from_the_others(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 -n3", PROGRAMS / "ends_early.py"))
    assert done.stdout == "2 went on\n" * 2


@pytest.mark.thorough("test_twenty_groups_one_after_another")
def test_starts_in_a_row_beside_a_job_that_holds_ports(quick: Mpi) -> None:
    """Hold a thousand ports, torchrun's default among them, and start many times."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(1000)]
    try:
        held.append(socket.create_server(("127.0.0.1", 29500)))
        for _ in range(20):
            done = mpiexec(quick, 2, EXAMPLES / "hello_world.py")
            check_hello(done, 2)
            assert noise(done) == []
    finally:
        for one in held:
            one.close()


@pytest.mark.light
def test_jobs_that_start_together_stay_apart(quick: Mpi) -> None:
    command = mpiexec_command(quick, 2, "-m", "mpiddp", EXAMPLES / "hello_world.py")
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(processes.run, *command, timeout=120, env=single_node_environ(quick), cwd=ROOT)
                for _ in range(3)]
    meetings = {(one["address"], one["port"]) for job in jobs for one in check_hello(job.result(), 2)}
    assert len(meetings) == len(jobs)


def test_rank_0_may_have_a_connection_for_each_rank(quick: Mpi) -> None:
    told = check(alone(quick, "-c", "import resource as r; "
                       "from mpiddp.bootstrap.rank0 import raise_open_file_limit as allow; "
                       "r.setrlimit(r.RLIMIT_NOFILE, (600, 3000)); limits = []; "
                       "[(allow(n), limits.append(r.getrlimit(r.RLIMIT_NOFILE))) for n in (4, 1000, 10_000)]; "
                       "print(limits)")).stdout
    assert told == "[(600, 3000), (1512, 3000), (3000, 3000)]\n"


def test_a_start_asks_no_name_server_who_the_ranks_are(quick: Mpi) -> None:
    """With a log that tells more than warnings, torch's names are left in, and so asked for."""
    tools = [name for name in ("ip", "mount", "unshare") if shutil.which(name) is None]
    need([*tools, *(["root, for a network namespace"] if os.geteuid() else []), *quick.missing()])
    command = ["unshare", "--net", "--mount", sys.executable, str(PROGRAMS / "name_server.py"),
               *mpiexec_command(quick, 2, "-m", "mpiddp", EXAMPLES / "hello_world.py")]
    asked = {}
    for level in ("WARNING", "INFO"):
        environ = {**single_node_environ(quick), "TORCH_CPP_LOG_LEVEL": level}
        done = check(processes.run(*command, timeout=DEADLINE_S, env=environ, cwd=ROOT))
        asked[level] = [line for line in done.stdout.splitlines() if line.endswith(".arpa")]
        if level == "WARNING":
            assert "hostname of the client" not in done.stderr
    assert len(asked["INFO"]) >= 2
    assert asked["WARNING"] == []
