"""The environment's roots on a shared file system, which of their files are staged, and in which chunks."""

from __future__ import annotations

import hashlib
import os
import re
import site
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple
from zlib import crc32

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


COMPILED = "__pycache__"
CHUNK_BYTES = 2**20
PIECES_PER_CHUNK = 16  # they are read one after the other
CROWDED_FOLDER = 16  # files

Range = tuple[int, int]  # where it begins, and its length


class File(NamedTuple):
    """A file that is copied: its path, size in bytes, time of change in ns, and permissions."""

    path: str
    size: int
    mtime_ns: int
    mode: int


class Folder(NamedTuple):
    """A folder of the mirror: its time of change in ns, and each name in it with the text of a link, else with "".

    The folders of compiled modules are not listed: what is in them follows from the sources beside them.
    """

    path: str
    mtime_ns: int
    names: tuple[tuple[str, str], ...]


class Manifest(NamedTuple):
    """What a mirror of an environment's roots holds; all sorted by path."""

    roots: tuple[str, ...]
    files: tuple[File, ...]
    folders: tuple[Folder, ...]

    def fingerprint(self) -> str:
        """Return a name for exactly this; it differs when a file or a folder has changed."""
        return hashlib.blake2b(repr(self).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def manifest_of(roots: Sequence[str], found: Collection[File | Folder]) -> Manifest:
    """Return the manifest of the folders that are known up to their root, and of the files in them.

    A folder that could not be listed contains more than is known.
    """
    listed: dict[str, Folder] = {}
    for folder in sorted(folder for folder in found if isinstance(folder, Folder)):
        if folder.path in roots or os.path.dirname(folder.path) in listed:
            listed[folder.path] = folder
    files = sorted(file for file in found if isinstance(file, File) and home_of(file.path) in listed)
    return Manifest(tuple(roots), tuple(files), tuple(listed.values()))


def folders_of(paths: Iterable[str], roots: Collection[str]) -> list[str]:
    """Return the roots and the folders above some paths in them, without those of compiled modules."""
    found = set(roots)
    for path in paths:
        folder = home_of(path) if root_of(path, roots) else ""
        while folder and folder not in found:
            found.add(folder)
            folder = os.path.dirname(folder)
    return sorted(folder for folder in found if os.path.basename(folder) != COMPILED)


def home_of(path: str) -> str:
    """Return the folder that lists a file, for a compiled module that of its source."""
    folder = os.path.dirname(path)
    return os.path.dirname(folder) if os.path.basename(folder) == COMPILED else folder


def node_of(folder: str, nodes: int) -> int:
    """Return the number of the node that looks at a folder."""
    return crc32(folder.encode(errors="surrogateescape")) % nodes


def readers_of(paths: Iterable[str], nodes: int) -> dict[str, int]:
    """Return for each file the number of the node that looks at it and reads it: the one that has its folder.

    The files of a crowded folder are shared out: a kernel looks up the names of one folder one after the other.
    """
    homes = {path: home_of(path) for path in paths}
    files = Counter(homes.values())
    return {path: node_of(f"{home}/{os.path.basename(path).partition('.')[0]}", nodes)
            if files[home] > CROWDED_FOLDER else node_of(home, nodes) for path, home in homes.items()}


class Piece(NamedTuple):
    """A part of a file: the file's number in the manifest, where the part begins, how long it is."""

    file: int
    start: int
    length: int


class Chunk(NamedTuple):
    """Pieces of files that travel together, and the number of the node that reads them."""

    reader: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The bytes of the pieces."""
        return sum(piece.length for piece in self.pieces)


def plan_chunks(files: Sequence[File], nodes: int, readers: Mapping[str, int], limit: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks in which files travel, in order: small files by their readers, large ones by turns.

    Large files are put between small ones: these wait for look-ups, those for the line.
    """
    small: list[list[Chunk]] = [[] for _ in range(nodes)]
    large: list[Piece] = []
    for number, file in enumerate(files):
        if file.size > limit:
            large += [Piece(number, start, min(limit, file.size - start)) for start in range(0, file.size, limit)]
            continue
        own, piece = small[readers[file.path]], Piece(number, 0, file.size)
        if own and len(own[-1].pieces) < PIECES_PER_CHUNK and own[-1].size + file.size <= limit:
            own[-1] = Chunk(own[-1].reader, (*own[-1].pieces, piece))
        else:
            own.append(Chunk(readers[file.path], (piece,)))
    in_turn = [chunk for turn in zip_longest(*small) for chunk in turn if chunk]
    by_turns = [Chunk(number % nodes, (piece,)) for number, piece in enumerate(large)]
    placed = [((number + 0.5) / len(some), chunk) for some in (in_turn, by_turns) for number, chunk in enumerate(some)]
    return [chunk for _, chunk in sorted(placed, key=lambda one: one[0])]
