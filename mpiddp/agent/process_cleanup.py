"""Cleans up after a failed rank: its processes, MPI's shared memory, the other ranks of its Slurm step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..base.ranks import RankIdentity
from ..systems.mpi_libraries import LIBRARIES

if TYPE_CHECKING:
    import psutil

FOLDER = "/dev/shm/"  # noqa: S108 (shm_open(3) has its files there)
SEMAPHORES = "sem.mp-"  # multiprocessing's
PREFIXES = tuple(FOLDER + name for name in (*(part for row in LIBRARIES for part in row.segments), SEMAPHORES))
MAX_GROUPS = 1000  # after which those of processes that have ended are forgotten
TERMINATION_TIMEOUT_S = 0.7  # between SIGTERM and SIGKILL
SCANCEL_TIMEOUT_S = 15.0


class Segment(NamedTuple):
    """A file in FOLDER; `device` is as /proc has it, in hexadecimal numbers."""

    path: str
    device: str
    inode: int


def mapped_segments(pid: int | str) -> set[Segment]:
    """Return the segments of MPI that a process maps; none if it is gone, or another user's (man 5 proc)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
        rows = [line.rstrip("\n").split(None, 5) for line in file if FOLDER in line]
        return {Segment(row[5], row[3], int(row[4])) for row in rows if row[5].startswith(PREFIXES)}
    return set()


def unmap_inherited() -> None:
    """Unmap the segments of MPI that this process has inherited from its parent."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        ranges = [line.split(None, 1)[0].split("-") for line in file if any(name in line for name in PREFIXES)]
    if ranges:
        import ctypes

        unmap = ctypes.CDLL(None).munmap
        for begin, end in ranges:
            unmap(ctypes.c_void_p(int(begin, 16)), ctypes.c_size_t(int(end, 16) - int(begin, 16)))


def remove_unmapped(segments: Collection[Segment]) -> None:
    """Remove the segments that no process maps; so the agent of the last process that did removes them."""
    unmapped = set(segments)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if not unmapped:
            return
        unmapped -= mapped_segments(pid)
    for segment in unmapped:
        with contextlib.suppress(OSError):
            status = os.stat(segment.path)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            if (device, status.st_ino) == segment[1:]:  # and not a later one of the same name
                os.unlink(segment.path)


class ProcessCleanup:
    """The processes that descend from a rank: children that it has reported, and what stays in their process groups.

    A rank's variables alone do not prove descent: processes that a batch system or a daemon starts for it have them,
    too. So a process that has left these groups, and whose parent has ended, is left alone.
    """

    def __init__(self, rank_pid: int) -> None:
        """Begin without descendants, while the process `rank_pid` lives."""
        self._rank_pid = self._rank_group = rank_pid
        with contextlib.suppress(ProcessLookupError):
            self._rank_group = os.getpgid(rank_pid)
        self._groups = {rank_pid, self._rank_group}  # process groups and sessions, by the number of their first process
        self._descendants: set[psutil.Process] = set()
        self._segments: set[Segment] = set()

    def record_child(self, child: int) -> None:
        """Record a process that the rank has started, before it may lose its parent, and the group that it may make."""
        import psutil

        if len(self._groups) > MAX_GROUPS:
            self._descendants = {process for process in self._descendants if process.is_running()}
            self._groups = {self._rank_pid, self._rank_group, *(process.pid for process in self._descendants)}
        self._groups.add(child)
        with contextlib.suppress(psutil.Error):
            self._descendants.add(psutil.Process(child))

    def record_descendants(self) -> None:
        """Record the rank's descendants, while it still lives as their parent."""
        descendants = descendants_of(self._rank_pid)
        self._descendants |= descendants
        self._groups |= {process.pid for process in descendants}
        self.record_segments()

    def record_segments(self) -> None:
        """Record the rank's shared memory of MPI."""
        self._segments |= mapped_segments(self._rank_pid)

    def run(self, member: RankIdentity | None) -> None:
        """End the recorded processes, and those of their groups that have the variables of `member`.

        Other ranks may be in the rank's own group. Then remove the shared memory that no process maps any more.
        """
        if member is not None:
            self._descendants |= processes_in_groups(
                self._groups, f"TORCHELASTIC_RUN_ID={member.run_id}", f"RANK={member.rank}")
        end_processes(self._descendants, TERMINATION_TIMEOUT_S)
        remove_unmapped(self._segments)


def cancel_slurm_step(step: str | None) -> None:
    """Cancel a Slurm step, if there is one: without PMIx, srun does not end the other ranks when one is gone."""
    import subprocess

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=SCANCEL_TIMEOUT_S)


def descendants_of(pid: int) -> set[psutil.Process]:
    """Return the descendants of a process, none if it is gone."""
    import psutil

    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return set()


def processes_in_groups(groups: Collection[int], *variables: str) -> set[psutil.Process]:
    """Return the processes of some process groups or sessions that were started with all of these NAME=VALUE."""
    import psutil

    wanted = {variable.encode() for variable in variables}
    processes = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) in groups or os.getsid(pid) in groups:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if wanted <= set(file.read().split(b"\0")):
                        processes.add(psutil.Process(pid))
    return processes


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """Send SIGTERM to processes and their descendants, and SIGKILL to those that are still there after the grace."""
    import psutil

    alive = set(processes)
    for process in list(alive):
        alive |= descendants_of(process.pid) if process.is_running() else set()
    alive = {process for process in alive if process.pid != os.getpid()}
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.send_signal(18)  # SIGCONT, for one that is stopped
    deadline = time.monotonic() + grace_s
    while (alive := {process for process in alive if is_alive(process)}) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
