"""Run and end processes with deadlines: whatever a test starts is gone when the call returns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import secrets
import select
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

GRACE_S = 5
PATIENCE = 3  # times as long as on an idle machine: a test does not fail because the machine is busy
TERMINAL_S = 60  # for a command on a terminal
LEAVING_S = 10  # after a job's end, for its last processes; on an idle machine two are enough
MARK = "TESTS_JOB"  # a variable that all processes of a job inherit


def run(*command: str, timeout: float, env: Mapping[str, str] | None = None,
        cwd: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit status and output; raise TimeoutExpired at the deadline.

    The process and all its descendants are ended then; the error carries what they had printed. `timeout` is for an
    idle machine: the deadline is three times as long.
    """
    with start(command, env, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE * timeout)
        except BaseException as error:
            end_tree(process.pid)
            out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                error.stdout, error.stderr = out, err  # type: ignore[assignment]
                error.add_note(f"stdout: {out[-4000:]}\nstderr: {err[-4000:]}")
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_on_terminal(command: Sequence[str], env: Mapping[str, str]) -> bytes:
    """Run a command whose stdout and stderr are a terminal, until it has closed that, and return what it wrote."""
    ours, its = pty.openpty()
    process = start(command, env, stdout=its, stderr=its)
    os.close(its)
    said = b""
    end = threading.Timer(TERMINAL_S, end_tree, [process.pid])
    end.start()
    try:
        with contextlib.suppress(OSError):  # as Linux tells that the terminal's other side is closed
            while chunk := os.read(ours, 65536):
                said += chunk
    finally:
        end.cancel()
        os.close(ours)
        end_tree(process.pid)
        process.wait(20)
    return said


class Terminal:
    """A command whose controlling terminal is ours to type at."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._ours, its = pty.openpty()
        self._process = start(command, env, stdin=its, stdout=its, stderr=its, preexec_fn=take_terminal)
        os.close(its)
        self.text = self._unread = ""  # all that was read, and what wait_for() has not read

    def close(self) -> None:
        """End the command, if it has not ended."""
        end_tree(self._process.pid)
        self._process.wait(20)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def type(self, text: str) -> None:
        """Type some text."""
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, typing: str = "") -> None:
        """Read up to a text; meanwhile, type something once a second."""
        began_s = next_s = time.monotonic()
        while text not in self._unread:
            if (now_s := time.monotonic()) > began_s + TERMINAL_S:
                raise TimeoutError(f"{text!r} is not in {self._unread!r}")
            if typing and now_s >= next_s:
                self.type(typing)
                next_s = now_s + 1.0
            if select.select([self._ours], [], [], 0.2)[0]:
                chunk = os.read(self._ours, 65536).decode()
                self.text += chunk
                self._unread += chunk
        self._unread = self._unread.partition(text)[2]

    def wait(self) -> int:
        """Return the command's exit status."""
        return self._process.wait(TERMINAL_S)


def take_terminal() -> None:
    """Make stdin's terminal this session's, so that Ctrl-C is for it."""
    default_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def start(command: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None = None,
          **options: Any) -> subprocess.Popen[str]:
    """Start a command in a session of its own, without input and with the signals' defaults."""
    return subprocess.Popen(command, env=env, cwd=cwd, text=True, start_new_session=True,
                            **{"stdin": subprocess.DEVNULL, "preexec_fn": default_signals, **options})


def default_signals() -> None:
    """Let signals do what they do by default: under nohup, or behind `&` in a script, some are ignored by inheritance.

    A child runs it between fork and exec.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def marked(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment by which the processes of one job can be found."""
    return {**env, MARK: secrets.token_hex(8)}


def leftovers(env: Mapping[str, str], staying: Collection[psutil.Process] = ()) -> list[str]:
    """Return the command lines of a job's processes that are there LEAVING_S after its end, and end them.

    Those that are `staying` are not meant.
    """
    deadline = time.monotonic() + LEAVING_S
    while True:
        found = {process: words for process, words in with_mark(env[MARK]).items() if process not in staying}
        if not found or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    lines = [" ".join(cmdline) for cmdline in found.values()]
    end_processes(found)
    return lines


def with_mark(mark: str) -> dict[psutil.Process, list[str]]:
    """Return the processes that run with a mark, each with its command line."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = process.cmdline()
    return found


@contextlib.contextmanager
def ended_after(seconds: float, pid: int) -> Iterator[None]:
    """End a process with its descendants if this block, which reads its output, takes longer."""
    timer = threading.Timer(seconds, end_tree, [pid])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_tree(pid: int) -> None:
    """End a process that we started, and all its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        end_processes([parent, *parent.children(recursive=True)])


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Ask processes to end, and kill those that have not after a grace."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
