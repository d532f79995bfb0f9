"""What an agent leaves to other processes: it waits for no file, no terminal and no command."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from mpiddp.agent.background import BackgroundTasks, NonblockingStderr

from mpiddp.base.stderr import write_line
from mpiddp.ipc.event_loop import EventLoop
from tests import processes
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    PROGRAMS,
    Mpi,
    first_of,
    mpiexec_command,
    need,
    single_node_environ,
)

ENDS = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    if sys.argv[1] == "raise":
        raise ValueError("seven")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize(("how", "status"), first_of([("kill", 137), ("raise", 1)]))
def test_a_job_ends_though_its_error_file_hangs(quick: Mpi, how: str, status: int, tmp_path: Path) -> None:
    """On FUSE whose server never answers, as on NFS without its server: nothing of the job stays."""
    need(["root"] if os.geteuid() else [])
    (folder := tmp_path / "hung").mkdir()
    (script := tmp_path / "ends.py").write_text(ENDS)
    job = mpiexec_command(quick, 2, "-m", "mpiddp", "--no-init", "--error-file", folder / "e.json", script, how)
    env = processes.marked(single_node_environ(quick))
    done = processes.run("unshare", "--mount", sys.executable, str(PROGRAMS / "hung.py"), str(folder), *job,
                         timeout=DEADLINE_S, env=env)
    assert done.returncode in (status, status - 128)
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
    if how == "kill":  # else MPICH's mpiexec is gone by then
        assert message("launch/error_file_timeout", file=f"{folder}/e.json") in done.stderr
    assert processes.leftovers(env) == []


def in_child(act: Callable[[], None]) -> None:
    """Run `act` in a process of its own, and fail unless it comes to its end in time, without an error."""
    child = os.fork()
    if not child:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    process, deadline = psutil.Process(child), time.monotonic() + DEADLINE_S
    try:
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.status() == psutil.STATUS_ZOMBIE, "it waits"
    finally:
        process.kill()
        assert os.waitpid(child, 0)[1] == 0


def say_through(descriptor: int, *texts: bytes) -> None:
    """Say texts as an agent does that has this descriptor for stderr."""
    stderr = NonblockingStderr()
    for text in texts:
        stderr.write(descriptor, text)


@pytest.mark.process
def test_a_stopped_terminal_is_not_waited_for() -> None:
    """Ctrl-S stops it; what was said is shown when Ctrl-Q lets it go on, in its order."""
    ours, terminal = os.openpty()
    try:
        termios.tcflow(terminal, termios.TCOOFF)
        in_child(partial(say_through, terminal, b"seven\n", b"eight\n"))
        os.set_blocking(ours, False)
        with pytest.raises(BlockingIOError):
            os.read(ours, 100)
        termios.tcflow(terminal, termios.TCOON)
        os.set_blocking(ours, True)
        said = b""
        while said.count(b"\n") < 2:
            said += os.read(ours, 100)
        assert said == b"seven\r\neight\r\n"
    finally:
        os.close(terminal)
        os.close(ours)


@pytest.mark.process
def test_a_pipe_that_is_full_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
        os.write(writing, b"." * (size - 1))
        os.set_blocking(writing, True)
        in_child(partial(say_through, writing, b"s" * 5000, b"eight\n"))
        assert os.get_blocking(writing)  # other processes share the open file
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"." * (size - 1) + b"s" * 5000 + b"eight\n"
    finally:
        for descriptor in (reading, writing):
            try:
                os.close(descriptor)
            except OSError:
                continue


@pytest.mark.process
def test_what_is_said_into_a_file_is_appended(tmp_path: Path) -> None:
    (path := tmp_path / "err").write_text("before\n")
    with path.open("ab") as file:
        in_child(partial(say_through, file.fileno(), b"seven\n", b"eight\n"))
    deadline = time.monotonic() + DEADLINE_S
    while path.read_text().count("\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.read_text() == "before\nseven\neight\n"


@pytest.mark.process
def test_where_no_process_can_be_started_it_is_said_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpiddp.ipc.helper_process.fork", no_process)
    (path := tmp_path / "err").touch()

    def say_all() -> None:
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), 2)
        NonblockingStderr().install()
        for text in ("seven", "eight"):
            write_line(text)

    in_child(say_all)
    first, *others = path.read_text().splitlines()
    assert len(find("launch/cannot_start_helper", first)) == 1
    assert others == ["seven", "eight"]


def no_process() -> int:
    """Fail as fork() does where a user has all the processes that he may have."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def fail_by(error: Exception) -> None:
    """Fail by what a loop's function has raised."""
    pytest.fail(f"{type(error).__name__}: {error}")


def fail_late() -> None:
    """Fail in a loop that has not ended."""
    pytest.fail("nothing came of the task")


@pytest.mark.process
def test_a_task_that_stands_still_is_late(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    loop = EventLoop(fail_by)
    tasks, said = BackgroundTasks(loop), []

    def end(text: str) -> None:
        said.append((text, tasks.is_busy))
        loop.stop()

    tasks.run(lambda: str(os.open(pipe, os.O_RDONLY)), end, late="late", timeout_s=0.2)
    assert tasks.is_busy
    assert tasks.may_print
    loop.set_timer("deadline", DEADLINE_S, fail_late)
    loop.run()
    assert said == [("late", False)]
    os.close(os.open(pipe, os.O_WRONLY))  # its reader is the task, which ends


@pytest.mark.process
def test_the_result_of_a_task(tmp_path: Path) -> None:
    loop = EventLoop(fail_by)
    tasks, said = BackgroundTasks(loop), []

    def end(text: str) -> None:
        said.append(text)
        loop.stop()

    tasks.run(lambda: "done", end, late="late", timeout_s=DEADLINE_S)
    loop.set_timer("deadline", DEADLINE_S, fail_late)
    loop.run()
    assert said == ["done"]
    tasks.write(str(tmp_path / "file"), "seven")
    loop.set_timer("look", 0, partial(look, loop, tasks))
    loop.stopped = False
    loop.run()
    assert (tmp_path / "file").read_text() == "seven"


def look(loop: EventLoop, tasks: BackgroundTasks) -> None:
    """Let the loop end when no task runs."""
    loop.stopped = not tasks.is_busy
    if tasks.is_busy:
        loop.set_timer("look", 0.01, partial(look, loop, tasks))
