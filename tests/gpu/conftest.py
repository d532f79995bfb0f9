"""The table of what was seen, and the fixtures of tests that need GPUs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.support import Done, scratch

ROWS: list[tuple[str, str]] = []
MOST = 8  # GPUs that are used
TIMEOUT_S = 120


@functools.cache
def found() -> list[tuple[str, str]]:
    """Return the UUID and the name of each GPU that torch sees here, without starting CUDA in this process."""
    import torch

    look = ("import torch\nfor at in range(torch.cuda.device_count()):\n"
            "    told = torch.cuda.get_device_properties(at)\n    print(told.uuid, told.name, sep='\\t')")
    if not torch.backends.cuda.is_built():
        return []
    done = processes.run(sys.executable, "-c", look, timeout=TIMEOUT_S)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [(uuid, name) for uuid, _, name in (line.partition("\t") for line in lines)]


def gpus() -> list[str]:
    """Return the names of the GPUs that torch sees here."""
    return [name for _, name in found()]


def visible(number: int) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls the first GPUs that torch sees here: only these are used."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:number] if given else [str(at) for at in range(number)]


@pytest.fixture
def ranks() -> int:
    """Return the number of GPUs; skip where there is none."""
    if not gpus():
        import torch

        pytest.skip(f"no GPU: torch {torch.__version__} sees none")
    return min(len(gpus()), MOST)


@pytest.fixture
def several(ranks: int) -> int:
    """Return the number of GPUs; skip where there is only one."""
    if ranks < 2:
        pytest.skip("needs two GPUs, and there is one")
    return ranks


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """Return the environment of a job; fail if it leaves processes behind."""
    names = ("SLURM_", "PMI", "OMPI_", "MPIDDP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    found = processes.marked({**kept, "TMPDIR": scratch()})
    yield found
    assert processes.leftovers(found) == []


def command(ranks: int, *arguments: object) -> list[str]:
    """Return the command that starts mpiddp with so many ranks."""
    mpiexec = Path(sys.prefix) / "bin/mpiexec"
    return [str(mpiexec), "-n", str(ranks), sys.executable, "-m", "mpiddp", *map(str, arguments)]


Start = Callable[..., Done]


@pytest.fixture
def start(env: dict[str, str]) -> Start:
    """Return a function that runs a job of so many ranks with mpiddp to its end."""
    def run(ranks: int, *arguments: object, **variables: str) -> Done:
        return processes.run(*command(ranks, *arguments), timeout=TIMEOUT_S, env={**env, **variables})

    return run


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that puts what a test saw into the table; its docstring's first line is the row's name."""
    what = str(request.function.__doc__).splitlines()[0].rstrip(".")

    def put(seen: str) -> None:
        ROWS.append((what, seen))

    return put


def pytest_sessionfinish() -> None:
    """Print the table, and write it to the file that GPU_TABLE names."""
    if not ROWS:
        return
    import torch

    kinds = ", ".join(f"{gpus().count(name)} x {name}" for name in dict.fromkeys(gpus()))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    lines = [f"{kinds}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}", "", "| what | seen |",
             "| --- | --- |", *(f"| {what} | {seen} |" for what, seen in ROWS)]
    print("", *lines, sep="\n")
    if os.environ.get("GPU_TABLE"):
        Path(os.environ["GPU_TABLE"]).write_text("\n".join(lines) + "\n")
