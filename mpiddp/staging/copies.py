"""The mirrors on this node: found, locked while they are used, and removed when nobody needs them.

A mirror lies in a folder `<environment>-<fingerprint>` of the folder that is ours, and appears there whole, by one
rename. Beside it is its lock: whoever uses the mirror shares it, whoever makes or removes one has it alone. It is the
kernel that gives a lock back (man 2 flock), also those of processes that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import stat
from typing import NamedTuple

from ..facts.process import boot
from .manifest import File, Folder, Manifest

MARK, KEPT, ROOT, START, NEW = "mirror", "kept", "root", "start", ".new"
MANIFEST, BY = "manifest", "_MPIDDP_STAGED_BY"  # a variable: the host and the process that use a mirror


class Mark(NamedTuple):
    """What a whole mirror says of itself: the host's start, and when entries of sys.path had been changed, in ns."""

    boot: str
    changed: tuple[tuple[str, int], ...]


class Copy(NamedTuple):
    """A mirror that lies at `path`, of which this process holds the lock."""

    path: str
    lock: int

    @property
    def root(self) -> str:
        """The folder in which paths of the originals are found again."""
        return os.path.join(self.path, ROOT)


def find(ours: str, environment: str) -> list[str]:
    """Return the whole mirrors of an environment, the newest first."""
    try:
        names = [name for name in os.listdir(ours) if name.startswith(f"{environment}-") and "." not in name]
    except OSError:
        return []
    return sorted((os.path.join(ours, name) for name in names), key=lambda path: -made_at(path))


def made_at(path: str) -> float:
    """Return when a mirror was made, in seconds; 0 if that is not known."""
    try:
        return os.stat(os.path.join(path, MARK)).st_mtime
    except OSError:
        return 0.0


def share(path: str) -> Copy | None:
    """Return a mirror, locked for use; None if there is none, or if it is not of this start of the host."""
    try:
        lock = locked(f"{path}.lock", fcntl.LOCK_SH)
    except OSError:
        return None
    if lock >= 0 and is_whole(path):
        return Copy(path, lock)
    if lock >= 0:
        os.close(lock)
    return None


def is_whole(path: str) -> bool:
    """Tell whether a mirror was finished since this host has started: before, a disk may not have got all of it."""
    mark = mark_of(path)
    return mark is not None and mark.boot == boot()


def mark_of(path: str) -> Mark | None:
    """Return what a mirror says of itself, None where it is not whole."""
    try:
        with open(os.path.join(path, MARK), "rb") as file:
            return Mark(*marshal.load(file))  # noqa: S302 (nobody else can write there)
    except (OSError, ValueError, EOFError, TypeError):
        return None


def manifest_of(path: str) -> Manifest | None:
    """Return the manifest of a mirror, None if it cannot be read."""
    try:
        with open(os.path.join(path, MANIFEST), "rb") as file:
            trees, files, folders, others = marshal.load(file)  # noqa: S302 (nobody else can write there)
            return Manifest(trees, tuple(File(*one) for one in files), tuple(Folder(*one) for one in folders), others)
    except (OSError, ValueError, EOFError, TypeError):
        return None


def write_marks(path: str, manifest: Manifest, changed: tuple[tuple[str, int], ...]) -> None:
    """Write what a mirror says of itself, the last files of it; raise OSError."""
    with open(os.path.join(path, MANIFEST), "wb") as file:
        files, folders = (tuple(map(tuple, some)) for some in (manifest.files, manifest.folders))
        marshal.dump((manifest.trees, files, folders, manifest.others), file)
    with open(os.path.join(path, MARK), "wb") as file:
        marshal.dump((boot(), changed), file)


def make(path: str) -> Copy | None:
    """Return the lock for making a mirror; None if somebody else makes or uses it. Raises OSError."""
    lock = locked(f"{path}.lock", fcntl.LOCK_EX)
    return None if lock < 0 else Copy(path, lock)


def use_own(copy: Copy) -> Copy | None:
    """Return a mirror that this process has made, locked for use as others may; None if one of them has taken it away.

    The lock is given back for a moment (man 2 flock).
    """
    fcntl.flock(copy.lock, fcntl.LOCK_SH)
    if is_whole(copy.path):
        return copy
    os.close(copy.lock)
    return None


def locked(path: str, kind: int) -> int:
    """Return the descriptor of a lock that is had now, -1 if somebody else has it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:  # else its owner has just removed it
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1


def fits(copy: Copy, manifest: Manifest) -> bool:
    """Tell whether all of a manifest lies in a mirror: what cleans folders of old files may have taken some.

    In the place of a file that was not copied there is a link.
    """
    try:
        for file in manifest.files:
            about = os.lstat(copy.root + file.path)
            same = (about.st_size, about.st_mtime_ns) == (file.size, file.mtime_ns)
            if not same and not stat.S_ISLNK(about.st_mode):
                return False
        return all(len(os.listdir(copy.root + folder.path)) >= len(folder.names) for folder in manifest.folders)
    except OSError:
        return False


def release(copy: Copy, keep: bool) -> None:
    """Use a mirror no more; remove it if it is not to be kept and nobody else uses it."""
    if keep:
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(copy.path, KEPT), os.O_CREAT | os.O_WRONLY, 0o600))
    os.close(copy.lock)
    if not keep:
        remove(copy.path)


def remove(path: str) -> bool:
    """Remove a mirror, whole or not, and its lock, unless somebody uses it; tell whether it is gone."""
    try:
        lock = locked(f"{path}.lock", fcntl.LOCK_EX)
    except OSError:
        return False
    if lock < 0:
        return False
    gone = f"{path}{NEW}"
    with contextlib.suppress(OSError):
        discard(gone)
        os.rename(path, gone)  # so that nobody finds it half removed
        discard(gone)
    with contextlib.suppress(OSError):
        os.unlink(f"{path}.lock")
    os.close(lock)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
    return not os.path.exists(path)


def discard(path: str) -> None:
    """Remove a folder of ours, whose folders nobody may write to; nothing if there is none."""
    import shutil

    if os.path.isdir(path):
        open_folders(path)
    shutil.rmtree(path, ignore_errors=True)


def open_folders(path: str) -> None:
    """Let this user write to a folder and those in it; what is a link is not looked at, which may take its time."""
    os.chmod(path, 0o700)
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                open_folders(entry.path)


def tidy(ours: str, using: str) -> None:
    """Remove what jobs that were killed have left: half mirrors, and whole ones that were not to be kept.

    Of the environment of the mirror that is used, older ones go as well. Whatever somebody uses stays.
    """
    environment = using.partition("-")[0]
    try:
        names = {name.removesuffix(".lock").removesuffix(NEW) for name in os.listdir(ours)}
    except OSError:
        return
    for name in names - {using}:
        path = os.path.join(ours, name)
        if name.startswith(f"{environment}-") or not os.path.exists(os.path.join(path, KEPT)):
            remove(path)
