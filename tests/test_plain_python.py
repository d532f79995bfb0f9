"""What a script finds in its process at a failure, an interruption and a refusal is what Python shows it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import processes
from tests.messages import find
from tests.support import DEADLINE_S, ROOT, Mpi, alone, check, mpiexec, mpiexec_command, single_node_environ

pytestmark = pytest.mark.light

LAST_ERROR = """
import atexit, os, sys, traceback
def show(who):
    place = traceback.extract_tb(sys.last_traceback)[-1]
    seen = sys.last_type, str(sys.last_value), sys.last_value.__traceback__ is sys.last_traceback, place.name
    os.write(1, f"{who} {seen}\\n".encode())
atexit.register(show, "atexit")
if "hook" in sys.argv:
    sys.excepthook = lambda *_: show("hook")
def fail():
    raise ValueError("seven")
fail()
"""
SEEN = "(<class 'ValueError'>, 'seven', True, 'fail')\n"
INTERRUPTED = """
import os, time
try:
    os.write(1, b"READY\\n")
    time.sleep(600)
finally:
    os.write(1, b"cleaned up\\n")
"""
WAKEUP_CLOSED = """
import os, signal, sys
reading, writing = os.pipe()
os.set_blocking(writing, False)
signal.set_wakeup_fd(writing)
os.close(writing)
if "fork" in sys.argv:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("hook", ["", "hook"])
def test_the_last_error_is_known_to_hooks_and_atexit_functions(quick: Mpi, hook: str) -> None:
    done = check(mpiexec(quick, 1, "-c", LAST_ERROR, hook), 1)
    assert done.stdout == (f"hook {SEEN}" if hook else "") + f"atexit {SEEN}"


def test_the_arguments_of_a_module_while_its_package_is_imported(quick: Mpi, tmp_path: Path) -> None:
    (package := tmp_path / "package").mkdir()
    (package / "__init__.py").write_text("import sys\nprint(sys.argv)\n")
    (package / "module.py").write_text("import sys\nprint(sys.argv)\n")
    plain = check(alone(quick, "-m", "package.module", "a", cwd=tmp_path))
    path = {"PYTHONPATH": f"{ROOT}:{single_node_environ(quick).get('PYTHONPATH', '')}"}
    ours = check(alone(quick, "-m", "mpiddp", "-m", "package.module", "a", cwd=tmp_path, env=path))
    assert ours.stdout == plain.stdout
    assert plain.stdout.startswith("['-m', 'a']\n")


def test_an_interruption_has_one_traceback(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(INTERRUPTED)
    command = mpiexec_command(quick, 2, "-m", "mpiddp", script)
    with (processes.start(command, single_node_environ(quick), ROOT, stdout=-1, stderr=-1) as job,
          processes.ended_after(DEADLINE_S, job.pid)):
        assert job.stdout is not None
        assert [job.stdout.readline(), job.stdout.readline()] == ["READY\n"] * 2
        time.sleep(0.1)
        os.kill(job.pid, signal.SIGINT)
        rest, errors = job.communicate()
    assert rest.count("cleaned up\n") == 2
    assert errors.count("Traceback (most recent call last)") == 1, errors
    assert f'File "{script}", line 5' in errors
    assert len(find("launch/outside_signal", errors, signal="SIGINT")) == 1


def test_the_place_of_a_syntax_error(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text("x = 1\ndef f(:\n")
    plain = check(alone(quick, script), 1).stderr.splitlines()
    ours = check(alone(quick, "-m", "mpiddp", script), 3).stderr.splitlines()
    code, caret = (line.strip() for line in plain[1:3])
    index = next(i for i, line in enumerate(ours) if line.strip() == code)
    assert ours[index + 1].index("^") - ours[index].index("d") == plain[2].index("^") - plain[1].index("d")
    assert ours[index + 1].strip() == caret == "^"


@pytest.mark.parametrize("options", [("-X", "dev"), ("-X", "warn_default_encoding")])
@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise ValueError('seven')", 1), ("def f(:", 3)])
def test_python_warns_of_nothing_of_ours(quick: Mpi, options: tuple[str, ...], code: str, status: int) -> None:
    """At its end it cannot say more of an object than `sys:1`."""
    lines = check(alone(quick, *options, "-m", "mpiddp", "-c", code), status).stderr.splitlines()
    assert [line for line in lines if line.startswith((f"{ROOT}/mpiddp", "sys:1")) and "Warning: " in line] == []


@pytest.mark.parametrize("fork", ["", "fork"])
def test_a_wakeup_descriptor_that_the_script_has_closed(quick: Mpi, fork: str) -> None:
    done = check(mpiexec(quick, 1, "-c", WAKEUP_CLOSED, fork))
    assert done.stdout == ("0\n" if fork else "")
