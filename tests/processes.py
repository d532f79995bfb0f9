"""Run and end processes with deadlines: whatever a test starts is gone when the call returns."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

GRACE_S = 5


def run(*command: str, timeout: float, env: Mapping[str, str] | None = None,
        cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit status and output; raise TimeoutExpired at the deadline.

    The process and all its descendants are ended then; the error carries what they had printed.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=env, cwd=cwd, start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            end_tree(process.pid)
            out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                error.stdout, error.stderr = out, err  # type: ignore[assignment]
                error.add_note(f"stdout: {out[-4000:]}\nstderr: {err[-4000:]}")
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


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
