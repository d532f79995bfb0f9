"""Find and end the processes that a rank started."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

import psutil


def children(pid: int) -> set[psutil.Process]:
    """Return the descendants of a process, none if it is gone."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()


def marked(*marks: str) -> set[psutil.Process]:
    """Return this user's processes that were started with all of these NAME=VALUE in their environment."""
    wanted = {mark.encode() for mark in marks}
    found = set()
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted <= set(file.read().split(b"\0")):
                    found.add(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue
    return found


def end(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Ask processes and their descendants to end, and kill those that are still there after the grace."""
    alive = set(processes)
    for process in list(alive):
        alive |= children(process.pid) if process.is_running() else set()
    alive = {one for one in alive if one.pid != os.getpid()}
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.send_signal(18)  # SIGCONT, for one that is stopped
    deadline = time.monotonic() + grace_s
    while (alive := {one for one in alive if lives(one)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def lives(process: psutil.Process) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
