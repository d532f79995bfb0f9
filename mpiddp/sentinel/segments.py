"""Shared memory that MPI leaves on a node when a rank ends without MPI_Finalize."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import NamedTuple

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
