"""Scripts that make their own process group find the one that is there, or get one as they ask."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    EXAMPLES,
    MPICH_FIRST,
    MPIS,
    PROGRAMS,
    ROOT,
    VENVS,
    Mpi,
    alone,
    check,
    check_hello,
    first_of,
    free_port,
    mpiexec,
    noise,
    single_node_environ,
    srun,
)


@pytest.mark.thorough("test_twenty_groups_one_after_another begins with the plain call")
@pytest.mark.parametrize("how", ["plain", "address", "ours", "twice", "same", "timeout", "backend", "mesh"])
def test_init_process_group_called_so(quick: Mpi, how: str) -> None:
    done = check(mpiexec(quick, 2, PROGRAMS / "groups.py", how))
    assert done.stdout == f"{how} 2 of 2\n" * 2
    assert noise(done) == []


def test_a_group_of_the_scripts_own_names_the_rank_once(quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("from datetime import timedelta\nimport torch.distributed as dist\n"
                      "dist.init_process_group(timeout=timedelta(minutes=7))\nraise ValueError('seven')\n")
    done = check(mpiexec(quick, 2, script), 1)
    assert re.search(r"^\[rank[01]\]: ValueError: seven$", done.stderr, re.MULTILINE), done.stderr
    assert "]: [rank" not in done.stderr


@pytest.mark.parametrize("how", first_of(["tcp", "file", "store"]))
def test_a_meeting_point_of_the_scripts_own(quick: Mpi, how: str, tmp_path: Path) -> None:
    point = free_port() if how == "tcp" else tmp_path / "store"
    assert check(mpiexec(quick, 2, PROGRAMS / "groups.py", how, point)).stdout == f"{how} 2 of 2\n" * 2


@pytest.mark.thorough("test_each_communicator_has_its_group")
def test_two_worlds_with_a_port_each(quick: Mpi) -> None:
    done = check(mpiexec(quick, 4, PROGRAMS / "groups.py", "halves", free_port(), free_port()))
    assert done.stdout == "halves 2 of 2\n" * 4


@pytest.mark.thorough("test_each_communicator_has_its_group")
def test_a_world_without_the_last_rank(quick: Mpi) -> None:
    assert check(mpiexec(quick, 3, PROGRAMS / "groups.py", "first")).stdout == "first 2 of 2\n" * 2


@pytest.mark.thorough("test_a_group_of_the_scripts_own_names_the_rank_once")
def test_a_rank_that_is_late_for_the_scripts_group(quick: Mpi, tmp_path: Path) -> None:
    """The other waits for it in gloo as long as the script says, not as long as the job's store would."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\nfrom datetime import timedelta\nimport torch.distributed as dist\n"
        "time.sleep(90 * (os.environ['RANK'] == '1'))\n"
        "dist.init_process_group('gloo', timeout=timedelta(seconds=3))\n")
    done = mpiexec(quick, 2, "--no-init", script, timeout=60)
    assert done.returncode == 1
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    (late,) = find("launch/late_rank", report["cause"], ranks="rank 0")
    assert "timeout" in late["cause"]
    assert "  where    late.py:4 <module>" in done.stderr


# What each rank of an mpirun in a batch script inherits.
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
                "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
ASKS_SLURM = """\
import os, torch, torch.distributed as dist
if "SLURM_PROCID" in os.environ:
    os.environ.update(RANK=os.environ["SLURM_PROCID"], WORLD_SIZE=os.environ["SLURM_NTASKS"],
                      LOCAL_RANK=os.environ["SLURM_LOCALID"], MASTER_ADDR="localhost", MASTER_PORT="29500")
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
total = torch.ones(1)
dist.all_reduce(total)
print(*(os.environ[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NPROCS")), int(total))
"""


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_script_that_asks_slurm_first(mpi: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(ASKS_SLURM)
    done = check(mpiexec(mpi, 2, script, env=BATCH_SCRIPT))
    assert sorted(done.stdout.splitlines()) == ["0 0 0 2 2", "1 1 0 2 2"]
    assert noise(done) == []
    done = check(mpiexec(mpi, 2, "--explain=1", env=BATCH_SCRIPT))
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RANK=1 "))
    assert message("launch/corrected_variable", variable="SLURM_PROCID", former=0) in line


@pytest.mark.parametrize(("ranks", "name", "fields"), [
    ("rank=0, world_size=2", "launch/duplicate_rank", {"first": 0, "second": 1, "rank": 0, "ranks": 2}),
    ("world_size=3, rank=dist.get_rank()", "launch/too_many_ranks", {"asked": 3, "ranks": 2}),
])
def test_ranks_of_which_no_group_can_be_made(
    quick: Mpi, tmp_path: Path, ranks: str, name: str, fields: dict[str, int]
) -> None:
    """Torch would wait for its timeout, and blame the store."""
    (script := tmp_path / "train.py").write_text(
        f"import torch.distributed as dist\ndist.init_process_group('gloo', {ranks})\ndist.barrier()\n")
    done = check(mpiexec(quick, 2, script), 1)
    (report,) = find("launch/failed_rank", done.stderr)
    assert report["cause"] == f"ValueError: {message(name, **fields)}"
    assert "  where    " + str(script) in done.stderr


def test_no_init_leaves_it_to_the_script(quick: Mpi) -> None:
    assert check(mpiexec(quick, 2, "--no-init", PROGRAMS / "groups.py", "bare")).stdout == "bare 2 of 2\n" * 2


@pytest.mark.parametrize("options", first_of([[], ["--no-init"]]), ids=["init", "no-init"])
def test_twenty_groups_one_after_another(quick: Mpi, options: list[str]) -> None:
    done = check(mpiexec(quick, 2, *options, PROGRAMS / "recreate.py", 20))
    assert done.stdout == "20 groups\n" * 2
    assert noise(done) == []


@pytest.mark.thorough("the same on one node")
def test_twenty_groups_one_after_another_on_three_nodes(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 -n3", PROGRAMS / "recreate.py", 20))
    assert done.stdout == "20 groups\n" * 3


@pytest.mark.long
def test_a_script_for_torchrun_runs_under_both(quick: Mpi) -> None:
    script = EXAMPLES / "hello_torchrun.py"
    check_hello(mpiexec(quick, 2, script), 2)
    done = processes.run(str(VENVS / "base/bin/torchrun"), "--nproc-per-node=1", f"--master-port={free_port()}",
                         str(script), timeout=100, env=single_node_environ(quick), cwd=ROOT)
    check_hello(done, 1)


def test_a_script_that_spawns_its_own_ranks(quick: Mpi) -> None:
    done = check(alone(quick, "-m", "mpiddp", PROGRAMS / "spawn_tutorial.py"))
    assert sorted(done.stdout.splitlines()) == ["spawned 0 of 2", "spawned 1 of 2"]
