"""Where on this node a mirror may lie: a folder in memory or on a local disk, of this user alone, with room for it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from typing import NamedTuple

from ..config import AUTO
from ..facts.files import check_protected, number, reason
from ..facts.process import cgroups
from .mounts import mount_of, mounts

SHM = "/dev/shm"  # noqa: S108 (a folder of ours alone is made in it)
SPARE = 1.1  # so much more room than the files need
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # of cgroup v2 and v1
IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs"})


class Room(NamedTuple):
    """A folder for mirrors, and why it cannot be used; empty if it can."""

    path: str
    refused: str = ""


def asked(folder: str, environ: Mapping[str, str]) -> list[str]:
    """Return the folders that may be used, best first: the one that the user has named, or the usual ones for AUTO."""
    if folder != AUTO:
        return [folder]
    named = [environ.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR")]
    return [*dict.fromkeys(os.path.abspath(one) for one in named if one), SHM]


def ours(folder: str) -> str:
    """Return the folder of this user's mirrors in another one."""
    return os.path.join(folder, f"mpiddp-stage-{os.geteuid()}")


def is_ours(path: str) -> bool:
    """Tell whether a folder is there that this user has made, and that no other can write to, or replace."""
    try:
        about = os.lstat(path)
        check_protected(path)
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o022


def choose(folders: list[str], size: int) -> Room:
    """Return the first folder with room for so many bytes; if none can be used, the first, and why not."""
    rooms = [Room(folder, why_not(folder, size)) for folder in folders]
    return next((room for room in rooms if not room.refused), rooms[0])


def why_not(folder: str, size: int) -> str:
    """Return in words why a folder cannot be used for so many bytes; empty if it can: then `ours` is made in it."""
    try:
        mount = mount_of(os.path.realpath(folder), mounts())
        if mount.shared:
            return f"{folder} is on a shared file system ({mount.kind})"
        if "noexec" in mount.options:
            return f"{folder} is mounted with noexec: no library can be loaded from there"
        about = os.statvfs(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    free, needed = about.f_bavail * about.f_frsize, int(size * SPARE)
    if free < needed:
        return f"{folder} has {free >> 20:,} MiB free, and {needed >> 20:,} are needed"
    if mount.kind in IN_MEMORY and (left := memory_left()) < needed:
        return f"{folder} is in memory, of which {left >> 20:,} MiB are left, and {needed >> 20:,} are needed"
    try:
        make_ours(folder)
    except OSError as error:
        return f"{folder}: {reason(error, folder)}"
    return ""


def make_ours(folder: str) -> str:
    """Return the folder of this user's mirrors, which is made if need be; raise OSError where it is not ours alone."""
    path = ours(folder)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check_protected(path)
    if not is_ours(path):
        raise PermissionError(1, f"{os.path.basename(path)} there is not this user's alone")
    return path


def memory_left() -> int:
    """Return the bytes of memory that are left to this process: of the host, and of its cgroups.

    Slurm limits a job's, and its ranks run in one below that.
    """
    import psutil

    left = [psutil.virtual_memory().available]
    for folder in cgroups("memory"):
        for limit, used in LIMITS:
            if (most := number(f"{folder}/{limit}")) >= 0:
                left.append(most - max(0, number(f"{folder}/{used}")))
    return max(0, min(left))
