"""The file systems of this host: on which one a folder lies, and what that allows."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

# Of file systems that several hosts share (as /proc/self/mountinfo names them, man 5 proc_pid_mountinfo). What FUSE
# shows is shared, too, but for images and what caches on the host by itself.
SHARED = frozenset((
    "nfs", "nfs3", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "pvfs2", "9p",
    "wekafs", "glusterfs", "ocfs2", "gfs2", "dvs"))
FUSE = ("fuse", "fuse.")
OWN = frozenset(f"fuse.{name}" for name in (
    "squashfuse", "squashfuse_ll", "fuse-overlayfs", "cvmfs2", "lxcfs", "gocryptfs", "portal", "erofsfuse"))


class Mount(NamedTuple):
    """Where a file system is mounted, its type, and the options of that place."""

    path: str
    kind: str
    options: frozenset[str]

    @property
    def shared(self) -> bool:
        """Whether other hosts see the same files."""
        return self.kind in SHARED or (self.kind.startswith(FUSE) and self.kind not in OWN)


def mounts() -> list[Mount]:
    """Return the mounted file systems, those mounted last at the end."""
    with open("/proc/self/mountinfo", "rb") as file:
        return [parsed(line) for line in file]


def parsed(line: bytes) -> Mount:
    r"""Return the file system of a line, in which the kernel writes a path's spaces and the like as in \040."""
    place, _, kind = line.partition(b" - ")
    words = place.split(b" ")
    path = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), words[4])
    return Mount(os.fsdecode(path), os.fsdecode(kind.split(b" ")[0]), frozenset(os.fsdecode(words[5]).split(",")))


def mount_of(path: str, among: list[Mount]) -> Mount:
    """Return the file system on which a path lies; of the path's links, none is followed."""
    def holds(one: Mount) -> bool:
        return path == one.path or path.startswith(one.path.rstrip(os.sep) + os.sep)

    return max(reversed([one for one in among if holds(one)]), key=lambda one: len(one.path))
