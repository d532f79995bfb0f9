"""Look at files and folders of a shared file system, and read them, many at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar
from zlib import crc32

from .manifest import Chunk, File, Folder, Piece, Range
from .trees import within

PAGE = mmap.PAGESIZE
AHEAD, PART = 4, 2**20  # threads for a file, and bytes that each reads at a time
THREADS = 32  # look-ups that wait for the server at the same time
WHOLE, CHANGED, UNREADABLE = 0, 1, 2  # how a piece was read

Given = TypeVar("Given")
Found = TypeVar("Found")


class Seen(NamedTuple):
    """What is at some paths."""

    files: tuple[File, ...] = ()
    folders: tuple[Folder, ...] = ()


class Read(NamedTuple):
    """How a piece was read, and the checksum of what came (zlib.crc32)."""

    outcome: int
    checksum: int


@contextlib.contextmanager
def threads(number: int) -> Iterator[ThreadPoolExecutor]:
    """Return threads for this block, at whose end they are awaited; not if it fails: one may hang in a file system."""
    pool = ThreadPoolExecutor(number, "mpiddp-stage")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def in_parallel(work: Callable[[Given], Found], many: Sequence[Given]) -> list[Found]:
    """Return what `work` returns for each of many, in order."""
    with threads(THREADS) as pool:
        return list(pool.map(work, many))


def look(files: Sequence[str], folders: Sequence[str], trees: Iterable[str]) -> Seen:
    """Return what is at these paths. A link to another place of its tree is left to the folder that it is in."""
    trees = tuple(trees)
    asked = apart([*((path, list_folder) for path in folders),
                   *((path, lambda path: look_at_file(path, trees)) for path in files)], lambda one: one[0])
    found = in_parallel(lambda one: one[1](one[0]), asked)
    return Seen(tuple(one for one in found if isinstance(one, File)),
                tuple(one for one in found if isinstance(one, Folder)))


def apart(some: Iterable[Given], path_of: Callable[[Given], str]) -> list[Given]:
    """Return some that have paths in an order in which those of a folder do not follow each other.

    The kernel looks for several names of a folder one after the other (FUSE of Linux 6.18: a fifth of the speed).
    """
    return sorted(some, key=lambda one: crc32(path_of(one).encode(errors="surrogateescape")))


def unchanged(files: Sequence[File], folders: Sequence[Folder]) -> bool:
    """Tell whether files and folders are as they were."""
    def same(one: File | Folder) -> bool:
        try:
            about = os.stat(one.path)
        except OSError:
            return False
        return about.st_mtime_ns == one.mtime_ns and (isinstance(one, Folder) or about.st_size == one.size)

    both: list[File | Folder] = [*files, *folders]
    return all(in_parallel(same, apart(both, lambda one: one.path)))


def sizes(paths: Sequence[str]) -> list[int]:
    """Return the sizes of files in bytes, 0 for what is not there."""
    def size_of(path: str) -> int:
        try:
            return os.stat(path).st_size
        except OSError:
            return 0

    return in_parallel(size_of, paths)


def look_at_file(path: str, trees: Sequence[str]) -> File | None:
    """Return a file, or what a link to a file outside of the trees leads to; None for anything else."""
    try:
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode):
            target = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
            if any(within(target, tree) for tree in trees):
                return None
            about = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(about.st_mode):
        return None
    return File(path, about.st_size, about.st_mtime_ns, stat.S_IMODE(about.st_mode))


def list_folder(path: str) -> Folder | None:
    """Return what is in a folder; None for anything else."""
    try:
        with os.scandir(path) as entries:
            names = [(entry.name, os.readlink(entry.path) if entry.is_symlink() else "") for entry in entries]
        return Folder(path, os.stat(path).st_mtime_ns, tuple(sorted(names)))
    except OSError:
        return None


@contextlib.contextmanager
def reading_ahead(files: Mapping[str, Sequence[Range]]) -> Iterator[None]:
    """Read parts of files into the page cache while this block runs; what cannot be read is left to who needs it."""
    with threads(AHEAD) as pool:
        for path, ranges in files.items():
            for number in range(AHEAD):
                pool.submit(warm, path, part_of(ranges, number))
        yield


def part_of(ranges: Sequence[Range], number: int) -> list[Range]:
    """Return a thread's part of ranges, those that follow each other: of AHEAD threads, the one with this number."""
    whole = sum(length for _, length in ranges)
    first, last = whole * number // AHEAD, whole * (number + 1) // AHEAD
    found, before = [], 0
    for at, length in ranges:
        begin, end = max(first - before, 0), min(last - before, length)
        if begin < end:
            found.append((at + begin, end - begin))
        before += length
    return found


def warm(path: str, ranges: Sequence[Range]) -> None:
    """Read ranges of a file into the page cache."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for at, length in ranges:
            for place in range(at, at + length, PART):
                os.pread(file.fileno(), min(PART, at + length - place), place)


class Source:
    """Reads chunks of files. A large file stays open from its first piece to its last one.

    Large files do not go through the page cache, where their file system allows that (O_DIRECT in man 2 open): a node
    would have them twice in memory. Their pieces begin at whole pages, and so does the buffer of such a chunk.
    """

    def __init__(self, files: Sequence[File], chunks: Iterable[Chunk]) -> None:
        """Be ready to read some chunks, each once."""
        self._files = files
        self._left = Counter(piece.file for chunk in chunks for piece in chunk.pieces)
        self._open: dict[int, int] = {}
        self._opening = threading.Lock()

    def read(self, chunk: Chunk, into: memoryview) -> list[Read]:
        """Read a chunk's pieces into a buffer, which has room for a page more, and return how each was read."""
        found, at = [], 0
        for piece in chunk.pieces:
            found.append(self._read_piece(piece, into[at:]))
            at += piece.length
        return found

    def _read_piece(self, piece: Piece, into: memoryview) -> Read:
        file = self._files[piece.file]
        large = piece.length < file.size
        try:
            descriptor = self._opened(piece.file) if large else os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return Read(UNREADABLE, 0)
        try:
            about = None if large else os.fstat(descriptor)
            count = read_at(descriptor, into, piece, large)
            about = about or os.fstat(descriptor)
        except OSError:
            return Read(UNREADABLE, 0)
        finally:
            self._close(piece.file, descriptor)
        same = count == piece.length and (about.st_size, about.st_mtime_ns) == (file.size, file.mtime_ns)
        return Read(WHOLE if same else CHANGED, crc32(into[:piece.length]))

    def _opened(self, number: int) -> int:
        with self._opening:
            if number not in self._open:
                self._open[number] = open_directly(self._files[number].path)
            return self._open[number]

    def _close(self, number: int, descriptor: int) -> None:
        """Close a file after its last piece."""
        with self._opening:
            self._left[number] -= 1
            if self._left[number] == 0:
                self._open.pop(number, None)
                os.close(descriptor)


def open_directly(path: str) -> int:
    """Open a file so that it does not go through the page cache if that works; raise OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.preadv(descriptor, [mmap.mmap(-1, PAGE)], 0)
    except OSError:
        os.close(descriptor)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return descriptor


def read_at(descriptor: int, into: memoryview, piece: Piece, large: bool) -> int:
    """Read a piece and return how many bytes were there, of a whole file one more if it has grown; raise OSError.

    A small file is looked at before: after opening, that asks its server nothing, and it comes by one request. A large
    one is looked at after each of its pieces.
    """
    at, wanted = 0, -(-piece.length // PAGE) * PAGE if large else piece.length + 1
    while at < piece.length and (count := os.preadv(descriptor, [into[at:wanted]], piece.at + at)):
        at += count
    return min(at, piece.length) if large else at
