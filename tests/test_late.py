"""Variables that a script sets when torch has read them already."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.base.config import Script
from mpiddp.runner.late_variables import find_late_variables
from tests.messages import find, message
from tests.support import MPICH_FIRST, Mpi, check, mpiexec

SETS = """\
import os
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ.setdefault("OMP_NUM_THREADS", "3")
os.environ["NCCL_DEBUG"] = os.environ["MY_OWN"] = "INFO"
import torch
import torch.distributed as dist
print(dist.get_debug_level().name, flush=True)
"""
THREADS = 'import os\nos.environ["OMP_NUM_THREADS"] = "3"\nimport torch\n'


def names(source: str, device: str = "cpu", backend: str = "gloo", **environ: str) -> list[str]:
    """Return the variables that a warning names, with their lines."""
    return warned_of(find_late_variables(Script(source, is_code=True), environ, device, backend))


def warned_of(lines: list[str]) -> list[str]:
    """Return the variables that a warning names, with their lines."""
    return [name for line in lines
            for fields in find("launch/late_variable", f"mpiddp: warning: {line}") for name in
            fields["variables"].split(", ")]


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_variable_that_comes_too_late_is_named_once(mpi: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(SETS)
    done = check(mpiexec(mpi, 2, script))
    assert done.stdout == "OFF\nOFF\n"
    assert [line for line in done.stderr.splitlines() if "late-variable" in line] == [message(
        "launch/late_variable", variables="TORCH_DISTRIBUTED_DEBUG (line 2)",
        reason="torch was imported and initialised")]
    done = check(mpiexec(mpi, 1, script, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}))
    assert done.stdout == "DETAIL\n"
    assert "late-variable" not in done.stderr


@pytest.mark.parametrize(("source", "found"), [
    (THREADS, ["OMP_NUM_THREADS (line 2)"]),
    ("import os, torch\n" + THREADS, []),  # as late under plain Python
    ("from os import environ\nenviron['TORCH_LOGS'] = level()", ["TORCH_LOGS (line 2)"]),
    ("import os\nos.environ.update({'TORCH_LOGS': 'dynamo', **more}, OMP_PROC_BIND='true')",
     ["TORCH_LOGS (line 2)", "OMP_PROC_BIND (line 2)"]),
    ("import os\nos.environ |= {'TORCH_TRACE': '/tmp'}", ["TORCH_TRACE (line 2)"]),
    ("import os\nos.putenv('TORCH_LOGS', 'dynamo')", ["TORCH_LOGS (line 2)"]),
    ("import os\nif __name__ == '__main__':\n    os.environ['TORCH_LOGS'] = 'dynamo'", ["TORCH_LOGS (line 3)"]),
    ("import os\nif 'TORCH_LOGS' not in os.environ:\n    os.environ['TORCH_LOGS'] = 'dynamo'", []),
    ("import os\ndef start():\n    os.environ['TORCH_LOGS'] = 'dynamo'", []),
    ("import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = os.environ['TOKENIZERS_PARALLELISM'] = '0'", []),
    ("import os\nos.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'", []),
    ("settings['OMP_NUM_THREADS'] = '3'", []), ("import os\nos.environ[", []),
])
def test_which_lines_set_in_vain(source: str, found: list[str]) -> None:
    assert names(source) == found


def test_code_that_is_too_deep_to_be_read() -> None:
    source = f'import os\nos.environ["OMP_NUM_THREADS"] = "3"\nif {" + ".join(["1"] * 1200)}: pass\n'
    compile(source, "script.py", "exec")
    assert names(source) in ([], ["OMP_NUM_THREADS (line 2)"])  # as deep as this Python's ast goes


def test_what_is_set_already_is_no_change() -> None:
    assert names(THREADS, OMP_NUM_THREADS="3") == []
    assert names(THREADS, OMP_NUM_THREADS="1") == ["OMP_NUM_THREADS (line 2)"]
    assert names("import os\nos.environ.setdefault('TORCH_LOGS', 'dynamo')", TORCH_LOGS="") == []
    assert names("import os\nos.environ.setdefault('TORCH_LOGS', 'dynamo')") == ["TORCH_LOGS (line 2)"]


def test_what_depends_on_the_device_and_the_group() -> None:
    of_cuda = "import os, torch\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'"
    assert names(of_cuda) == []
    assert names(of_cuda, "cuda", "nccl") == ["CUDA_VISIBLE_DEVICES (line 2)", "PYTORCH_CUDA_ALLOC_CONF (line 3)"]
    of_nccl = "import os, torch\nos.environ['NCCL_DEBUG'] = 'INFO'\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'"
    assert names(of_nccl, "cuda", "cpu:gloo,cuda:nccl") == ["NCCL_DEBUG (line 2)", "TORCH_NCCL_BLOCKING_WAIT (line 3)"]
    assert names(of_nccl, "cuda", "") == []  # --no-init
    (words,) = find_late_variables(Script(of_nccl, is_code=True), {}, "cuda", "nccl")
    assert words.endswith(message("launch/create_the_group_yourself"))
    assert names("import os\nos.environ['GLOO_SOCKET_IFNAME'] = 'lo'") == ["GLOO_SOCKET_IFNAME (line 2)"]
