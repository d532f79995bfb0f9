"""Files to be written, the links that others may have put in their place, and what files of the kernel say."""

from __future__ import annotations

import errno
import os
import stat


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


def names(folder: str, prefix: str = "") -> list[str]:
    """Return the names in a folder that begin with `prefix`; none if there is no such folder."""
    try:
        return [name for name in os.listdir(folder) if name.startswith(prefix)]
    except OSError:
        return []


def text(path: str) -> str:
    """Return what a file of the kernel says, nothing if it is not there."""
    try:
        with open(path, errors="surrogateescape", newline="\n") as file:
            return file.read().strip()
    except OSError:
        return ""


def number(path: str) -> int:
    """Return the number in a file of the kernel, -1 if there is none."""
    try:
        return int(text(path))
    except ValueError:
        return -1
