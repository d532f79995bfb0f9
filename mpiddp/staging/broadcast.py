"""Look at files and folders of a shared file system in parallel, read a share of them, broadcast it over MPI."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING
from zlib import crc32

from ..base.errors import LocalLaunchError
from ..base.polling import poll_until
from ..base.stderr import write_line
from .manifest import Chunk, File, Folder, Piece, Range, root_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..bootstrap.rollcall import Rendezvous

PAGE = mmap.PAGESIZE
THREADS = 32  # look-ups and reads that wait for the server at the same time
PREFETCH_THREADS, PREFETCH_BYTES = 4, 2**22  # bytes that a thread reads at a time
CHUNKS_READ_AHEAD = 48  # of this node, before their turn
CHUNKS_IN_FLIGHT = 32
REMIND_AFTER_S = 10.0
POLL_S = 0.02  # at once, for a chunk
CHECKSUM = struct.Struct("<q")  # of a piece (zlib.crc32)
NOT_AS_LISTED = -1  # in its place: a file has changed, or cannot be read


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


def list_all(files: Sequence[str], folders: Sequence[str], roots: Sequence[str]) -> list[File | Folder]:
    """Return what is at these paths.

    The names of a folder do not follow each other: the kernel looks them up one after the other (FUSE of Linux 6.18: a
    fifth of the speed).
    """
    def listed(path: str) -> File | Folder | None:
        return list_folder(path) if path in known_folders else list_file(path, roots)

    known_folders = {*folders}
    with threads(THREADS) as pool:
        apart = sorted([*files, *folders], key=lambda path: crc32(path.encode(errors="surrogateescape")))
        return [found for found in pool.map(listed, apart) if found]


def list_file(path: str, roots: Sequence[str]) -> File | None:
    """Return a file, or the file outside of the roots to which a link leads; None for anything else.

    A link to another place in the roots belongs to the folder that it is in.
    """
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            if root_of(os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path))), roots):
                return None
            status = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return File(path, status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode))


def list_folder(path: str) -> Folder | None:
    """Return what is in a folder; None for anything else."""
    try:
        with os.scandir(path) as entries:
            names = [(entry.name, os.readlink(entry.path) if entry.is_symlink() else "") for entry in entries]
        return Folder(path, os.stat(path).st_mtime_ns, tuple(sorted(names)))
    except OSError:
        return None


@contextlib.contextmanager
def prefetching(files: Mapping[str, Sequence[Range]]) -> Iterator[None]:
    """Read ranges of files into the page cache while this block runs."""
    with threads(PREFETCH_THREADS) as pool:
        for path, ranges in files.items():
            for start, length in ranges:
                for block in range(start, start + length, PREFETCH_BYTES):
                    pool.submit(prefetch, path, block, min(PREFETCH_BYTES, start + length - block))
        yield


def prefetch(path: str, start: int, length: int) -> None:
    """Read a range of a file into the page cache; what cannot be read is left to whoever needs it."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_SEQUENTIAL)
        os.pread(file.fileno(), length, start)


def read_chunk(files: Sequence[File], chunk: Chunk) -> memoryview:
    """Return a buffer with the pieces of a chunk and their checksums.

    Large files bypass the page cache where their file system allows that (O_DIRECT in man 2 open): a node would have
    them twice in memory. Their pieces begin at whole pages, and so does the buffer.
    """
    buffer, start, checksums = buffer_for(chunk), 0, b""
    for piece in chunk.pieces:
        checksum = NOT_AS_LISTED
        for direct in (True, False) if piece.length < files[piece.file].size else (False,):
            with contextlib.suppress(OSError):
                checksum = read_piece(files[piece.file], piece, buffer[start:], direct)
                break
        checksums += CHECKSUM.pack(checksum)
        start += piece.length
    buffer[start:start + len(checksums)] = checksums
    return buffer


def read_piece(file: File, piece: Piece, into: memoryview, direct: bool) -> int:
    """Read a piece and return its checksum, NOT_AS_LISTED if the file has changed; raise OSError.

    A small file comes by one request, with one byte more if it has grown. Its status is asked for before, which after
    opening asks its server nothing; that of a large one after each piece.
    """
    is_whole = piece.length == file.size
    wanted = into[:piece.length + 1] if is_whole else into[:-(-piece.length // PAGE) * PAGE]
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        status, count = os.fstat(descriptor), 0
        while count < piece.length and (more := os.preadv(descriptor, [wanted[count:]], piece.start + count)):
            count += more
        if not is_whole:
            status, count = os.fstat(descriptor), min(count, piece.length)
    finally:
        os.close(descriptor)
    is_same = count == piece.length and (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)
    return crc32(into[:piece.length]) if is_same else NOT_AS_LISTED


def broadcast(
    roll: Rendezvous, chunks: Sequence[Chunk], deadline: float, read: Callable[[Chunk], memoryview],
    begin: Callable[[], None], write: Callable[[Chunk, memoryview], None],
) -> None:
    """Let each node read its chunks and broadcast them to the others: each byte enters a node once. Collective.

    A thread calls `begin`, then `write` with each chunk, in their order, and its buffer. Raises LocalLaunchError at
    the deadline, a time of time.monotonic().
    """
    unread = deque(chunk for chunk in chunks if chunk.reader == roll.rank)
    reading: deque[Future[memoryview]] = deque()
    in_flight: deque[tuple[Chunk, memoryview, MPI.Request]] = deque()
    writing: deque[Future[None]] = deque()
    with threads(THREADS) as pool, threads(1) as writer:
        writing.append(writer.submit(begin))

        def is_read() -> bool:
            roll.comm.Iprobe()  # moves what is in flight: a request that is complete moves no other one
            return reading[0].done()

        def receive() -> None:
            chunk, buffer, request = in_flight.popleft()
            await_node(roll, chunk.reader, deadline, request.Test)
            writing.append(writer.submit(write, chunk, buffer))
            if len(writing) > CHUNKS_READ_AHEAD:
                writing.popleft().result()

        for chunk in chunks:
            while unread and len(reading) < CHUNKS_READ_AHEAD:
                reading.append(pool.submit(read, unread.popleft()))
            if chunk.reader == roll.rank:
                await_node(roll, roll.rank, deadline, is_read)
                buffer = reading.popleft().result()
            else:
                buffer = buffer_for(chunk)
            in_flight.append((chunk, buffer, roll.comm.Ibcast(buffer, root=chunk.reader)))
            if len(in_flight) == CHUNKS_IN_FLIGHT:
                receive()
        while in_flight:
            receive()
        for future in writing:
            future.result()


def await_node(roll: Rendezvous, node: int, deadline: float, look: Callable[[], bool]) -> None:
    """Wait for a node until `look` returns True; MPI moves data only while it is called."""
    def poll() -> bool | None:
        until = time.monotonic() + POLL_S
        while not (found := look()) and time.monotonic() < until:
            time.sleep(0)  # lets this process's other threads run
        return found or None

    def remind(waited_s: float) -> None:
        if roll.rank == 0:
            write_line(f"mpiddp: waiting {waited_s:.0f} s for {roll.name(node)} (staging)")

    poll_until(poll, deadline, lambda: LocalLaunchError(
        "startup-timeout",
        actual=f"{roll.name(node)} has not read its part of the environment in time",
        needed="a file system that answers on every node",
        do="look at that host; more time: --startup-timeout SECONDS; or start without --stage",
    ), remind, REMIND_AFTER_S)


def buffer_for(chunk: Chunk) -> memoryview:
    """Return a buffer for a chunk's data, the checksums of its pieces, and a page more to read into.

    It begins at a whole page.
    """
    return memoryview(mmap.mmap(-1, chunk.size + len(chunk.pieces) * CHECKSUM.size + PAGE))


def pieces_in(chunk: Chunk, buffer: memoryview) -> Iterator[tuple[Piece, memoryview, bool]]:
    """Return each piece of a chunk with its data, and whether its file is as it was listed.

    Raises ValueError if something else came than was read.
    """
    checksums = CHECKSUM.iter_unpack(buffer[chunk.size:chunk.size + len(chunk.pieces) * CHECKSUM.size])
    start = 0
    for piece, (checksum,) in zip(chunk.pieces, checksums, strict=True):
        data, start = buffer[start:start + piece.length], start + piece.length
        if checksum not in (NOT_AS_LISTED, crc32(data)):
            raise ValueError("what came is not what was read")
        yield piece, data, checksum != NOT_AS_LISTED
