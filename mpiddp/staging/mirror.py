"""A mirror of the environment on this node: where it may lie, the lease that keeps it, its files, and its removal."""

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
from .broadcast import pieces_in
from .manifest import COMPILED, Chunk, Folder, Manifest, is_installed, mount_of, mounts, root_of

SHM = "/dev/shm"  # noqa: S108 (only a folder of this user's is made in it)
FREE_FACTOR = 1.1  # so many times the bytes of the files have to be free
MEMORY_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup v2, v1
IN_MEMORY = frozenset({"tmpfs", "ramfs", "rootfs"})
STAMP, KEPT, ROOT = "stamp", "kept", "root"


class Lease(NamedTuple):
    """A mirror's folder, and the descriptor by which this process has locked it."""

    path: str
    lock: int

    @property
    def root(self) -> str:
        """The folder below which each mirrored path is found again."""
        return os.path.join(self.path, ROOT)


def target_dirs(folder: str, environ: Mapping[str, str]) -> list[str]:
    """Return the folders that may be used, best first: the one that the user has named, or for AUTO the usual ones."""
    if folder != AUTO_FOLDER:
        return [folder]
    named = [environ.get(name, "") for name in ("SLURM_TMPDIR", "TMPDIR")]
    return [*dict.fromkeys(os.path.abspath(name) for name in named if name), SHM]


def own_folder(folder: str) -> str:
    """Return the folder of this user's mirrors in another one."""
    return os.path.join(folder, f"mpiddp-stage-{os.geteuid()}")


def is_private(path: str) -> bool:
    """Tell whether there is a folder that this user has made, and that no other user can write to or replace."""
    try:
        status = os.lstat(path)
        check_protected(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022


def choose_target(folders: Sequence[str], size: int) -> tuple[str, str]:
    """Return the first folder with room for so many bytes and ""; if there is none, the first one and why not."""
    refused = []
    for folder in folders:
        refused.append(why_not(folder, size))
        if not refused[-1]:
            return folder, ""
    return folders[0], refused[0]


def why_not(folder: str, size: int) -> str:
    """Return why a folder cannot be used for so many bytes; "" if it can: then `own_folder` is made in it."""
    own = own_folder(folder)
    try:
        mount = mount_of(os.path.realpath(folder), mounts())
        if mount.shared:
            return f"{folder} is on a shared file system ({mount.kind})"
        if "noexec" in mount.options:
            return f"{folder} is mounted with noexec: no library can be loaded from there"
        status = os.statvfs(folder)
        free, needed = status.f_bavail * status.f_frsize, int(size * FREE_FACTOR)
        if free < needed:
            return f"{folder} has {free >> 20:,} MiB free, and {needed >> 20:,} are needed"
        if mount.kind in IN_MEMORY and (left := memory_left()) < needed:
            return f"{folder} is in memory, of which {left >> 20:,} MiB are left, and {needed >> 20:,} are needed"
        with contextlib.suppress(FileExistsError):
            os.mkdir(own, 0o700)
        check_protected(own)
    except OSError as error:
        return f"{folder}: {format_os_error(error, folder)}"
    return "" if is_private(own) else f"{folder}: {os.path.basename(own)} there is not this user's alone"


def memory_left() -> int:
    """Return the bytes of memory that are left to this process: of the host, and of its cgroups.

    Slurm limits that of a job, and its ranks run in one below.
    """
    import psutil

    left = [psutil.virtual_memory().available]
    for folder in list_cgroups("memory"):
        for limit, used in MEMORY_LIMITS:
            if (most := read_number(f"{folder}/{limit}")) >= 0:
                left.append(most - max(0, read_number(f"{folder}/{used}")))
    return max(0, min(left))


def lease_whole(path: str) -> Lease | None:
    """Return a mirror, locked for use; None if it is not there, not whole, or being removed."""
    lock = try_lock(path, fcntl.LOCK_SH)
    if lock >= 0 and stamped(path) is not None:
        return Lease(path, lock)
    if lock >= 0:
        os.close(lock)
    return None


def create(path: str) -> Lease | None:
    """Return an empty folder for a mirror, locked for writing; None if another job makes or uses it. Raises OSError."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        lock = try_lock(path, fcntl.LOCK_EX)
        if lock < 0:
            return None
        if not os.listdir(path):
            return Lease(path, lock)
        try:
            delete(path)
        finally:
            os.close(lock)


def try_lock(path: str, kind: int) -> int:
    """Return the descriptor of a folder that is locked now; -1 if it is locked already, or not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # else another job has just removed it
            return descriptor
    os.close(descriptor)
    return -1


def stamp(path: str, paths: Collection[str]) -> None:
    """Note that a mirror is whole, and for which paths it was made; raise OSError."""
    with open(os.path.join(path, STAMP), "wb") as file:
        marshal.dump((read_boot_id(), tuple(paths)), file)


def stamped(path: str) -> frozenset[str] | None:
    """Return for which paths a mirror was made; None if it is not whole.

    A disk may have lost a part of a mirror that was made before this host has started.
    """
    try:
        with open(os.path.join(path, STAMP), "rb") as file:
            made_in, paths = marshal.load(file)  # noqa: S302 (nobody else can write there)
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return frozenset(paths) if made_in == read_boot_id() else None


def release(lease: Lease, keep: bool) -> None:
    """Use a mirror no more; remove it if it is not to be kept and nobody else uses it."""
    if keep:
        with contextlib.suppress(OSError):
            os.close(os.open(os.path.join(lease.path, KEPT), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    os.close(lease.lock)
    if not keep:
        remove(lease.path)


def remove(path: str) -> None:
    """Remove a mirror, whole or not, unless somebody uses it."""
    lock = try_lock(path, fcntl.LOCK_EX)
    if lock >= 0:
        with contextlib.suppress(OSError):
            delete(path)
            os.rmdir(os.path.dirname(path))  # if it was the last one
        os.close(lock)


def delete(path: str) -> None:
    """Delete a folder, also from folders to which nobody may write, a stamp first; raise OSError.

    What links lead to is not asked for: that may take its time.
    """
    os.chmod(path, 0o700)
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name != STAMP):
            if entry.is_dir(follow_symlinks=False):
                delete(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(path)


def tidy(own: str, used: str) -> None:
    """Remove what killed jobs have left in this user's folder, and other mirrors of the environment that is used.

    What was to be kept for other environments, and what somebody uses, stays.
    """
    for name in list_names(own):
        path, is_same_environment = os.path.join(own, name), name.partition("-")[0] == used.partition("-")[0]
        if name != used and (is_same_environment or not os.path.exists(os.path.join(path, KEPT))):
            remove(path)


READ_ONLY = 0o555
START = "start"  # the folder of sitecustomize
STAGED_BY = "_MPIDDP_STAGED_BY"  # a variable: the host and the process that use a mirror
SITECUSTOMIZE = '''\
"""Let a Python that a rank has started find its environment in the mirror that mpiddp --stage has made.

It does so while the rank lives that the variable names, and for no other job.
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
    import sitecustomize  # the one that would have been found without this
except ImportError as error:
    if error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", own)
'''


class Writer:
    """Writes the mirror of a manifest into an empty folder that is locked."""

    def __init__(self, lease: Lease, manifest: Manifest) -> None:
        self._lease, self._manifest = lease, manifest
        self.left: set[str] = set()  # files that changed while they were read, or could not be read
        self._open: dict[int, BinaryIO] = {}  # copies of which pieces have come, by the number of their file
        self._files = {file.path for file in manifest.files}
        self._folders = {folder.path for folder in manifest.folders} | {*map(os.path.dirname, self._files)}

    def begin(self) -> None:
        """Make the folders and the links; raise OSError."""
        for path in self._folders:
            os.makedirs(self._lease.root + path, exist_ok=True)
        for folder in self._manifest.folders:
            self._link_names(folder)

    def write(self, chunk: Chunk, buffer: memoryview) -> None:
        """Write the pieces of a chunk; raise OSError, or ValueError if something else came than was read."""
        for piece, data, is_as_listed in pieces_in(chunk, buffer):
            file = self._manifest.files[piece.file]
            if not is_as_listed:
                self.left.add(file.path)
            if file.path in self.left:
                continue
            if piece.start == 0:
                self._open[piece.file] = open(self._lease.root + file.path, "xb")  # noqa: SIM115 (its pieces come later)
            copy = self._open[piece.file]
            copy.write(data)
            if piece.start + piece.length == file.size:  # pieces come in order
                with self._open.pop(piece.file):
                    copy.flush()
                    os.fchmod(copy.fileno(), file.mode & 0o777 | 0o400)
                    os.utime(copy.fileno(), ns=(file.mtime_ns, file.mtime_ns))

    def finish(self, paths: Collection[str]) -> None:
        """Put links in the place of the files that were left out, and stamp the mirror of some paths; raise OSError."""
        for copy in self._open.values():  # the last piece has not come, or not as it was listed
            copy.close()
        for path in self.left:
            if os.path.lexists(self._lease.root + path):
                os.unlink(self._lease.root + path)
            os.symlink(path, self._lease.root + path)
        here = os.path.join(self._lease.path, START)
        os.mkdir(here)
        entries = tuple(entry for entry in sys.path if is_installed(entry) and root_of(entry, self._folders))
        with open(os.path.join(here, "sitecustomize.py"), "w", errors="surrogateescape") as file:
            file.write(SITECUSTOMIZE.format(here=here, root=self._lease.root, prefix=sys.prefix, version=sys.version,
                                            entries=entries, variable=STAGED_BY))
        for folder in self._folders:
            os.chmod(self._lease.root + folder, READ_ONLY)
        stamp(self._lease.path, paths)

    def _link_names(self, folder: Folder) -> None:
        """Make a link for each name in a folder that is no copy, and for what Python compiles, or will look for."""
        compiled = os.path.join(folder.path, COMPILED)
        for name, target in folder.names:
            path = os.path.join(folder.path, name)
            if path not in self._folders:
                self._link(path, target)
            stem, kind = os.path.splitext(name)
            if kind == ".py" and compiled in self._folders:
                self._link(os.path.join(compiled, f"{stem}.{sys.implementation.cache_tag}.pyc"))

    def _link(self, path: str, target: str = "") -> None:
        """Make a link to an original that is no copy. A link in the roots stays one, to its place in the mirror."""
        whole = os.path.normpath(os.path.join(os.path.dirname(path), target)) if target else ""
        if whole and root_of(whole, self._manifest.roots):
            os.symlink(self._lease.root + whole if os.path.isabs(target) else target, self._lease.root + path)
        elif path not in self._files:
            os.symlink(path, self._lease.root + path)


def has_all(lease: Lease, manifest: Manifest) -> bool:
    """Tell whether a mirror still has all of a manifest: what cleans folders of old files may have taken some.

    In the place of a file that was not copied there is a link.
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


def use(lease: Lease, roots: Sequence[str]) -> None:
    """Find modules in a mirror from now on, in this process and, by PYTHONPATH, in those that it starts.

    Packages that are loaded already find their other modules there, too.
    """
    mirrored = [root for root in roots if os.path.isdir(lease.root + root)]
    entries = [entry for entry in sys.path if is_installed(entry) and root_of(entry, mirrored)]
    for path in [sys.path, *(getattr(module, "__path__", None) for module in list(sys.modules.values()))]:
        if type(path) is list:
            path[:] = [lease.root + entry if isinstance(entry, str) and root_of(entry, entries) else entry
                       for entry in path]
    start, others = os.path.join(lease.path, START), os.environ.get("PYTHONPATH", "")
    set_env({"PYTHONPATH": f"{start}{os.pathsep}{others}" if others else start,
             STAGED_BY: f"{os.uname().nodename}:{os.getpid()}"})
