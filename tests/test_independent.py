"""Ranks that each do the whole work say so while they train; frameworks on the CPU train together."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mpiddp.base.config import Script
from mpiddp.discovery.script import has_rank_words
from mpiddp.planning.environment import accelerate_env
from tests import processes
from tests.messages import message
from tests.support import DEADLINE_S, ROOT, Mpi, check, mpiexec, mpiexec_command, need, single_node_environ

PLAIN = """\
import time, torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""
LIGHTNING = """\
import lightning, torch
class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, _):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(100, 1))
lightning.Trainer(max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
    Line(), torch.utils.data.DataLoader(data))
"""
# The bar's line has no end, and the number of ranks does not tell a rank which one it is.
BAR = PLAIN.replace("while True:", """import os, sys
print(os.environ["LOCAL_WORLD_SIZE"])
while True:
    sys.stderr.write("\\r 50% of the epoch")
    sys.stderr.flush()""")
ACCELERATE = PLAIN.replace(
    "while", "import accelerate\nmodel = accelerate.Accelerator().prepare(model)\nrank = 'a word'\nwhile")


@pytest.mark.parametrize(("code", "env", "advice"), [
    (PLAIN, {}, ""), (BAR, {}, ""),
    pytest.param(LIGHTNING, {}, message("launch/lightning_advice"), marks=pytest.mark.thorough),
    pytest.param(ACCELERATE, {"ACCELERATE_USE_CPU": "false"}, message("launch/accelerate_advice"),
                 marks=pytest.mark.thorough),
], ids=["plain", "bar", "lightning", "accelerate"])
def test_ranks_that_train_alone_are_told_while_they_do(
    quick: Mpi, tmp_path: Path, code: str, env: dict[str, str], advice: str
) -> None:
    """The script comes to no end."""
    need(quick.missing())
    (script := tmp_path / "train.py").write_text(code)
    command = mpiexec_command(quick, 2, "-m", "mpiddp", script)
    with processes.start(command, {**single_node_environ(quick), **env}, ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT) as job:
        assert job.stdout
        lines: list[str] = []
        try:
            with processes.ended_after(DEADLINE_S, job.pid):
                while not lines or "independent-ranks" not in lines[-1]:
                    lines.append(job.stdout.readline())
                    assert lines[-1], lines
        finally:
            processes.end_tree(job.pid)
    assert lines[-1] == message("launch/independent_ranks", ranks=2, advice=advice) + "\n"


# As Lightning's module, with a training of three steps.
SHORT = PLAIN.replace("while True", "import sys\nsys.modules['lightning'] = sys\nfor _ in range(3)")


@pytest.mark.thorough("test_ranks_that_train_alone_are_told_while_they_do")
@pytest.mark.parametrize("code", [
    SHORT, pytest.param(LIGHTNING.replace("max_epochs=-1", "max_epochs=1"), marks=pytest.mark.thorough)],
    ids=["short", "lightning"])
def test_ranks_that_have_trained_alone_for_a_moment_are_told_at_the_end(quick: Mpi, tmp_path: Path, code: str) -> None:
    """A library that uses the group has used it by the second step."""
    (script := tmp_path / "train.py").write_text(code)
    done = check(mpiexec(quick, 2, script))
    words = message("launch/independent_ranks_ran", ranks=2, advice=message("launch/lightning_advice"))
    assert done.stderr.splitlines().count(words) == 1, done.stderr


@pytest.mark.parametrize(("code", "at_end", "in_training"), [
    ("import torch", False, False), ("import lightning", True, False), ("import accelerate", True, False),
    ("import transformers", True, False), ("print(os.environ['RANK'])", True, True), ("import deepspeed", True, True),
    ("import torch.distributed as dist", True, True),
    ("print(os.environ['LOCAL_WORLD_SIZE'])", False, False), ("print(trainer.global_rank)", False, False),
    ("lora(model, rank=4)", False, False), ("lora_rank = args.lora_rank", False, False),
    ("rank = int(os.environ[name])", True, True), ("rank == 0 and save()", True, True),
])
def test_what_a_script_may_know(
    monkeypatch: pytest.MonkeyPatch, code: str, at_end: bool, in_training: bool
) -> None:
    """A library that would have used the group by its first step, and did not, knows of no other rank."""
    monkeypatch.setattr("mpiddp.discovery.script.list_user_modules", list)  # those of the tests
    script = Script(code, is_code=True)
    assert [has_rank_words(script, has_trained) for has_trained in (False, True)] == [at_end, in_training]


def test_accelerate_is_told_of_several_ranks_on_the_cpu_alone() -> None:
    assert accelerate_env("cpu", 2) == {"ACCELERATE_USE_CPU": "true"}
    assert accelerate_env("cpu", 1) == accelerate_env("cuda:0", 2) == {}
