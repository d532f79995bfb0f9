"""A traceback on the screen: the script's frames stay, those of libraries are folded."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from mpiddp.failure.exception import format_exception
from mpiddp.failure.traceback import fold_traceback, is_colour_wanted, name_package
from tests import processes
from tests.messages import find
from tests.support import Mpi, check, mpiexec, single_node_environ

SCRIPT = """import functools
import torch

class Model(torch.nn.Module):
    def forward(self, batch):
        return self.inner(batch) if hasattr(self, "inner") else batch["label"]

def train(model):
    model(torch.ones(2))

model = Model()
model.inner = torch.nn.Sequential(Model())
train(model)
"""


def run(mpi: Mpi, folder: Path, *options: object) -> str:
    (folder / "train.py").write_text(SCRIPT)
    return check(mpiexec(mpi, 1, "--quiet", "--error-file", folder / "e.json", *options, folder / "train.py"), 1).stderr


def test_what_a_rank_that_fails_prints(quick: Mpi, tmp_path: Path) -> None:
    short, stack = run(quick, tmp_path), json.loads((tmp_path / "e.json").read_text())
    for line in ("train(model)", "model(torch.ones(2))", 'batch["label"]', "IndexError: "):
        assert line in short
    assert find("launch/folded_frames", short, packages="torch"), short
    assert "_call_impl" not in short
    assert "_call_impl" in stack["message"]["extraInfo"]["py_callstack"]
    full = run(quick, tmp_path, "--traceback", "full")
    assert "_call_impl" in full
    assert find("launch/folded_frames", full) == []


@pytest.mark.light
def test_colours_on_a_terminal_alone(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("[][7]\n")
    command = [str(quick.python), "-m", "mpiddp", "--quiet", str(tmp_path / "train.py")]
    environ = {**single_node_environ(quick), "TERM": "xterm"}
    for more, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        said = processes.run_on_terminal(command, {**environ, **more})
        assert b"IndexError" in said
        assert (b"\033[1;31m[rank0]: IndexError" in said) == coloured


def raised() -> str:
    """Return a traceback of a library's that goes through this file, with a cause and a group."""
    def call(text: str) -> object:
        return json.loads(text, parse_int=lambda _: call("{"))

    try:
        try:
            call("[7]")
        except ValueError as error:
            raise KeyError("seven") from error
    except KeyError as error:
        if sys.version_info >= (3, 11):
            try:
                raise ExceptionGroup("all", [error, ValueError("eight")])  # noqa: F821 - from Python 3.11 on
            except ExceptionGroup as group:  # noqa: F821
                return format_exception(group)
        return format_exception(error)


def test_causes_and_groups_are_kept() -> None:
    text = raised()
    short = fold_traceback(text, colour=False)
    assert len(short) < len(text)
    assert any(folded["packages"].startswith("json") for folded in find("launch/folded_frames", short))
    kept = [line for line in text.splitlines() if __file__ in line or re.search("Error|Group|Traceback", line)]
    assert [line for line in kept if line not in short.splitlines()] == []
    assert re.sub(r"\033\[[0-9;]*m", "", fold_traceback(text, colour=True)) == short


@pytest.mark.parametrize("text", [
    "", "ValueError: seven\n", "Traceback (most recent call last):\nValueError: seven\n",
    ('Traceback (most recent call last):\n  File "/a/site-packages/b.py", line 1, in c\n    d()\n'
     '  File "/a/site-packages/b.py", line 2, in d\n    raise E\nE\n'),
])
def test_what_has_nothing_to_fold_stays(text: str) -> None:
    assert fold_traceback(text, colour=False).strip("\n") == text.strip("\n")


def test_the_names_of_packages() -> None:
    assert name_package("/v/lib/python3.11/site-packages/torch/nn/modules/module.py") == "torch"
    assert name_package("/v/lib/python3.11/site-packages/six.py") == "six"
    assert name_package("/usr/lib/python3.11/json/__init__.py") == "json"
    assert name_package("/usr/lib/python3.11/queue.py") == "queue"
    assert name_package("<frozen runpy>") == "frozen runpy"
    assert not is_colour_wanted(sys.stdout, {"NO_COLOR": "1"})
