"""Files to be written, folders of one launch alone, links that others may have put there, and files of the kernel."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple


def open_for_writing(path: str, append: bool = False, keep: bool = False) -> int:
    """Open a file, which is made if need be and emptied unless `append` or `keep`, and return its descriptor.

    Raises OSError as os.open() does, and where the file or its folder is a symbolic link that another user has put
    into a folder that others can write to: it may lead to any file of ours. Linux prevents that in folders such as
    /tmp alone, and not everywhere (fs.protected_symlinks in man 5 proc_sys_fs).
    """
    for one in (os.path.dirname(path), path):
        if is_planted(one):
            raise OSError(errno.ELOOP, "this is a symbolic link of another user's", one)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0 if keep else os.O_TRUNC)
    return os.open(path, flags if os.path.islink(path) else flags | os.O_NOFOLLOW, 0o666)


def is_planted(path: str) -> bool:
    """Tell whether a path is a link of another user's, in a folder in which others than its owner can make links."""
    try:
        found = os.lstat(path)
        if not stat.S_ISLNK(found.st_mode) or found.st_uid in (0, os.geteuid()):
            return False
        return bool(os.stat(os.path.dirname(path) or ".").st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False


class Claim(NamedTuple):
    """A folder of the launch `run_id` alone, in a job that Slurm has started again for `restarts` times.

    A link in the folder, which leads nowhere, has the run id: making it is atomic, on NFS, too (man 2 symlink).
    """

    folder: str
    restarts: int
    run_id: str

    @property
    def mark(self) -> str:
        """The link."""
        return f"{self.folder}/.run-{self.restarts}"

    def make(self) -> bool:
        """Claim the folder; return False if another launch has it, True too if nobody can tell."""
        with contextlib.suppress(OSError):  # whoever writes to it tells that it cannot be written
            os.makedirs(self.folder, exist_ok=True)
            try:
                os.symlink(self.run_id, self.mark)
            except FileExistsError:
                return os.readlink(self.mark) == self.run_id
        return True

    def drop(self) -> None:
        """Give the folder back, if it is claimed."""
        with contextlib.suppress(OSError):
            if os.readlink(self.mark) == self.run_id:
                os.unlink(self.mark)
                os.rmdir(self.folder)


def free_claim(wanted: str, restarts: int, run_id: str, numbers: Iterator[int]) -> Claim:
    """Claim the first folder that no other launch has: the one that is wanted, or that with one of the `numbers`."""
    candidates = (Claim(f"{wanted}-{number}" if number > 1 else wanted, restarts, run_id) for number in numbers)
    return next(filter(Claim.make, candidates))


def names(folder: str, prefix: str = "") -> list[str]:
    """Return the names in a folder that begin with `prefix`; none if there is no such folder."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    except OSError:
        return []


def text(path: str) -> str:
    """Return what a file of the kernel says, nothing if it is not there."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def number(path: str) -> int:
    """Return the number in a file of the kernel, -1 if there is none."""
    try:
        return int(text(path))
    except ValueError:
        return -1
