"""A mirror of the environment: staged files are copies, all else in their folders are links to the originals.

A folder lies at the same path below the mirror's root as its original, so what a file finds beside it or above it is
there. Nobody may make files in it, as in a container's image: they would be lost with the mirror.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Sequence
from typing import BinaryIO

from ..join.variables import set_all
from .broadcast import pieces_in
from .lease import Lease, stamp
from .manifest import COMPILED, Chunk, Folder, Manifest
from .roots import is_installed, root_of

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
    set_all({"PYTHONPATH": f"{start}{os.pathsep}{others}" if others else start,
             STAGED_BY: f"{os.uname().nodename}:{os.getpid()}"})
