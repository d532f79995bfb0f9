"""The training example learns on one rank and on many, and continues from its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.cluster import Cluster
from tests.support import EXAMPLES, MPIS, ROOT, Done, Mpi, alone, check, mpiexec, srun

TRAIN = EXAMPLES / "train_digits.py"


def accuracy(done: Done, ranks: int) -> float:
    """Return the held-out accuracy that a training printed, once."""
    found = re.findall(r"^held-out accuracy (\d\.\d+) with (\d+) ranks$", check(done).stdout, re.MULTILINE)
    assert [size for _, size in found] == [str(ranks)]
    return float(found[0][0])


@pytest.mark.thorough("the README's commands train")
@pytest.mark.parametrize("ranks", [1, 2])
def test_training_learns(quick: Mpi, ranks: int) -> None:
    assert accuracy(mpiexec(quick, ranks, TRAIN), ranks) >= 0.95


@pytest.mark.thorough("the README's commands train")
def test_training_learns_with_six_ranks_on_three_nodes(cluster: Cluster) -> None:
    assert accuracy(srun(cluster, MPIS["mpich"], "-N3 --ntasks-per-node=2", TRAIN), 6) >= 0.95


@pytest.mark.thorough("other examples train")
def test_progress_is_shown_by_one_rank(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, TRAIN, "--epochs", 1))
    assert done.stderr.count("0/1 [00:00<?, ?it/s]") == 1


@pytest.mark.thorough("another example goes on from its checkpoint")
def test_a_second_run_continues_from_the_checkpoint(quick: Mpi, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    check(mpiexec(quick, 2, TRAIN, "--epochs", 3, "--checkpoint", whole))
    assert "resumed" not in check(mpiexec(quick, 2, TRAIN, "--epochs", 1, "--checkpoint", parts)).stdout
    done = check(mpiexec(quick, 2, TRAIN, "--epochs", 3, "--checkpoint", parts))
    assert "resumed in epoch 1 after 0 steps\n" in done.stdout
    one, other = (torch.load(path, weights_only=True)["model"] for path in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.thorough("README's batch script trains")
def test_a_script_for_one_gpu_made_distributed(quick: Mpi, tmp_path: Path) -> None:
    """It learns the same, and rank 0 saves what the script for one GPU can load."""
    check(alone(quick, EXAMPLES / "single_gpu.py", cwd=tmp_path))
    one = torch.load(tmp_path / "model.pt", weights_only=True)
    check(mpiexec(quick, 2, EXAMPLES / "distributed.py", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))
    other = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(one) == list(other) == ["weight", "bias"]
    assert all(abs(weight - 1) < 0.3 for weights in (one, other) for weight in weights["weight"].flatten())


@pytest.mark.thorough("another program is stopped and queued again by Slurm")
def test_the_example_that_stops_goes_on_to_the_same_weights(quick: Mpi, tmp_path: Path) -> None:
    """It is sent a signal before its first step; its last step is done once."""
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    options = ("--stop-before", 60, EXAMPLES / "resume.py")
    assert "goes on" not in check(mpiexec(quick, 2, *options, whole)).stdout
    (script := tmp_path / "signalled.py").write_text(
        "import os, runpy, signal, sys\nos.kill(os.getpid(), signal.SIGUSR1)\ndel sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    signalled = (*options[:2], script, options[2], parts)
    assert "goes on" not in check(mpiexec(quick, 2, *signalled), 75).stdout
    stopped = torch.load(parts, weights_only=True)
    assert (stopped["epoch"], stopped["step"]) < (9, 31)
    words = f"goes on in epoch {stopped['epoch']} at step {stopped['step']}\n"
    assert check(mpiexec(quick, 2, *options, parts)).stdout.count(words) == 2
    one, other = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert (one["epoch"], other["epoch"]) == (10, 10)
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def test_every_example_is_told_of() -> None:
    told = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f"`{path.name}`" not in told] == []
