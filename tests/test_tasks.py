"""What an agent leaves to threads: it waits for no file and no command."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from mpiddp.agent.tasks import Tasks
from mpiddp.ipc.event_loop import EventLoop
from tests import processes
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
    assert done.returncode == status
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
    assert processes.leftovers(env) == []


def fail_by(error: Exception) -> None:
    """Fail by what a loop's function has raised."""
    pytest.fail(f"{type(error).__name__}: {error}")


def fail_late() -> None:
    """Fail in a loop that has not ended."""
    pytest.fail("nothing came of the task")


def run(loop: EventLoop) -> None:
    """Run a loop until it is stopped."""
    loop.stopped = False
    loop.set_timer("deadline", DEADLINE_S, fail_late)
    loop.run()


def stop_with(loop: EventLoop, said: list[str], text: str) -> None:
    """Note what a task has returned, and stop the loop."""
    said.append(text)
    loop.stop()


def test_the_result_of_a_task() -> None:
    loop = EventLoop(fail_by)
    said: list[str] = []
    Tasks(loop).run(lambda: "done", lambda text: stop_with(loop, said, text), late="late", timeout_s=DEADLINE_S)
    run(loop)
    assert said == ["done"]


def test_a_task_that_hangs_is_late(tmp_path: Path) -> None:
    """And the agent ends without it."""
    os.mkfifo(pipe := tmp_path / "pipe")
    loop = EventLoop(fail_by)
    said: list[str] = []
    tasks = Tasks(loop)
    tasks.run(lambda: str(os.open(pipe, os.O_RDONLY)), lambda text: stop_with(loop, said, text), late="late",
              timeout_s=0.2)
    run(loop)
    assert said == ["late"]
    before = time.monotonic()
    tasks.finish(DEADLINE_S)
    assert time.monotonic() - before < DEADLINE_S
    os.close(os.open(pipe, os.O_WRONLY))  # its reader is the task, which ends


def test_an_agent_that_ends_waits_for_what_is_required(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    tasks = Tasks(EventLoop(fail_by))
    tasks.write(str(path := tmp_path / "file"), "seven")
    tasks.run(lambda: str(os.open(pipe, os.O_RDONLY)), is_required=False)
    tasks.finish(DEADLINE_S)
    assert path.read_text() == "seven"
    tasks.run(lambda: str(os.open(pipe, os.O_RDONLY)))
    tasks.finish(0.1)
    os.close(os.open(pipe, os.O_WRONLY))


def test_a_task_for_which_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    said: list[str] = []
    Tasks(EventLoop(fail_by)).run(lambda: "done", said.append, late="late")
    assert said == ["late"]


def test_a_task_that_raises_has_no_result() -> None:
    loop = EventLoop(fail_by)
    tasks = Tasks(loop)
    tasks.run(lambda: str(1 // 0), lambda _: pytest.fail("it has a result"))
    tasks.finish(DEADLINE_S)
    loop.set_timer("end", 0, loop.stop)
    run(loop)


def test_results_that_the_end_has_taken_are_not_waited_for_again() -> None:
    """Where one call of epoll returns two events, the first may end the agent."""
    loop, ended = EventLoop(fail_by), threading.Event()
    tasks = Tasks(loop)
    tasks.run(lambda: None)
    tasks.finish(60)

    def take() -> None:
        tasks._take_results()
        ended.set()

    threading.Thread(target=take, daemon=True).start()
    assert ended.wait(60)
