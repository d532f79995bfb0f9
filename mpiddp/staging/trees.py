"""The folders of this Python's environment that lie on a shared file system, and their mirror on this node."""

from __future__ import annotations

import hashlib
import os
import site
import sys
from collections.abc import Iterable, Sequence

from .mounts import mount_of, mounts

INSTALLED = ("site-packages", "dist-packages")  # folders of sys.path that hold what pip has installed
ZIPPED = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
STANDARD = os.path.dirname(os.__file__)  # of the standard library
TOO_WIDE = ("/", "/usr", "/usr/local", "/opt", "/home")


def trees() -> tuple[str, ...]:
    """Return the topmost folders of the environment that are on a shared file system, in order.

    The environment are Python's own folder (sys.prefix, sys.base_prefix) and those for packages. Other entries of
    sys.path, such as the script's folder or that of an editable install, belong to the user, who writes there.
    """
    known = mounts()
    return tuple(one for one in topmost(environment(sys.path))
                 if mount_of(os.path.realpath(one), known).shared and os.path.isdir(one))


def name_of(trees: tuple[str, ...]) -> str:
    """Return a name for an environment: its folders, and the Python in it."""
    words = repr((trees, sys.prefix, sys.version, os.uname().machine))
    return hashlib.blake2b(words.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def environment(path: Sequence[str]) -> list[str]:
    """Return the folders of an environment that entries of sys.path belong to."""
    found = []
    for entry in filter(is_installed, path):
        prefix = next((one for one in (sys.prefix, sys.base_prefix, sys.exec_prefix) if within(entry, one)), "")
        found.append(prefix if prefix and prefix not in TOO_WIDE else entry)
    return found


def is_installed(entry: str) -> bool:
    """Tell whether an entry of sys.path is Python's own, or holds what pip has installed."""
    users = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    own = os.path.basename(entry) in (*INSTALLED, ZIPPED) or entry == users or within(entry, STANDARD)
    return own and os.path.isabs(entry)


def holds_installed(path: str, tree: str) -> bool:
    """Tell whether a file in a tree is the environment's: in a prefix, the user's own folders may lie as well."""
    return tree not in (sys.prefix, sys.base_prefix, sys.exec_prefix) or path[len(tree) + 1:].startswith("lib")


def topmost(folders: Iterable[str]) -> list[str]:
    """Return the folders that lie in none of the others."""
    every = sorted({os.path.normpath(one) for one in folders})
    return [one for one in every if not any(one != other and within(one, other) for other in every)]


def within(path: str, folder: str) -> bool:
    """Tell whether a path is a folder, or in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def tree_of(path: str, folders: Iterable[str]) -> str:
    """Return which of the folders a path is in, empty for none."""
    return next((one for one in folders if within(path, one)), "")
