"""One attempt: the launcher's process, from its start until it is gone, or has to be ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import DEFAULT_ABORT_GRACE_S, RUNNING
from ..plan.verdict import OWN
from .decision import Attempt

LOOKING_S = 0.1  # between two looks at the process and at the file
LATE_S = 2.0  # for what a job that has ended still writes
GRACE_S = DEFAULT_ABORT_GRACE_S + 3.0  # for a job that has reported to end by itself
LOST_S = 0.5  # for that of one whose node does not answer: the launcher waits for it, in vain
ENDING_S = 2.0  # between asking the launcher to end, and killing it
UNKNOWN = 1  # a status, where Open MPI 5's mpirun has lost a node and says 0
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG (linux/prctl.h)


class Running:
    """A job that runs. What Ctrl-C sends, and a batch system to the script's shell, `forward` hands on to it."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str], report: str, hides_failures: bool) -> None:
        """Start it; raise OSError where the program is not there. It writes its `report` if it fails.

        Of a launcher that `hides_failures` status 0 is no proof of success.
        """
        for left in (report, report + RUNNING):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        self._report, self._hides_failures = report, hides_failures
        self._began_s = time.monotonic()
        libc, parent = ctypes.CDLL(None), os.getpid()

        def become_child() -> None:
            libc.prctl(DIES_WITH_PARENT, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, start_new_session=True,
                                         preexec_fn=become_child)

    def forward(self, number: int) -> None:
        """Send the launcher a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def wait(self, nodes: tuple[str, ...], ask: Callable[[], tuple[str, ...]], cut: Callable[[], None]) -> Attempt:
        """Return how it ended, on `nodes`: as soon as its launcher is gone, or has nothing more to do.

        `ask` tells which nodes do not answer, and `cut` ends what the launcher leaves.
        """
        found: dict[str, Any] = {}
        silent: tuple[str, ...] = ()
        deadline = float("inf")
        ended_s = None
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOKING_S)
            if not found and (found := self._read()):
                ended_s = time.monotonic()
                silent = ask() if found.get("kind") != OWN else ()
                deadline = ended_s + (LOST_S if silent else GRACE_S)
        if self._process.poll() is None:
            cut()
        self._end(LOST_S if silent else ENDING_S)
        ended_s = ended_s or time.monotonic()
        late = time.monotonic() + LATE_S
        while not found and self._has_failed() and time.monotonic() < late:
            time.sleep(LOOKING_S)
            refresh(os.path.dirname(self._report))
            found = self._read()
        status = self._process.returncode or (UNKNOWN if found or self._has_failed() else 0)
        if status and found.get("kind") != OWN and not silent:
            silent = ask()  # also a second time: a node ends its programs before its daemon
        return attempt_of(nodes, ended_s - self._began_s, status, found)._replace(silent=silent)

    def _has_failed(self) -> bool:
        """Tell whether the job has not ended in order, whatever the launcher's status says."""
        if self._process.returncode != 0 or not self._hides_failures:
            return self._process.returncode != 0
        try:
            os.close(os.open(self._report + RUNNING, os.O_RDONLY))  # NFS asks its server when a file is opened
        except OSError:
            return False
        return True

    def _end(self, grace_s: float) -> None:
        """End the launcher, if it is still there."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self.forward(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        """Return what the job's report says, nothing if it is not written yet, or not whole."""
        try:
            with open(self._report) as file:
                message = json.load(file)["message"]
            return {**message["extraInfo"], "message": message["message"]}
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def attempt_of(nodes: tuple[str, ...], seconds: float, status: int, found: Mapping[str, Any]) -> Attempt:
    """Return how an attempt ended by its launcher's status, and by its report."""
    status = status if status >= 0 else 128 - status
    if not found:
        return Attempt(nodes, seconds, status)
    numbers = (found.get(name) for name in ("rank", "steps", "exitcode"))
    rank, steps, own = (one if isinstance(one, int) else None for one in numbers)
    return Attempt(
        nodes, seconds, own or status, str(found.get("kind", "")), str(found.get("cause") or found["message"]),
        str(found.get("where", "")), rank, str(found.get("host", "")), str(found.get("signal", "")),
        bool(found.get("outside")), steps=steps)


def refresh(folder: str) -> None:
    """Let a shared file system show what other hosts have written to a folder: NFS does once it is changed here."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder or "."):
        pass
