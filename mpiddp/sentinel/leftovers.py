"""What a rank leaves behind when it fails: the processes that it started, and the other ranks' Slurm step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..plan.member import Member

if TYPE_CHECKING:
    import psutil

MANY_CHILDREN = 1000
CLEANING_S = 0.7  # for processes to end when they are asked to
CANCELLING_S = 15.0  # for scancel to return


class Leftovers:
    """The processes that a rank started, as far as they were seen."""

    def __init__(self, rank: int) -> None:
        """Know of no process of the rank yet; `rank` is the number of its own process."""
        self._rank = rank
        self._seen: set[psutil.Process] = set()

    def note(self, child: int) -> None:
        """Note a process that the rank has forked: it bears no mark of the job, and soon perhaps no parent."""
        import psutil

        if len(self._seen) > MANY_CHILDREN:
            self._seen = {one for one in self._seen if one.is_running()}
        with contextlib.suppress(psutil.Error):
            self._seen.add(psutil.Process(child))

    def note_descendants(self) -> None:
        """Note the rank's descendants while it is there to be their parent."""
        self._seen |= children(self._rank)

    def end(self, member: Member | None) -> None:
        """End the processes that were seen, and those that bear the mark of a member of the job."""
        if member is not None:
            self._seen |= marked(f"TORCHELASTIC_RUN_ID={member.run_id}", f"RANK={member.rank}")
        end(self._seen, CLEANING_S)


def cancel(step: str | None) -> None:
    """Cancel a Slurm step, if there is one: without PMIx, srun does not end the other ranks when one is gone."""
    import subprocess

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=CANCELLING_S)


def children(pid: int) -> set[psutil.Process]:
    """Return the descendants of a process, none if it is gone."""
    import psutil

    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()


def marked(*marks: str) -> set[psutil.Process]:
    """Return this user's processes that were started with all of these NAME=VALUE in their environment."""
    import psutil

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
    import psutil

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
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
