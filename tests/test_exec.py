"""A script that puts itself in its own place by os.execv(), as some do to set PYTHONHASHSEED."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpiddp.runner.exec import fits, hook_exec, is_program
from tests.messages import find, message
from tests.support import MPICH_FIRST, Mpi, check, first_of, free_port, mpiexec

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


@pytest.mark.parametrize(("content", "is_one"), [
    (b"#!/bin/sh\n", True), (b"#! /usr/bin/env sh -x", True), (b"#!/nowhere/sh\n", False), (b"#!\n", False),
    (b"no program\n", False), (b"", False), (b"\x7fELF", True)])
def test_what_is_program(content: bytes, is_one: bool, tmp_path: Path) -> None:
    (path := tmp_path / "program").write_bytes(content)
    assert not is_program(path)
    path.chmod(0o755)
    assert is_program(path) == is_program(os.fsencode(path)) == is_one
    (script := tmp_path / "script").write_text(f"#!{path}\n")
    script.chmod(0o755)
    assert is_program(script) == is_one
    with path.open() as file:
        assert is_program(file.fileno()) == is_one


def test_what_is_no_program(tmp_path: Path) -> None:
    (itself := tmp_path / "itself").write_text(f"#!{tmp_path}/itself\n")
    itself.chmod(0o755)
    assert not is_program(itself)
    assert not is_program(tmp_path)
    assert not is_program(tmp_path / "missing")


@pytest.mark.parametrize(("argv", "env", "does"), [
    (["a"], {}, True), (["a" * 2**17], {}, False), (["a"], {"b": "c" * 2**17}, False),
    (["a" * 2**16] * 200, {}, False), ([b"a", Path("b")], {b"c": "d"}, True)])
def test_what_fits(argv: list[str], env: dict[str, str], does: bool) -> None:
    assert fits(argv, env) == does


def test_descriptors_are_taken_as_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("execv", "execve"):
        monkeypatch.setattr(os, call, getattr(os, call))
    monkeypatch.setattr(os, "supports_fd", set(os.supports_fd))
    hook_exec(bool)
    assert os.execve in os.supports_fd
    assert os.execv not in os.supports_fd


FAILS = """
import os, sys, torch, torch.distributed as dist
os.environ["LONG"] = "x" * (1 << 17) if sys.argv[2] == "long" else ""
try:
    os.execv(sys.argv[1], [sys.argv[1]])
except OSError as error:
    print(error.strerror)
total = torch.ones(1)
dist.all_reduce(total)
print(int(total))
"""


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "words"), first_of([
    ("format", "Exec format error"), ("long", "Argument list too long"), ("interpreter", "No such file or directory")]))
def test_a_call_that_fails_has_changed_nothing(quick: Mpi, kind: str, words: str, tmp_path: Path) -> None:
    contents = {"format": "no program\n", "long": "#!/bin/sh\n", "interpreter": "#!/nowhere/sh\n"}
    (path := tmp_path / "program").write_text(contents[kind])
    path.chmod(0o755)
    done = check(mpiexec(quick, 2, "-c", FAILS, path, kind))
    assert sorted(done.stdout.split("\n")) == ["", "2", "2", words, words]
    assert find("launch/exec_replaces_script", done.stderr) == []
