"""What is staged, and in which parts it travels: pure functions of what is there."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple
from zlib import crc32

from .trees import tree_of

COMPILED = "__pycache__"
CHUNK = 2**20  # bytes that travel together
SEVERAL = 8  # chunks of a file that one node reads after another
CROWD = 16  # files of a folder
PIECES = 16  # in a chunk: they are read one after the other
SELDOM = 2**24  # bytes: only larger files are left where they are when little of them is touched
PER_START = 16  # so many times what is touched of a file may be copied for the starts to come

Range = tuple[int, int]  # where it begins, and its length


class File(NamedTuple):
    """A file that is copied: its path, size in bytes, time of change in ns, and permissions."""

    path: str
    size: int
    mtime_ns: int
    mode: int


class Folder(NamedTuple):
    """A folder that the mirror has: its time of change in ns, and what is in it.

    `names` have beside each the text of a link that stays as it is, empty for everything else.
    """

    path: str
    mtime_ns: int
    names: tuple[tuple[str, str], ...]


class Manifest(NamedTuple):
    """What a mirror of `trees` holds; all sorted by path.

    `others` are paths that were wanted and are no copies: not there, links, or large and little touched.
    Folders of compiled modules are not listed: what is in them follows from the sources beside them.
    """

    trees: tuple[str, ...]
    files: tuple[File, ...]
    folders: tuple[Folder, ...]
    others: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of the files."""
        return sum(file.size for file in self.files)

    def sources(self) -> list[File]:
        """Return the files but for those that Python has compiled, which it does again where a source has changed."""
        return [file for file in self.files if os.path.basename(os.path.dirname(file.path)) != COMPILED]

    def share(self, node: int, nodes: int) -> tuple[list[File], list[Folder]]:
        """Return the sources and the folders at which a node looks, to see whether they are as they were."""
        sources = self.sources()
        readers = readers_of([file.path for file in sources], nodes)
        return ([file for file, reader in zip(sources, readers, strict=True) if reader == node],
                [folder for folder in self.folders if reader_of(folder.path, nodes) == node])

    def lacks(self, paths: Iterable[str]) -> int:
        """Return how many of these paths were not wanted when this was made."""
        return len({*paths} - {file.path for file in self.files} - {*self.others})

    def fingerprint(self) -> str:
        """Return a name for exactly this; it differs where a file or a folder has changed since."""
        return hashlib.blake2b(repr(self).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def folders_of(paths: Iterable[str], trees: Sequence[str]) -> list[str]:
    """Return the trees and the folders above some paths in them, without those of compiled modules."""
    found = set(trees)
    for path in paths:
        tree = tree_of(path, trees)
        while tree and path != tree:
            path = os.path.dirname(path)
            if path in found:
                break
            found.add(path)
    return sorted(folder for folder in found if os.path.basename(folder) != COMPILED)


def rooted(folders: Iterable[Folder], trees: Sequence[str]) -> list[Folder]:
    """Return the folders, sorted, that are known up to their tree: of others, who knows what else is in them."""
    found: list[Folder] = []
    known: set[str] = set()
    for folder in sorted(folders):
        if folder.path in trees or os.path.dirname(folder.path) in known:
            found.append(folder)
            known.add(folder.path)
    return found


def home_of(path: str) -> str:
    """Return the folder whose list has a file, or that of its source if Python has compiled it."""
    folder = os.path.dirname(path)
    return os.path.dirname(folder) if os.path.basename(folder) == COMPILED else folder


class Piece(NamedTuple):
    """A part of a file: the file's number in the manifest, where the part begins, how long it is."""

    file: int
    at: int
    length: int


class Chunk(NamedTuple):
    """What travels together: pieces of files, and the number of the node that reads them.

    Small files are read by the node that has looked at them: what it has learnt, another one would ask again.
    """

    reader: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The bytes of the pieces."""
        return sum(piece.length for piece in self.pieces)


def chunks(files: Sequence[File], nodes: int, others: Sequence[str] = (), limit: int = CHUNK) -> list[Chunk]:
    """Return the parts in which files travel, shared out among nodes; small files first, with large ones between.

    The nodes have looked at these files, and at `others`.

    Small files take the time of look-ups, large ones that of the line: read beside each other, they wait for both.
    """
    small, large = small_chunks(files, limit, nodes, others), large_chunks(files, limit, nodes)
    both = [((at + 0.5) / len(some), chunk) for some in (small, large) for at, chunk in enumerate(some)]
    return [chunk for _, chunk in sorted(both, key=lambda one: one[0])]


def reader_of(folder: str, nodes: int) -> int:
    """Return the number of the node that looks at a folder."""
    return crc32(folder.encode(errors="surrogateescape")) % nodes


def readers_of(paths: Collection[str], nodes: int) -> list[int]:
    """Return the number of the node that looks at each of some files: that which has its folder, so others need not.

    The files of a large folder are shared out: a kernel asks for the names of one folder one after the other.
    """
    crowded = {home for home, number in Counter(map(home_of, paths)).items() if number > CROWD}
    return [reader_of(f"{home}/{os.path.basename(path).partition('.')[0]}" if home in crowded else home, nodes)
            for path in paths for home in (home_of(path),)]


def small_chunks(files: Sequence[File], limit: int, nodes: int, others: Sequence[str]) -> list[Chunk]:
    """Return the chunks of files that fit into one, several in each; the nodes take turns."""
    found: list[list[Chunk]] = [[] for _ in range(nodes)]
    pieces: list[list[Piece]] = [[] for _ in range(nodes)]
    readers = readers_of([*(file.path for file in files), *others], nodes)
    for number, (file, node) in enumerate(zip(files, readers, strict=False)):
        if file.size > limit:
            continue
        if len(pieces[node]) == PIECES or sum(piece.length for piece in pieces[node]) + file.size > limit:
            found[node].append(Chunk(node, tuple(pieces[node])))
            pieces[node] = []
        pieces[node].append(Piece(number, 0, file.size))
    for node, some in enumerate(pieces):
        found[node] += [Chunk(node, tuple(some))] if some else []
    return [chunk for turn in zip_longest(*found) for chunk in turn if chunk is not None]


def large_chunks(files: Sequence[File], limit: int, nodes: int) -> list[Chunk]:
    """Return the chunks of files that need several; some that follow each other have the same reader."""
    pieces = [Piece(number, at, min(limit, file.size - at)) for number, file in enumerate(files) if file.size > limit
              for at in range(0, file.size, limit)]
    return [Chunk(at // SEVERAL % nodes, (piece,)) for at, piece in enumerate(pieces)]


def worth_copying(size: int, touched: Sequence[Range] | None, nodes: int, keep: bool) -> bool:
    """Tell whether a file is copied: not a large one of which so little is touched, if that is known, that it pays.

    Where it is not, each node reads what is touched. A copy that is kept serves later starts, too.
    """
    if touched is None or size <= SELDOM:
        return True
    return sum(length for _, length in touched) * max(nodes, PER_START if keep else 1) >= size
