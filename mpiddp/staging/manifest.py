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
from operator import itemgetter
from typing import NamedTuple
from zlib import crc32

# File systems that hosts share, as /proc/self/mountinfo names them (man 5 proc_pid_mountinfo). FUSE counts as shared,
# except for images and for what caches on the host by itself.
SHARED_FILE_SYSTEMS = frozenset((
    "nfs", "nfs3", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "pvfs2", "9p",
    "wekafs", "glusterfs", "ocfs2", "gfs2", "dvs"))
LOCAL_FUSE = frozenset(f"fuse.{name}" for name in (
    "squashfuse", "squashfuse_ll", "fuse-overlayfs", "cvmfs2", "lxcfs", "gocryptfs", "portal", "erofsfuse"))
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # in sys.path, with what pip has installed
ZIPPED_LIBRARY = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
STANDARD_LIBRARY = os.path.dirname(os.__file__)
SYSTEM_PREFIXES = ("/", "/usr", "/usr/local", "/opt", "/home")  # with more than an environment


class Mount(NamedTuple):
    """A mounted file system: its mount point, its type, and its options."""

    path: str
    file_system: str
    options: frozenset[str]

    @property
    def is_shared(self) -> bool:
        """Whether other hosts see the same files."""
        is_shared_fuse = self.file_system.startswith("fuse") and self.file_system not in LOCAL_FUSE
        return self.file_system in SHARED_FILE_SYSTEMS or is_shared_fuse


def mounts() -> list[Mount]:
    r"""Return the mounted file systems, the last mounted at the end. The kernel writes a path's spaces as \040."""
    mounted = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields, _, kind = (part.split(b" ") for part in line.partition(b" - "))
            path = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), fields[4])
            mounted.append(Mount(os.fsdecode(path), os.fsdecode(kind[0]),
                                 frozenset(os.fsdecode(fields[5]).split(","))))
    return mounted


def mount_of(path: str, mounted: Sequence[Mount]) -> Mount:
    """Return the file system of a path without links."""
    return max((mount for mount in reversed(mounted) if is_within(path, mount.path)), key=lambda mount: len(mount.path))


def environment_roots() -> dict[str, tuple[int, int]]:
    """Return the topmost folders of the environment on a shared file system, each with its inode and time of change.

    The environment is Python's own folder (sys.prefix, sys.base_prefix) and the folders for packages. Other entries of
    sys.path, such as the script's folder or an editable install, are the user's, who writes there.
    """
    mounted, roots = mounts(), {}
    for root in outermost(environment_folders(sys.path)):
        if mount_of(os.path.realpath(root), mounted).is_shared and os.path.isdir(root):
            status = os.stat(root)
            roots[root] = status.st_ino, status.st_mtime_ns
    return roots


def environment_name(roots: Sequence[str]) -> str:
    """Return a name for an environment: a hash of its folders and its Python."""
    key = repr((tuple(roots), sys.prefix, sys.version, os.uname().machine))
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def environment_folders(path: Sequence[str]) -> list[str]:
    """Return the folders of the environment that contain entries of sys.path."""
    folders = []
    for entry in filter(is_environment_entry, path):
        prefix = root_of(entry, (sys.prefix, sys.base_prefix, sys.exec_prefix))
        folders.append(prefix if prefix and prefix not in SYSTEM_PREFIXES else entry)
    return folders


def is_environment_entry(entry: str) -> bool:
    """Return whether an entry of sys.path is Python's own, or has what pip has installed."""
    users = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    is_own = os.path.basename(entry) in (*PACKAGE_FOLDERS, ZIPPED_LIBRARY) or entry == users
    return os.path.isabs(entry) and (is_own or is_within(entry, STANDARD_LIBRARY))


def is_environment_file(path: str, root: str) -> bool:
    """Return whether a file in a root is the environment's: a prefix may contain the user's own folders, too."""
    return root not in (sys.prefix, sys.base_prefix, sys.exec_prefix) or path[len(root) + 1:].startswith("lib")


def outermost(folders: Iterable[str]) -> list[str]:
    """Return the folders that are in none of the others."""
    normal = sorted({os.path.normpath(folder) for folder in folders})
    return [folder for folder in normal if root_of(folder, normal) == folder]


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or in it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def root_of(path: str, folders: Iterable[str]) -> str:
    """Return the first of the folders that contains a path, "" if none does."""
    return next((folder for folder in folders if is_within(path, folder)), "")


PYCACHE = "__pycache__"
CHUNK_BYTES = 2**20
PIECES_PER_CHUNK = 16  # they are read one after the other
MANY_FILES = 16  # of a folder with more, each node reads a part

Range = tuple[int, int]  # start and length


class File(NamedTuple):
    """A file to copy: its path, size in bytes, time of change in ns, and permissions."""

    path: str
    size: int
    mtime_ns: int
    mode: int


class Folder(NamedTuple):
    """A folder of the mirror: its time of change in ns, and its names, each with the target of a link or "".

    __pycache__ folders are not listed: their content follows from the sources.
    """

    path: str
    mtime_ns: int
    names: tuple[tuple[str, str], ...]


class Manifest(NamedTuple):
    """What a mirror of an environment's roots contains, sorted by path."""

    roots: tuple[str, ...]
    files: tuple[File, ...]
    folders: tuple[Folder, ...]

    def fingerprint(self) -> str:
        """Return a hash, which differs when a file or a folder has changed."""
        return hashlib.blake2b(repr(self).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def make_manifest(roots: Sequence[str], entries: Collection[File | Folder]) -> Manifest:
    """Return the manifest of folders that are listed up to their root, and of the files in them.

    The content of a folder that could not be listed is unknown.
    """
    folders: dict[str, Folder] = {}
    for folder in sorted(entry for entry in entries if isinstance(entry, Folder)):
        if folder.path in roots or os.path.dirname(folder.path) in folders:
            folders[folder.path] = folder
    files = sorted(entry for entry in entries if isinstance(entry, File) and listing_folder(entry.path) in folders)
    return Manifest(tuple(roots), tuple(files), tuple(folders.values()))


def parent_folders(paths: Iterable[str], roots: Collection[str]) -> list[str]:
    """Return the roots and the folders above paths in them, without __pycache__ folders."""
    folders = set(roots)
    for path in paths:
        folder = listing_folder(path) if root_of(path, roots) else ""
        while folder and folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    return sorted(folder for folder in folders if os.path.basename(folder) != PYCACHE)


def listing_folder(path: str) -> str:
    """Return the folder that lists a file; for a compiled module, the folder of its source."""
    folder = os.path.dirname(path)
    return os.path.dirname(folder) if os.path.basename(folder) == PYCACHE else folder


def reader_of(folder: str, nodes: int) -> int:
    """Return the number of the node that inspects a folder."""
    return crc32(folder.encode(errors="surrogateescape")) % nodes


def assign_readers(paths: Iterable[str], nodes: int) -> dict[str, int]:
    """Return the number of the node that inspects and reads each file: the one with its folder.

    Folders with MANY_FILES are shared out: a kernel looks up the names of a folder one after the other.
    """
    folder_of = {path: listing_folder(path) for path in paths}
    counts = Counter(folder_of.values())
    return {path: reader_of(f"{folder}/{os.path.basename(path).partition('.')[0]}", nodes)
            if counts[folder] > MANY_FILES else reader_of(folder, nodes) for path, folder in folder_of.items()}


class Piece(NamedTuple):
    """A part of a file: the file's number in the manifest, the start, and the length."""

    file: int
    start: int
    length: int


class Chunk(NamedTuple):
    """Pieces of files that are broadcast together, and the number of the node that reads them."""

    reader: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The bytes of the pieces."""
        return sum(piece.length for piece in self.pieces)


def plan_chunks(files: Sequence[File], nodes: int, readers: Mapping[str, int], limit: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks in order: small files from their readers, large files from all nodes in turn.

    Large files are put between small ones: these wait for look-ups, those for the network.
    """
    small: list[list[Chunk]] = [[] for _ in range(nodes)]
    large: list[Piece] = []
    for number, file in enumerate(files):
        if file.size > limit:
            large += [Piece(number, start, min(limit, file.size - start)) for start in range(0, file.size, limit)]
            continue
        chunks, piece = small[readers[file.path]], Piece(number, 0, file.size)
        if chunks and len(chunks[-1].pieces) < PIECES_PER_CHUNK and chunks[-1].size + file.size <= limit:
            chunks[-1] = Chunk(chunks[-1].reader, (*chunks[-1].pieces, piece))
        else:
            chunks.append(Chunk(readers[file.path], (piece,)))
    small_chunks = [chunk for turn in zip_longest(*small) for chunk in turn if chunk]
    large_chunks = [Chunk(number % nodes, (piece,)) for number, piece in enumerate(large)]
    placed = [((number + 0.5) / len(chunks), chunk) for chunks in (small_chunks, large_chunks)
              for number, chunk in enumerate(chunks)]
    return [chunk for _, chunk in sorted(placed, key=itemgetter(0))]
