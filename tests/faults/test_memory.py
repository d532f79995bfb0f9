"""A rank that uses more memory than its cgroup allows, as Slurm limits a job's."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.failure.root_cause import OUT_OF_MEMORY
from tests import processes
from tests.faults.matrix import FAULT
from tests.messages import find, message
from tests.support import DEADLINE_S, EXAMPLES, PROGRAMS, ROOT, Mpi, check, mpiexec_command, need, single_node_environ


def test_a_rank_that_runs_out_of_memory(quick: Mpi, group: Path) -> None:
    need(quick.missing())
    command = mpiexec_command(quick, 2, "-m", "mpiddp", FAULT, "memory", "loop", 1)
    env = processes.marked(single_node_environ(quick))
    done = processes.run("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command,
                         timeout=DEADLINE_S, env=env, cwd=ROOT)
    assert done.returncode != 0
    assert done.stderr.count("mpiddp: failed: ") == 1, done.stderr
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause=message("launch/out_of_memory"))) == 1
    assert processes.leftovers(env) == []


@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
def test_a_job_that_ran_out_of_memory_once_is_started_again(quick: Mpi, group: Path, tmp_path: Path) -> None:
    need(quick.missing())
    script = [str(one) for one in (PROGRAMS / "faulty.py", "memory", 1, 30, tmp_path / "notes",
                                   EXAMPLES / "train_digits.py", "--epochs", 2, "--checkpoint", tmp_path / "c.pt")]
    job = mpiexec_command(quick, 2, "-m", "mpiddp", *script)
    supervise = [str(quick.python), "-m", "mpiddp.supervise", "--dir", str(tmp_path)]
    done = check(processes.run("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *supervise, *job,
                               timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT))
    (restart,) = find("supervise/restart", done.stderr, attempt=0, number=1, limit=3, details="")
    assert restart["reason"].startswith("rank 1 on ")
    assert restart["reason"].endswith(OUT_OF_MEMORY)
