"""A mirror of the environment on this node: target folder, lease, files, use, removal."""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from ..base.config import AUTO_FOLDER
from ..base.files import check_protected, format_os_error, list_names, read_number
from ..bootstrap.prepare import set_env
from ..discovery.process import list_cgroups, read_boot_id
from ..discovery.site_profile import find_staging_folder
from .broadcast import checked_pieces
from .manifest import PYCACHE, Chunk, Folder, Manifest, is_environment_entry, mount_of, mounts, root_of

SHM = "/dev/shm"  # noqa: S108 (mpiddp makes only a folder of this user's in it)
FREE_FACTOR = 1.1  # times the files' bytes: files take whole blocks, and folders and links need space, too
MEMORY_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup v2, v1
IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs"})
STAMP, KEPT, ROOT = "stamp", "kept", "root"


class MirrorLease(NamedTuple):
    """A mirror's folder, and the descriptor of the lock on it: shared to use the mirror, exclusive to write it."""

    path: str
    lock: int

    @property
    def root(self) -> str:
        """The folder that contains each mirrored path."""
        return os.path.join(self.path, ROOT)


def target_dirs(folder: str, environ: Mapping[str, str]) -> list[str]:
    """Return the possible target folders, best first: the user's, or for AUTO_FOLDER the site's and the usual."""
    if folder != AUTO_FOLDER:
        return [folder]
    named = [find_staging_folder(environ), *(environ.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR"))]
    return [*dict.fromkeys(os.path.abspath(name) for name in named if name), SHM]


def mirrors_folder(folder: str) -> str:
    """Return the folder of this user's mirrors in a target folder."""
    return os.path.join(folder, f"mpiddp-stage-{os.geteuid()}")


def is_private(path: str) -> bool:
    """Return whether a path is a folder of this user that no other user can write to or replace."""
    try:
        status = os.lstat(path)
        check_protected(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022


def choose_target(folders: Sequence[str], size: int) -> tuple[str, str]:
    """Return the first usable folder for `size` bytes and ""; if there is none, the first folder and its problem."""
    problems = []
    for folder in folders:
        problems.append(target_problem(folder, size))
        if not problems[-1]:
            return folder, ""
    return folders[0], problems[0]


def target_problem(folder: str, size: int) -> str:
    """Return why a folder cannot hold a mirror of `size` bytes; if it can, make mirrors_folder() and return ""."""
    own = mirrors_folder(folder)
    try:
        mount = mount_of(os.path.realpath(folder), mounts())
        if mount.is_shared:
            return f"{folder} is on a shared file system ({mount.file_system})"
        if "noexec" in mount.options:
            return f"{folder} is mounted with noexec, so libraries cannot be loaded from it"
        status = os.statvfs(folder)
        free, needed = status.f_bavail * status.f_frsize, int(size * FREE_FACTOR)
        if free < needed:
            return f"{folder} has {free >> 20:,} MiB free; the mirror needs {needed >> 20:,} MiB"
        if mount.file_system in IN_MEMORY and (available := available_memory()) < needed:
            return f"{folder} is in memory with {available >> 20:,} MiB left; the mirror needs {needed >> 20:,} MiB"
        with contextlib.suppress(FileExistsError):
            os.mkdir(own, 0o700)
        check_protected(own)
    except OSError as error:
        return f"{folder}: {format_os_error(error, folder)}"
    return "" if is_private(own) else f"{own} is not a folder that only you can write to"


def available_memory() -> int:
    """Return the bytes of memory available to this process: the least of the host, its cgroup and those above it."""
    import psutil

    available = [psutil.virtual_memory().available]
    for folder in list_cgroups("memory"):
        for limit_file, usage_file in MEMORY_LIMITS:
            if (limit := read_number(f"{folder}/{limit_file}")) >= 0:
                available.append(limit - max(0, read_number(f"{folder}/{usage_file}")))
    return max(0, min(available))


def acquire_shared(path: str) -> MirrorLease | None:
    """Return a lease to use a mirror; None if it does not exist, is incomplete, or is being written or removed."""
    lock = try_lock(path, fcntl.LOCK_SH)
    if lock >= 0 and read_stamp(path) is not None:
        return MirrorLease(path, lock)
    if lock >= 0:
        os.close(lock)
    return None


def acquire_new(path: str) -> MirrorLease | None:
    """Return a lease to write a mirror into an empty folder; None if another job has a lease. Raises OSError."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        lock = try_lock(path, fcntl.LOCK_EX)
        if lock < 0:
            return None
        if not os.listdir(path):
            return MirrorLease(path, lock)
        try:
            delete_tree(path)
        finally:
            os.close(lock)


def try_lock(path: str, kind: int) -> int:
    """Lock a folder without waiting and return its descriptor; -1 if it is locked or does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # else another job has just replaced it
            return descriptor
    os.close(descriptor)
    return -1


def write_stamp(path: str, paths: Collection[str]) -> None:
    """Mark a mirror as complete, with the paths for which it was made; raise OSError."""
    with open(os.path.join(path, STAMP), "wb") as file:
        marshal.dump((read_boot_id(), tuple(paths)), file)


def read_stamp(path: str) -> frozenset[str] | None:
    """Return the paths for which a mirror was made; None if it is incomplete.

    A stamp from before the last boot is ignored: parts of the mirror may not have reached the disk.
    """
    try:
        with open(os.path.join(path, STAMP), "rb") as file:
            boot_id, paths = marshal.load(file)  # noqa: S302 (only this user can write there)
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return frozenset(paths) if boot_id == read_boot_id() else None


def release(lease: MirrorLease, keep: bool) -> None:
    """Release a lease; remove the mirror unless `keep`, or another process has a lease."""
    if keep:
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(lease.path, KEPT), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    os.close(lease.lock)
    if not keep:
        remove_unused(lease.path)


def remove_unused(path: str) -> None:
    """Remove a mirror unless any process has a lease."""
    lock = try_lock(path, fcntl.LOCK_EX)
    if lock >= 0:
        with contextlib.suppress(OSError):
            delete_tree(path)
            os.rmdir(os.path.dirname(path))  # fails if there are other mirrors
        os.close(lock)


def delete_tree(path: str) -> None:
    """Delete a folder, its stamp first, even if its folders are read-only; do not follow links; raise OSError."""
    os.chmod(path, 0o700)
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name != STAMP):
            if entry.is_dir(follow_symlinks=False):
                delete_tree(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(path)


def remove_leftovers(own: str, keep_name: str) -> None:
    """Remove unused mirrors: those of killed jobs, and those of `keep_name`'s environment, except `keep_name`."""
    environment = keep_name.partition("-")[0]
    for name in list_names(own):
        path = os.path.join(own, name)
        is_kept = name.partition("-")[0] != environment and os.path.exists(os.path.join(path, KEPT))
        if name != keep_name and not is_kept:
            remove_unused(path)


READ_ONLY = 0o555
SITE_FOLDER = "start"  # with sitecustomize.py
STAGED_BY = "_MPIDDP_STAGED_BY"  # variable with the host and the process id of the lease's owner
SITECUSTOMIZE = '''\
"""Make a Python that a rank has started import from the mirror that mpiddp --stage has made.

This applies only while that rank runs, and not to another job.
"""
import os
import sys

HERE, ROOT, PREFIX, VERSION, ENTRIES = {here!r}, {root!r}, {prefix!r}, {version!r}, {entries!r}
sys.path[:] = [entry for entry in sys.path if entry != HERE]
host, _, rank = os.environ.get("{variable}", "").rpartition(":")
if (sys.prefix == PREFIX and sys.version == VERSION and host == os.uname().nodename
        and os.path.exists("/proc/" + rank) and "mpiddp" not in sys.orig_argv):
    sys.path[:] = [ROOT + entry if entry in ENTRIES else entry for entry in sys.path]
own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # the user's
except ImportError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", own)
'''


class MirrorWriter:
    """Writes the mirror of a manifest into an empty folder."""

    def __init__(self, lease: MirrorLease, manifest: Manifest) -> None:
        self._lease, self._manifest = lease, manifest
        self.left_out: set[str] = set()  # files that changed or could not be read
        self._open_copies: dict[int, BinaryIO] = {}  # by the number of the file
        self._files = {file.path for file in manifest.files}
        self._folders = {folder.path for folder in manifest.folders} | {*map(os.path.dirname, self._files)}

    def begin(self) -> None:
        """Make folders and links; raise OSError."""
        for path in self._folders:
            os.makedirs(self._lease.root + path, exist_ok=True)
        for folder in self._manifest.folders:
            self._link_names(folder)

    def write(self, chunk: Chunk, buffer: memoryview) -> None:
        """Write the pieces of a chunk; raise OSError, or ValueError if data does not match its checksum."""
        for piece, data, is_as_listed in checked_pieces(chunk, buffer):
            file = self._manifest.files[piece.file]
            if not is_as_listed:
                self.left_out.add(file.path)
            if file.path in self.left_out:
                continue
            if piece.start == 0:
                self._open_copies[piece.file] = open(self._lease.root + file.path, "xb")  # noqa: SIM115 (closed below)
            copy = self._open_copies[piece.file]
            copy.write(data)
            if piece.start + piece.length == file.size:  # pieces arrive in order
                with self._open_copies.pop(piece.file):
                    copy.flush()
                    os.fchmod(copy.fileno(), file.mode & 0o777 | 0o400)
                    os.utime(copy.fileno(), ns=(file.mtime_ns, file.mtime_ns))

    def finish(self, paths: Collection[str]) -> None:
        """Link the left-out files, and stamp the mirror with the paths for which it was made; raise OSError."""
        for copy in self._open_copies.values():  # of left-out files
            copy.close()
        for path in self.left_out:
            if os.path.lexists(self._lease.root + path):
                os.unlink(self._lease.root + path)
            os.symlink(path, self._lease.root + path)
        site_folder = os.path.join(self._lease.path, SITE_FOLDER)
        os.mkdir(site_folder)
        entries = tuple(entry for entry in sys.path if is_environment_entry(entry) and root_of(entry, self._folders))
        path = os.path.join(site_folder, "sitecustomize.py")
        with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(SITECUSTOMIZE.format(here=site_folder, root=self._lease.root, prefix=sys.prefix,
                                            version=sys.version, entries=entries, variable=STAGED_BY))
        for folder in self._folders:
            os.chmod(self._lease.root + folder, READ_ONLY)
        write_stamp(self._lease.path, paths)

    def _link_names(self, folder: Folder) -> None:
        """Link the names in a folder that are not copied, and the bytecode files that Python looks for."""
        pycache = os.path.join(folder.path, PYCACHE)
        for name, target in folder.names:
            path = os.path.join(folder.path, name)
            if path not in self._folders:
                self._link(path, target)
            stem, kind = os.path.splitext(name)
            if kind == ".py" and pycache in self._folders:
                self._link(os.path.join(pycache, f"{stem}.{sys.implementation.cache_tag}.pyc"))

    def _link(self, path: str, target: str = "") -> None:
        """Link to the original unless it is copied. A link within the roots becomes a link within the mirror."""
        full_target = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else ""
        if full_target and root_of(full_target, self._manifest.roots):
            os.symlink(self._lease.root + full_target if os.path.isabs(target) else target, self._lease.root + path)
        elif path not in self._files:
            os.symlink(path, self._lease.root + path)


def is_complete(lease: MirrorLease, manifest: Manifest) -> bool:
    """Return whether a mirror still has all of a manifest: a cleanup of old files may have removed some.

    Left-out files are links.
    """
    try:
        for file in manifest.files:
            status = os.lstat(lease.root + file.path)
            is_same = (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)
            if not is_same and not stat.S_ISLNK(status.st_mode):
                return False
        return all(len(os.listdir(lease.root + folder.path)) >= len(folder.names) for folder in manifest.folders)
    except OSError:
        return False


def redirect_imports(lease: MirrorLease, roots: Sequence[str]) -> None:
    """Import from a mirror from now on, in this process and, through PYTHONPATH, in Python processes that it starts.

    Packages that are already loaded import their remaining modules from the mirror, too.
    """
    mirrored = [root for root in roots if os.path.isdir(lease.root + root)]
    entries = [entry for entry in sys.path if is_environment_entry(entry) and root_of(entry, mirrored)]
    for path in [sys.path, *(getattr(module, "__path__", None) for module in list(sys.modules.values()))]:
        if type(path) is list:
            path[:] = [lease.root + entry if isinstance(entry, str) and root_of(entry, entries) else entry
                       for entry in path]
    site_folder, others = os.path.join(lease.path, SITE_FOLDER), os.environ.get("PYTHONPATH", "")
    set_env({"PYTHONPATH": f"{site_folder}{os.pathsep}{others}" if others else site_folder,
             STAGED_BY: f"{os.uname().nodename}:{os.getpid()}"})
