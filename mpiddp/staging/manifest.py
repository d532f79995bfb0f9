"""The environment's roots on a shared file system, the files of them to stage, and the chunks to broadcast."""

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

# Shared file systems, by their names in /proc/self/mountinfo (man 5 proc_pid_mountinfo). FUSE counts as shared, except
# for images and for file systems that cache on the host.
SHARED_FILE_SYSTEMS = frozenset((
    "nfs", "nfs3", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "pvfs2", "9p",
    "wekafs", "glusterfs", "ocfs2", "gfs2", "dvs"))
LOCAL_FUSE = frozenset(f"fuse.{name}" for name in (
    "squashfuse", "squashfuse_ll", "fuse-overlayfs", "cvmfs2", "lxcfs", "gocryptfs", "portal", "erofsfuse"))
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # into which pip installs
ZIPPED_LIBRARY = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
STANDARD_LIBRARY = os.path.dirname(os.__file__)
SYSTEM_PREFIXES = ("/", "/usr", "/usr/local", "/opt", "/home")  # which contain more than an environment


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
    r"""Return the mounted file systems in the order of mounting. The kernel writes spaces in paths as \040."""
    mounted = []
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields, _, kind = (part.split(b" ") for part in line.partition(b" - "))
            path = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), fields[4])
            mounted.append(Mount(os.fsdecode(path), os.fsdecode(kind[0]),
                                 frozenset(os.fsdecode(fields[5]).split(","))))
    return mounted


def mount_of(path: str, mounted: Sequence[Mount]) -> Mount:
    """Return the file system that contains a path without links."""
    return max((mount for mount in reversed(mounted) if is_within(path, mount.path)), key=lambda mount: len(mount.path))


def environment_roots() -> dict[str, tuple[int, int]]:
    """Return the topmost folders of the environment on a shared file system, each with its inode and time of change.

    The environment is Python's own folder (sys.prefix, sys.base_prefix) and the folders of installed packages. Other
    entries of sys.path, such as the script's folder or an editable install, belong to the user, who edits them.
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
    """Return whether an entry of sys.path is Python's own, or a folder of installed packages."""
    users = site.getusersitepackages() if site.ENABLE_USER_SITE else ""
    is_own = os.path.basename(entry) in (*PACKAGE_FOLDERS, ZIPPED_LIBRARY) or entry == users
    return os.path.isabs(entry) and (is_own or is_within(entry, STANDARD_LIBRARY))


def is_environment_file(path: str, root: str) -> bool:
    """Return whether a file in a root belongs to the environment: a prefix may also contain the user's own folders."""
    return root not in (sys.prefix, sys.base_prefix, sys.exec_prefix) or path[len(root) + 1:].startswith("lib")


def outermost(folders: Iterable[str]) -> list[str]:
    """Return the folders that are not inside any other."""
    normal = sorted({os.path.normpath(folder) for folder in folders})
    return [folder for folder in normal if root_of(folder, normal) == folder]


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is the folder or inside it."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def root_of(path: str, folders: Iterable[str]) -> str:
    """Return the first of the folders that contains a path, "" if none does."""
    return next((folder for folder in folders if is_within(path, folder)), "")


PYCACHE = "__pycache__"
CHUNK_BYTES = 2**20
PIECES_PER_CHUNK = 16  # which are read one after the other
MANY_FILES = 16  # folders with more files are divided among the nodes

Range = tuple[int, int]  # start and length


class File(NamedTuple):
    """A file to copy: its path, size in bytes, time of change in ns, and permissions."""

    path: str
    size: int
    mtime_ns: int
    mode: int


class Folder(NamedTuple):
    """A folder of the mirror: its time of change in ns, and the names in it, each with a link's target or "".

    __pycache__ folders are omitted: their content follows from the sources.
    """

    path: str
    mtime_ns: int
    names: tuple[tuple[str, str], ...]


class Manifest(NamedTuple):
    """The content of a mirror of an environment's roots, sorted by path."""

    roots: tuple[str, ...]
    files: tuple[File, ...]
    folders: tuple[Folder, ...]

    def fingerprint(self) -> str:
        """Return a hash that changes with any file or folder."""
        return hashlib.blake2b(repr(self).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def make_manifest(roots: Sequence[str], entries: Collection[File | Folder]) -> Manifest:
    """Return the manifest of the folders whose parents, up to a root, could all be listed, and of the files in them."""
    folders: dict[str, Folder] = {}
    for folder in sorted(entry for entry in entries if isinstance(entry, Folder)):
        if folder.path in roots or os.path.dirname(folder.path) in folders:
            folders[folder.path] = folder
    files = sorted(entry for entry in entries if isinstance(entry, File) and listing_folder(entry.path) in folders)
    return Manifest(tuple(roots), tuple(files), tuple(folders.values()))


def parent_folders(paths: Iterable[str], roots: Collection[str]) -> list[str]:
    """Return the roots and, for paths in them, all folders above, without __pycache__ folders."""
    folders = set(roots)
    for path in paths:
        folder = listing_folder(path) if root_of(path, roots) else ""
        while folder and folder not in folders:
            folders.add(folder)
            folder = os.path.dirname(folder)
    return sorted(folder for folder in folders if os.path.basename(folder) != PYCACHE)


def listing_folder(path: str) -> str:
    """Return the folder that lists a file; for bytecode, the folder of its source."""
    folder = os.path.dirname(path)
    return os.path.dirname(folder) if os.path.basename(folder) == PYCACHE else folder


def reader_of(folder: str, nodes: int) -> int:
    """Return the number of the node that inspects a folder."""
    return crc32(folder.encode(errors="surrogateescape")) % nodes


def assign_readers(paths: Iterable[str], nodes: int) -> dict[str, int]:
    """Return for each file the number of the node that inspects and reads it: by default the node of its folder.

    Folders with more than MANY_FILES are divided among the nodes: a kernel looks up names in the same folder serially.
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
    """Pieces of files that one node, `reader`, reads and broadcasts together."""

    reader: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The size of all pieces in bytes."""
        return sum(piece.length for piece in self.pieces)


def plan_chunks(files: Sequence[File], nodes: int, readers: Mapping[str, int], limit: int = CHUNK_BYTES) -> list[Chunk]:
    """Return the chunks in order: small files from their readers, large files from all nodes in turn.

    Large and small files are interleaved: small ones wait for lookups, large ones for the network.
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
