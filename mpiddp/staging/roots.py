"""The roots of this Python's environment that lie on a shared file system."""

from __future__ import annotations

import hashlib
import os
import re
import site
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# File systems that several hosts share (as /proc/self/mountinfo names them, man 5 proc_pid_mountinfo). FUSE counts as
# shared, except for images and for what caches on the host by itself.
SHARED = frozenset((
    "nfs", "nfs3", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "pvfs2", "9p",
    "wekafs", "glusterfs", "ocfs2", "gfs2", "dvs"))
LOCAL_FUSE = frozenset(f"fuse.{name}" for name in (
    "squashfuse", "squashfuse_ll", "fuse-overlayfs", "cvmfs2", "lxcfs", "gocryptfs", "portal", "erofsfuse"))
INSTALLED = ("site-packages", "dist-packages")  # folders of sys.path that hold what pip has installed
ZIPPED = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
STANDARD = os.path.dirname(os.__file__)  # of the standard library
TOO_WIDE = ("/", "/usr", "/usr/local", "/opt", "/home")


class Mount(NamedTuple):
    """Where a file system is mounted, its type, and the options of that mount."""

    path: str
    kind: str
    options: frozenset[str]

    @property
    def shared(self) -> bool:
        """Whether other hosts see the same files."""
        return self.kind in SHARED or (self.kind.startswith("fuse") and self.kind not in LOCAL_FUSE)


def mounts() -> list[Mount]:
    r"""Return the mounted file systems, the last mounted at the end. The kernel writes a path's spaces as \040."""
    found = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            words, _, kind = (part.split(b" ") for part in line.partition(b" - "))
            path = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), words[4])
            found.append(Mount(os.fsdecode(path), os.fsdecode(kind[0]), frozenset(os.fsdecode(words[5]).split(","))))
    return found


def mount_of(path: str, among: Sequence[Mount]) -> Mount:
    """Return the file system of a path, in which no link is followed."""
    return max((mount for mount in reversed(among) if is_within(path, mount.path)), key=lambda mount: len(mount.path))


def environment_roots() -> dict[str, tuple[int, int]]:
    """Return the topmost folders of the environment on a shared file system, each with its inode and time of change.

    The environment consists of Python's own folder (sys.prefix, sys.base_prefix) and the folders for packages. Other
    entries of sys.path, such as the script's folder or an editable install, belong to the user, who writes there.
    """
    known, found = mounts(), {}
    for root in topmost(environment(sys.path)):
        if mount_of(os.path.realpath(root), known).shared and os.path.isdir(root):
            status = os.stat(root)
            found[root] = status.st_ino, status.st_mtime_ns
    return found


def name_of(roots: Sequence[str]) -> str:
    """Return a name for an environment: its folders, and the Python in it."""
    words = repr((tuple(roots), sys.prefix, sys.version, os.uname().machine))
    return hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def environment(path: Sequence[str]) -> list[str]:
    """Return the folders of the environment to which entries of sys.path belong."""
    found = []
    for entry in filter(is_installed, path):
        prefix = root_of(entry, (sys.prefix, sys.base_prefix, sys.exec_prefix))
        found.append(prefix if prefix and prefix not in TOO_WIDE else entry)
    return found


def is_installed(entry: str) -> bool:
    """Tell whether an entry of sys.path is Python's own, or holds what pip has installed."""
    users = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    own = os.path.basename(entry) in (*INSTALLED, ZIPPED) or entry == users or is_within(entry, STANDARD)
    return own and os.path.isabs(entry)


def holds_installed(path: str, root: str) -> bool:
    """Tell whether a file in a root is the environment's: a prefix may contain the user's own folders, too."""
    return root not in (sys.prefix, sys.base_prefix, sys.exec_prefix) or path[len(root) + 1:].startswith("lib")


def topmost(folders: Iterable[str]) -> list[str]:
    """Return the folders that lie in none of the others."""
    every = sorted({os.path.normpath(folder) for folder in folders})
    return [folder for folder in every if root_of(folder, every) == folder]


def is_within(path: str, folder: str) -> bool:
    """Tell whether a path is a folder, or lies in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def root_of(path: str, folders: Iterable[str]) -> str:
    """Return the first of the folders that contains a path, empty for none."""
    return next((folder for folder in folders if is_within(path, folder)), "")
