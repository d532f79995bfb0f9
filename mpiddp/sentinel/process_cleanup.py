"""What a rank leaves behind when it fails: processes, MPI's shared memory, the other ranks of its Slurm step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..failure.rank import RankIdentity

FOLDER = "/dev/shm/"  # noqa: S108 (shm_open(3) has its files there)
# MPICH's, those of Open MPI 4.1 and 5, Intel MPI's, and multiprocessing's semaphores.
BEGINNINGS = tuple(FOLDER + name for name in ("mpich_shm_", "vader_segment.", "sm_segment.", "Intel_MPI_", "sem.mp-"))


class Segment(NamedTuple):
    """A file in FOLDER; `device` is as /proc has it, in hexadecimal numbers."""

    path: str
    device: str
    inode: int


def mapped(pid: int | str) -> set[Segment]:
    """Return the segments of MPI that a process maps; none if it is gone, or another user's (man 5 proc)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
        fields = [line.rstrip("\n").split(None, 5) for line in file if FOLDER in line]
        return {Segment(one[5], one[3], int(one[4])) for one in fields if one[5].startswith(BEGINNINGS)}
    return set()


def unmap_inherited() -> None:
    """Unmap the segments of MPI that this process has from the one that has forked it."""
    with open("/proc/self/maps", errors="surrogateescape") as file:
        ranges = [line.split(None, 1)[0].split("-") for line in file if any(name in line for name in BEGINNINGS)]
    if ranges:
        import ctypes

        unmap = ctypes.CDLL(None).munmap
        for begin, end in ranges:
            unmap(ctypes.c_void_p(int(begin, 16)), ctypes.c_size_t(int(end, 16) - int(begin, 16)))


def remove(segments: Collection[Segment]) -> None:
    """Remove those of the segments that no process maps.

    Of several processes that had one, the sentinel of the last one finds that.
    """
    left = set(segments)
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if not left:
            return
        left -= mapped(pid)
    for one in left:
        with contextlib.suppress(OSError):
            found = os.stat(one.path)
            device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
            if (device, found.st_ino) == one[1:]:  # and not a later one of the same name
                os.unlink(one.path)


if TYPE_CHECKING:
    import psutil

MANY_CHILDREN = 1000
CLEANING_S = 0.7  # for processes to end when they are asked to
CANCELLING_S = 15.0  # for scancel to return


class Leftovers:
    """The processes that descend from a rank: children of which it told, and what has stayed in their process groups.

    The variables of a rank alone are no proof of descent: what a batch system or another daemon starts for it has them,
    too. So a process that has left these groups, and whose parent has ended, is left alone.
    """

    def __init__(self, rank: int) -> None:
        """Know of no process of the rank yet; `rank` is the number of its own process, which is there."""
        self._rank = rank
        self._group = rank
        with contextlib.suppress(ProcessLookupError):
            self._group = os.getpgid(rank)
        self._groups = {rank, self._group}  # process groups and sessions, by the number of who made them
        self._seen: set[psutil.Process] = set()
        self._segments: set[Segment] = set()

    def note(self, child: int) -> None:
        """Note a process that the rank has started, before it may lose its parent, and the group that it may make."""
        import psutil

        if len(self._groups) > MANY_CHILDREN:
            self._seen = {one for one in self._seen if one.is_running()}
            self._groups = {self._rank, self._group, *(one.pid for one in self._seen)}
        self._groups.add(child)
        with contextlib.suppress(psutil.Error):
            self._seen.add(psutil.Process(child))

    def note_descendants(self) -> None:
        """Note the rank's descendants while it is there to be their parent."""
        found = children(self._rank)
        self._seen |= found
        self._groups |= {one.pid for one in found}
        self.note_segments()

    def note_segments(self) -> None:
        """Note the shared memory that the rank has from MPI."""
        self._segments |= mapped(self._rank)

    def end(self, member: RankIdentity | None) -> None:
        """End the processes that were seen, and those of their groups that have the variables of `member`.

        Other ranks may be in the rank's own group. Then remove the shared memory that nobody has any more.
        """
        if member is not None:
            self._seen |= in_groups(self._groups, f"TORCHELASTIC_RUN_ID={member.run_id}", f"RANK={member.rank}")
        end(self._seen, CLEANING_S)
        remove(self._segments)


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


def in_groups(groups: Collection[int], *variables: str) -> set[psutil.Process]:
    """Return the processes of some process groups or sessions that were started with all of these NAME=VALUE."""
    import psutil

    wanted = {one.encode() for one in variables}
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) in groups or os.getsid(pid) in groups:
                with open(f"/proc/{pid}/environ", "rb") as file:
                    if wanted <= set(file.read().split(b"\0")):
                        found.add(psutil.Process(pid))
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
