"""Scripts as people have them run unchanged: Accelerate's own tests, Lightning, sharded models, their checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.support import MPIS, PROGRAMS, ROOT, Done, Mpi, check, mpiexec, srun

SCRIPTS = "accelerate.test_utils.scripts."
TWO, SIX = "-N2 --ntasks-per-node=1", "-N3 --ntasks-per-node=2"
TIMEOUT_S = 150


@pytest.mark.thorough("test_readme_comparison.py runs a script with Accelerate")
@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_accelerates_own_scripts(quick: Mpi, name: str) -> None:
    check(mpiexec(quick, 2, "-m", SCRIPTS + name, env={"ACCELERATE_USE_CPU": "true"}, timeout=TIMEOUT_S))


@pytest.mark.thorough("test_readme_comparison.py runs a script with Accelerate")
@pytest.mark.parametrize(("name", "options"), [("test_script", TWO), ("test_sync", SIX), ("test_ops", SIX)])
def test_accelerates_own_scripts_on_several_nodes(cluster: Cluster, name: str, options: str) -> None:
    """The first fails with other than two processes, under torchrun too: it shares two rows out among all."""
    check(srun(cluster, MPIS["openmpi4"], options, "-m", SCRIPTS + name, env={"ACCELERATE_USE_CPU": "true"},
               timeout=TIMEOUT_S))


@pytest.mark.thorough("test_readme_comparison.py runs a script with Accelerate")
def test_accelerates_distributed_data_loop(quick: Mpi) -> None:
    check_data_loop(mpiexec(quick, 2, PROGRAMS / "data_loop.py", env={"ACCELERATE_USE_CPU": "true"}))


@pytest.mark.thorough("test_readme_comparison.py runs a script with Accelerate")
def test_accelerates_distributed_data_loop_on_two_nodes(cluster: Cluster) -> None:
    """It is for two processes."""
    check_data_loop(srun(cluster, MPIS["openmpi4"], TWO, PROGRAMS / "data_loop.py", env={"ACCELERATE_USE_CPU": "true"}))


def check_data_loop(done: Done) -> None:
    """Fail unless both ranks came through."""
    assert set(re.findall("^rank . is through$", check(done).stdout, re.MULTILINE)) == {
        "rank 0 is through", "rank 1 is through"}


LIGHTNING = pytest.mark.parametrize("program", ["lightning_trainer.py", "lightning_fabric.py"])


(REQUEUED,) = re.findall(r"```python\n(import os\n.*?)```", (ROOT / "batch/README.md").read_text(), re.DOTALL)
BEFORE, STEP = """\
import os, signal, torch, mpiddp
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
x = torch.linspace(-1, 1, 64).unsqueeze(1)
model = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8))
if accelerator.process_index == 1 and not os.path.exists("checkpoint"):
    os.kill(os.getpid(), signal.SIGUSR1)
""", """\
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
print("to the end\\n", end="")
"""


@pytest.mark.thorough("test_readme_comparison.py runs a script with Accelerate")
def test_the_documents_accelerate_script_stops_and_continues(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(BEFORE + REQUEUED + STEP)
    check(mpiexec(quick, 2, script, cwd=tmp_path, timeout=TIMEOUT_S), 75)
    assert list((tmp_path / "checkpoint").iterdir())
    assert check(mpiexec(quick, 2, script, cwd=tmp_path, timeout=TIMEOUT_S)).stdout.count("to the end") == 2


@pytest.mark.thorough("no test of Lightning")
@LIGHTNING
def test_lightning(quick: Mpi, program: str) -> None:
    check_weights(mpiexec(quick, 2, PROGRAMS / program), 2)


@pytest.mark.thorough("no test of Lightning")
@pytest.mark.parametrize("program", ["lightning_trainer.py", "lightning_fabric.py"])
def test_lightning_on_three_nodes(cluster: Cluster, program: str) -> None:
    check_weights(srun(cluster, MPIS["openmpi4"], SIX, PROGRAMS / program), 6)


def check_weights(done: Done, ranks: int) -> None:
    """Fail unless each rank came to the weight that was to be learned."""
    lines = re.findall(rf"^rank \d/{ranks}: (\d\.\d\d), 1 version$", check(done).stdout, re.MULTILINE)
    assert len(lines) == ranks, done.stdout + done.stderr
    assert all(abs(float(weight) - 3) < 0.1 for weight in lines)


def test_a_sharded_model_and_its_checkpoint(quick: Mpi, tmp_path: Path) -> None:
    done = check(mpiexec(quick, 2, PROGRAMS / "sharded.py", tmp_path / "checkpoint"))
    assert len(re.findall(r"^rank \d/2 in mesh \(1, 2\): same$", done.stdout, re.MULTILINE)) == 2, done.stdout


@pytest.mark.thorough("the same on one node")
def test_a_sharded_model_and_its_checkpoint_on_three_nodes(cluster: Cluster) -> None:
    folder = RUN / "checkpoint"  # goes with the cluster
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", PROGRAMS / "sharded.py", folder))
    assert len(re.findall(r"^rank \d/6 in mesh \(2, 3\): same$", done.stdout, re.MULTILINE)) == 6, done.stdout
