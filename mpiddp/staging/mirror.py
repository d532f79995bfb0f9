"""Build a mirror: hot files are copies, all else in their folders links to the originals.

A folder of the mirror lies at the same path, below the mirror's root, as its original: what a file finds beside it or
above it is there. Nobody may make files in it, as in a container's image: they would be gone with the mirror.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from zlib import crc32

from . import copies
from .manifest import COMPILED, Chunk, File, Folder, Manifest
from .reading import WHOLE, Read
from .trees import is_installed, tree_of

READ_ONLY = 0o555
START_CODE = '''\
"""Let a Python that a rank has started find its environment in the mirror that mpiddp --stage has made."""
import os
import sys

HERE, ROOT, PREFIX, VERSION, ENTRIES = {here!r}, {root!r}, {prefix!r}, {version!r}, {entries!r}
sys.path[:] = [entry for entry in sys.path if entry != HERE]
host, _, rank = os.environ.get("{by}", "").rpartition(":")
if sys.prefix == PREFIX and sys.version == VERSION and host == os.uname().nodename and os.path.exists("/proc/" + rank):
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
    """Writes the mirror of a manifest, of which the lock is held, into a folder that has its name not yet."""

    def __init__(self, copy: copies.Copy, manifest: Manifest) -> None:
        self._copy, self._manifest = copy, manifest
        self._new = copy.path + copies.NEW
        self._root = os.path.join(self._new, copies.ROOT)
        self.left: list[str] = []  # the files that changed while they were read, or could not be read
        self._open: dict[int, int] = {}
        self._folders: set[str] = set()

    def begin(self) -> None:
        """Make the folders and the links in the place of what may be there; raise OSError."""
        copies.discard(self._new)
        copies.discard(self._copy.path)
        hot = {file.path for file in self._manifest.files}
        self._folders = {folder.path for folder in self._manifest.folders} | {os.path.dirname(path) for path in hot}
        for path in self._folders:
            os.makedirs(self._root + path, exist_ok=True)
        for folder in self._manifest.folders:
            self._link(folder, hot)
            if (compiled := os.path.join(folder.path, COMPILED)) in self._folders:
                self._link_compiled(folder, compiled, hot)

    def write(self, chunk: Chunk, data: memoryview, how: Sequence[Read]) -> None:
        """Write what has come of a chunk; raise OSError, or ValueError where something else came than was sent."""
        at = 0
        for piece, read in zip(chunk.pieces, how, strict=True):
            part = data[at:at + piece.length]
            at += piece.length
            file = self._manifest.files[piece.file]
            if read.outcome != WHOLE or file.path in self.left:
                self.left.append(file.path)
            elif crc32(part) != read.checksum:
                raise ValueError(f"{file.path}: what came is not what was read")
            elif piece.length == file.size:
                self._write_whole(file, part)
            else:
                self._write_part(piece.file, file, part, piece.at)

    def finish(self) -> None:
        """Give the mirror its name; raise OSError."""
        self._close()
        for path in set(self.left):
            self._leave(path)
        seen = {folder.path: folder.mtime_ns for folder in self._manifest.folders}
        here = os.path.join(self._new, copies.START)
        os.mkdir(here)
        with open(os.path.join(here, "sitecustomize.py"), "w", errors="surrogateescape") as file:
            file.write(start_code(self._copy, [folder for folder in seen if folder in self._manifest.trees]))
        copies.write_marks(self._new, self._manifest, tuple((one, seen[one]) for one in sys.path if one in seen))
        for folder in sorted(self._folders, reverse=True):
            os.chmod(self._root + folder, READ_ONLY)
        os.rename(self._new, self._copy.path)

    def give_up(self) -> None:
        """Remove what was written."""
        self._close()
        copies.discard(self._new)

    def _close(self) -> None:
        """Close the files of which the last piece has not come, or not as it was."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _link(self, folder: Folder, hot: set[str]) -> None:
        """Make a link for each name in a folder that is no copy. A link in a tree stays one, to its place here."""
        for name, target in folder.names:
            original = os.path.join(folder.path, name)
            if original in self._folders:
                continue
            if target:
                whole = os.path.normpath(os.path.join(folder.path, target))
                inside = tree_of(whole, self._manifest.trees)
                if inside or original not in hot:
                    moved = target if inside and not os.path.isabs(target) else (
                        self._copy.root + whole if inside else original)
                    os.symlink(moved, self._root + original)
            elif original not in hot:
                os.symlink(original, self._root + original)

    def _link_compiled(self, folder: Folder, compiled: str, hot: set[str]) -> None:
        """Make links to what Python has compiled of a folder's other modules, or will look for."""
        for name, _ in folder.names:
            stem, kind = os.path.splitext(name)
            path = os.path.join(compiled, f"{stem}.{sys.implementation.cache_tag}.pyc")
            if kind == ".py" and path not in hot:
                os.symlink(path, self._root + path)

    def _write_whole(self, file: File, data: memoryview) -> None:
        descriptor = self._created(file)
        try:
            write_all(descriptor, data, 0)
            os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
        finally:
            os.close(descriptor)

    def _write_part(self, number: int, file: File, data: memoryview, at: int) -> None:
        if number not in self._open:
            self._open[number] = self._created(file)
            os.truncate(self._open[number], file.size)
        write_all(self._open[number], data, at)
        if at + len(data) == file.size:  # pieces come in order
            descriptor = self._open.pop(number)
            os.close(descriptor)
            self._settle(file)

    def _created(self, file: File) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        return os.open(self._root + file.path, flags, file.mode & 0o777 | 0o400)

    def _settle(self, file: File) -> None:
        os.utime(self._root + file.path, ns=(file.mtime_ns, file.mtime_ns))

    def _leave(self, path: str) -> None:
        """Put a link in the place of a copy."""
        if os.path.lexists(self._root + path):
            os.unlink(self._root + path)
        os.symlink(path, self._root + path)


def write_all(descriptor: int, data: memoryview, at: int) -> None:
    """Write all of the data to a place in a file."""
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count


def start_code(copy: copies.Copy, trees: Sequence[str]) -> str:
    """Return the module by which Pythons that the script starts find the mirror, before they run anything.

    They do so while the rank lives that BY names: who starts another job hands its variables on.
    """
    entries = tuple(entry for entry in sys.path if is_installed(entry) and tree_of(entry, trees))
    return START_CODE.format(here=os.path.join(copy.path, copies.START), root=copy.root, prefix=sys.prefix,
                             version=sys.version, entries=entries, by=copies.BY)
