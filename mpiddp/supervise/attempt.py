"""One attempt: the launcher's process, from its start to its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from ..base.config import RUNNING_SUFFIX, STEPS_SUFFIX
from ..base.files import write_file
from ..failure.root_cause import ReportKind
from ..systems.launchers import NO_LAUNCHER, Launcher
from ..systems.statuses import EXIT_REQUEUE, signal_status
from .decision import Attempt, find_device_fault

POLL_INTERVAL_S = 0.1  # also between two signals that are forwarded: a launcher may need several SIGINTs
REPORT_TIMEOUT_S = 2.0  # for the report of a failed job, after its launcher has ended
RUNNING_FILE_TIMEOUT_S = 30.0  # for a shared file system to show that a successful job has removed its file
EXTRA_GRACE_S = 3.0  # beyond --abort-grace, for a job to end by itself after its report
LOST_NODE_GRACE_S = 0.5  # instead, if a node does not answer: the launcher may wait for it forever
TERM_TIMEOUT_S = 2.0  # between SIGTERM and SIGKILL
TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHELLS = ("sh", "dash", "bash", "ksh", "zsh", "csh", "tcsh", "busybox")
# If the launcher exits with 0, but the job has not ended in order: Open MPI 5's mpirun after it has lost a node, or an
# older srun whose step never started.
UNKNOWN_STATUS = 1
# Executes a program that receives SIGTERM when its parent dies (PR_SET_PDEATHSIG, linux/prctl.h), or writes the error
# to a pipe. This replaces preexec_fn, which may hang on a lock that another thread held at the fork.
EXEC_CODE = """\
import ctypes, os, signal, sys
parent, failed, *words = sys.argv[1:]
os.set_inheritable(int(failed), False)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(parent):
    os._exit(1)
for number in signal.SIGPIPE, signal.SIGXFSZ:  # which Python ignores
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(words[0], words)
except OSError as error:
    os.write(int(failed), str(error.errno).encode())
"""


class AttemptProcess:
    """The process of a launcher, in its own session."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], report: str, launcher: Launcher,
                 abort_grace_s: float, is_ours: bool = False) -> None:
        """Start it; raise OSError if the program cannot be run. A failed job writes the file `report`.

        A job of ours removes the mark that it runs when it ends in order. If the command `is_ours`, it has to.
        """
        if is_ours:
            write_file(report + RUNNING_SUFFIX, "")
        self._report, self._launcher = report, launcher
        self._grace_s = abort_grace_s + EXTRA_GRACE_S
        self._ending: list[psutil.Process] = []  # children of a launcher script that received a termination signal
        self._began_s = time.monotonic()
        reading, failed = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", EXEC_CODE, str(os.getpid()), str(failed), *words]
        with open(reading, "rb") as reader:
            try:
                self._process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, start_new_session=True,
                                                 pass_fds=[failed])
            finally:
                os.close(failed)
            error = reader.read()  # empty if the program was executed
        if error:
            self._process.wait()
            raise OSError(int(error), os.strerror(int(error)))

    def _forward(self, number: int) -> None:
        """Send the launcher a signal, or if it is a script, the script's children: shells forward no signals."""
        children = list_script_children(self._process.pid)
        if number in TERMINATION_SIGNALS:
            self._ending += children
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        if not children:
            self._process.send_signal(number)

    def wait(
        self, nodes: tuple[str, ...], signals: deque[int], find_silent: Callable[[], tuple[str, ...]],
        cancel: Callable[[], None]
    ) -> Attempt:
        """Wait until the launcher has ended, or has nothing more to do; return how the attempt on `nodes` ended.

        `signals` are forwarded to the launcher, one at each poll. `find_silent` returns the nodes that do not answer;
        `cancel` ends what is left of the job.
        """
        report: dict[str, Any] = {}
        silent: tuple[str, ...] = ()
        deadline = float("inf")
        ended_s = None
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
            if signals:
                self._forward(signals.popleft())
            if self._ending and not any(process.is_running() for process in self._ending):
                deadline = min(deadline, time.monotonic() + TERM_TIMEOUT_S)  # a script may start something else
            if self._launcher is not NO_LAUNCHER and not report and (report := self._read()):
                ended_s = time.monotonic()
                silent = find_silent() if report.get("kind") != ReportKind.ERROR else ()
                deadline = ended_s + (LOST_NODE_GRACE_S if silent else self._grace_s)
        if self._process.poll() is None or self._process.returncode < 0:
            cancel()
        if self._process.poll() is None:
            self._end(LOST_NODE_GRACE_S if silent else TERM_TIMEOUT_S)
        ended_s = ended_s or time.monotonic()
        deadline = time.monotonic() + (REPORT_TIMEOUT_S if self._process.returncode else RUNNING_FILE_TIMEOUT_S)
        while not report and self._has_failed() and time.monotonic() < deadline:
            refresh_folder(os.path.dirname(self._report))
            if not (report := self._read()):
                time.sleep(POLL_INTERVAL_S)
        if self._process.returncode:
            self._end(TERM_TIMEOUT_S)
        status = self._process.returncode or (UNKNOWN_STATUS if report or self._has_failed() else 0)
        if status and report.get("kind") != ReportKind.ERROR and not silent:
            silent = find_silent()  # again: a node's programs end before its daemon
        attempt = make_attempt(nodes, ended_s - self._began_s, status, report)._replace(silent=silent)
        if status and not report and not self._process.returncode:
            attempt = attempt._replace(cause="the launcher exited with status 0, but the job never started or was cut "
                                       "off, or its nodes do not share the folder of --dir")
        return attempt._replace(steps=self._steps()) if status in (0, EXIT_REQUEUE) and not report else attempt

    def _steps(self) -> int | None:
        """Return the steps that a job made which ended in order, None if unknown."""
        refresh_folder(os.path.dirname(self._report))
        try:
            with open(self._report + STEPS_SUFFIX, encoding="utf-8") as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def _has_failed(self) -> bool:
        """Return whether the job failed; a launcher's status 0 does not prove success."""
        if self._process.returncode != 0:
            return True
        try:
            os.close(os.open(self._report + RUNNING_SUFFIX, os.O_RDONLY))  # opening makes NFS ask its server
        except OSError:
            return False
        return True

    def _end(self, grace_s: float) -> None:
        """End the launcher, and what it left in its process group, as a script may."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._process.poll() is None or self._process.returncode:
                    os.killpg(self._process.pid, number)
                    while time.monotonic() < deadline:
                        self._process.poll()
                        os.killpg(self._process.pid, 0)  # raises ProcessLookupError once none is left
                        time.sleep(POLL_INTERVAL_S / 10)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        """Return the job's report, empty if it is missing or incomplete."""
        try:
            with open(self._report, encoding="utf-8") as file:
                message = json.load(file)["message"]
            return {**message["extraInfo"], "message": message["message"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def make_attempt(nodes: tuple[str, ...], seconds: float, status: int, report: Mapping[str, Any]) -> Attempt:
    """Return an attempt from its launcher's status and its report."""
    status = status if status >= 0 else signal_status(-status)
    if not report:
        return Attempt(nodes, seconds, status)
    numbers = (report.get(name) for name in ("rank", "steps", "exitcode"))
    rank, steps, own = (value if isinstance(value, int) else None for value in numbers)
    cause = str(report.get("cause") or report["message"])
    plain = [line for line in str(report.get("py_callstack", "")).splitlines() if line[:1] != " "]  # no lines of code
    return Attempt(
        nodes, seconds, own or status, str(report.get("kind", "")), cause, str(report.get("where", "")), rank,
        str(report.get("host", "")), str(report.get("signal", "")), bool(report.get("outside")),
        find_device_fault("\n".join([cause, *plain])), steps=steps)


def list_script_children(pid: int) -> list[psutil.Process]:
    """Return a process's children if it is a shell: shells do not forward signals."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if os.path.basename(process.exe()) in SHELLS:
            return process.children()
    return []


def refresh_folder(folder: str) -> None:
    """Make NFS show what other hosts wrote to a folder: a change from this host invalidates its cache."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder or "."):
        pass
