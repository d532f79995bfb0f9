"""Scripts as people have them run unchanged: Accelerate's own tests, Lightning, sharded models, their checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.support import MPIS, PROGRAMS, Mpi, check, mpiexec, srun

ACCELERATE = ("test_script", "test_sync", "test_ops", "test_distributed_data_loop")
TIMEOUT_S = 150


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerates_own_scripts(quick: Mpi, name: str) -> None:
    check(mpiexec(quick, 2, "-m", f"accelerate.test_utils.scripts.{name}", env={"ACCELERATE_USE_CPU": "true"},
                  timeout=TIMEOUT_S))


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerates_own_scripts_on_three_nodes(cluster: Cluster, name: str) -> None:
    check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", "-m", f"accelerate.test_utils.scripts.{name}",
               env={"ACCELERATE_USE_CPU": "true"}, timeout=TIMEOUT_S))


@pytest.mark.parametrize("program", ["lightning_trainer.py", "lightning_fabric.py"])
def test_lightning(quick: Mpi, cluster: Cluster, program: str) -> None:
    for ranks, done in ((2, mpiexec(quick, 2, PROGRAMS / program)),
                        (6, srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", PROGRAMS / program))):
        lines = re.findall(rf"^rank \d/{ranks}: (\d\.\d\d), 1 version$", check(done).stdout, re.MULTILINE)
        assert len(lines) == ranks, done.stdout + done.stderr
        assert all(abs(float(weight) - 3) < 0.1 for weight in lines)


def test_a_sharded_model_and_its_checkpoint(quick: Mpi, tmp_path: Path) -> None:
    done = check(mpiexec(quick, 4, PROGRAMS / "sharded.py", tmp_path / "checkpoint"))
    assert len(re.findall(r"^rank \d/4 in mesh \(2, 2\): same$", done.stdout, re.MULTILINE)) == 4, done.stdout


def test_a_sharded_model_and_its_checkpoint_on_three_nodes(cluster: Cluster) -> None:
    folder = RUN / "checkpoint"  # goes with the cluster
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", PROGRAMS / "sharded.py", folder))
    assert len(re.findall(r"^rank \d/6 in mesh \(2, 3\): same$", done.stdout, re.MULTILINE)) == 6, done.stdout
