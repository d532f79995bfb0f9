"""The training example learns on one rank and on many, and continues from its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cluster import Cluster
from tests.support import EXAMPLES, MPIS, Done, Mpi, check, mpiexec, srun

TRAIN = EXAMPLES / "train_digits.py"


def accuracy(done: Done, ranks: int) -> float:
    """Return the held-out accuracy that a training printed, once."""
    found = re.findall(r"^held-out accuracy (\d\.\d+) with (\d+) ranks$", check(done).stdout, re.MULTILINE)
    assert [size for _, size in found] == [str(ranks)]
    return float(found[0][0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_learns(quick: Mpi, ranks: int) -> None:
    assert accuracy(mpiexec(quick, ranks, TRAIN), ranks) >= 0.95


def test_training_learns_with_six_ranks_on_three_nodes(cluster: Cluster) -> None:
    """Under MPICH; the README's commands, which have their own test, do so under Open MPI."""
    assert accuracy(srun(cluster, MPIS["mpich"], "-N3 --ntasks-per-node=2", TRAIN), 6) >= 0.95


def test_progress_is_shown_by_one_rank(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, TRAIN, "--epochs", 1))
    assert done.stderr.count("0/1 [00:00<?, ?it/s]") == 1


def test_a_second_run_continues_from_the_checkpoint(quick: Mpi, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    check(mpiexec(quick, 2, TRAIN, "--epochs", 3, "--checkpoint", whole))
    assert "resumed" not in check(mpiexec(quick, 2, TRAIN, "--epochs", 1, "--checkpoint", parts)).stdout
    done = check(mpiexec(quick, 2, TRAIN, "--epochs", 3, "--checkpoint", parts))
    assert "resumed in epoch 1 after 0 steps\n" in done.stdout
    one, other = (torch.load(path, weights_only=True)["model"] for path in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_example_is_told_of() -> None:
    told = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f"`{path.name}`" not in told] == []
