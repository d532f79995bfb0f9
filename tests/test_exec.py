"""A script that puts itself in its own place by os.execv(), as some do to set PYTHONHASHSEED."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpiddp.runner.exec import hook_exec, is_program
from tests.messages import find, message
from tests.support import MPICH_FIRST, Mpi, check, free_port, mpiexec

pytestmark = pytest.mark.light

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
if os.environ.get("PYTHONHASHSEED") != "7":
    os.environ["PYTHONHASHSEED"] = "7"
    if rank == 0 and "alone" in sys.argv:
        time.sleep(600)
    if "mpiddp" in sys.argv:
        os.execv(sys.executable, sys.orig_argv)
    try:
        os.execl("/nowhere/python", "python")
    except FileNotFoundError:
        os.execlp(sys.executable, sys.executable, *sys.argv)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"{rank} {int(total)}\\n".encode())
dist.destroy_process_group()
sys.exit(5 if rank == 1 else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that replaces itself."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.torch
@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_the_new_program_makes_its_group_and_gives_the_status(mpi: Mpi, script: Path) -> None:
    """It listens on the port of the job again, which nobody else gets meanwhile."""
    done = check(mpiexec(mpi, 2, "--port", free_port(), script), 5)
    assert sorted(done.stdout.splitlines()) == ["0 2", "1 2"]
    assert done.stderr.splitlines().count(message("launch/exec_replaces_script", call="os.execv")) == 1
    assert "mpiddp: failed" not in done.stderr


def test_a_rank_that_does_so_alone_does_not_wait_for_ever(quick: Mpi, script: Path) -> None:
    done = check(mpiexec(quick, 2, "--exit-timeout", "3", script, "alone"), 1)
    cause = message("launch/late_at_exec", ranks="rank 1", limit="3 s")
    assert len(find("launch/failed_rank", done.stderr, rank=0, cause=cause)) == 1, done.stderr


def test_a_rank_does_so_while_another_one_ends_in_order(quick: Mpi, tmp_path: Path) -> None:
    """MPICH's mpiexec leaves the program alone."""
    (script := tmp_path / "script.py").write_text(
        'import os\nif os.environ["RANK"] == "0": os.execve("/bin/sh", ["sh", "-c", "sleep 2; echo replaced; exit 3"], '
        'env=os.environ)\n')
    assert check(mpiexec(quick, 2, script), 3).stdout == "replaced\n"


@pytest.mark.thorough("test_the_new_program_makes_its_group_and_gives_the_status")
def test_mpiddp_itself_is_refused_as_the_new_program(quick: Mpi, script: Path) -> None:
    done = check(mpiexec(quick, 2, script, "mpiddp"), 3)
    assert done.stderr.count("mpiddp: cannot start: started-again\n") == 1


@pytest.mark.parametrize("arguments", [((),), ([""],), (["a\0"],), (["a"], {"b\0": ""}), (["a"], 1)])
def test_a_rank_does_not_leave_for_arguments_that_are_wrong(
    arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("execv", "execve"):
        monkeypatch.setattr(os, call, getattr(os, call))
    left: list[str] = []
    hook_exec(left.append)
    call = os.execv if len(arguments) == 1 else os.execve
    with pytest.raises((ValueError, TypeError)):
        call("/bin/true", *arguments)  # type: ignore[arg-type]
    assert left == []


def test_what_is_program(tmp_path: Path) -> None:
    assert is_program("/bin/sh")
    assert is_program(b"/bin/sh")
    assert is_program(3)
    assert not is_program(tmp_path)
    assert not is_program(tmp_path / "missing")
