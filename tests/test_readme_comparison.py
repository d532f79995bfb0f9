"""What the README says of mpiddp beside torchrun, the plain mpirun recipe and Accelerate."""

from __future__ import annotations

import json
import re
import subprocess

import psutil
import pytest

from tests import processes
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    ROOT,
    VENVS,
    Mpi,
    check,
    first_of,
    free_port,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

QUICK = MPIS["mpich"]
ENVIRON = single_node_environ(QUICK)


def torchrun(*arguments: object) -> list[str]:
    """Return the command that starts two ranks under torchrun, on a port that was free a moment ago."""
    return [str(VENVS / "base/bin/torchrun"), "--nproc-per-node=2", f"--master-port={free_port()}",
            *map(str, arguments)]


STARTS = {
    "mpiddp": (lambda script: mpiexec_command(QUICK, 2, "-m", "mpiddp", script), {"127.0.0.1"}),
    "torchrun": (torchrun, {"*", "0.0.0.0", "[::]"}),
    "plain recipe": (lambda script: mpiexec_command(QUICK, 2, PROGRAMS / "plain_recipe.py", script),
                     {"*", "0.0.0.0", "[::]"}),
}


@pytest.mark.process
@pytest.mark.parametrize("peer", first_of(list(STARTS)))
def test_where_the_store_listens_on_one_node(peer: str) -> None:
    """Ask `ss -ltnp` while the job runs, as a site's security staff would; another job may have the same port."""
    need(QUICK.missing())
    command, allowed = STARTS[peer]
    with processes.start(command(PROGRAMS / "store_ports.py"), {**ENVIRON, "LINGER_S": "3"}, ROOT,
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        assert job.stdout is not None
        try:
            port = json.loads(job.stdout.readline())["meeting"][1]
            own = {job.pid, *(process.pid for process in psutil.Process(job.pid).children(recursive=True))}
            table = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True, timeout=20).stdout
            job.communicate(timeout=DEADLINE_S)
        finally:
            processes.end_tree(job.pid)
    assert job.returncode == 0
    local = [line.split()[3].rpartition(":") for line in table.splitlines()
             if not own.isdisjoint(map(int, re.findall(r"pid=(\d+)", line)))]
    found = {address for address, _, one in local if one == str(port)}
    assert found
    assert found <= allowed


@pytest.mark.thorough("the same without torchrun beside it")
def test_the_status_of_a_script_that_fails(quick: Mpi) -> None:
    check(mpiexec(quick, 2, PROGRAMS / "fails.py", 1, 7), 7)
    check(processes.run(*torchrun(PROGRAMS / "fails.py", 1, 7), timeout=DEADLINE_S, env=ENVIRON, cwd=ROOT), 1)


def test_an_accelerate_script_runs_unchanged(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, PROGRAMS / "accelerated.py"))
    assert sorted(done.stdout.splitlines()) == [f"{rank}/2 DistributedDataParallel True" for rank in range(2)]
