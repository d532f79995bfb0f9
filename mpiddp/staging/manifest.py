"""What is staged, and in which chunks it travels: pure functions of what was found."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple
from zlib import crc32

from .roots import root_of

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
