"""Inspect and read files on a shared file system in parallel; each node reads a share and broadcasts it over MPI."""

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
READ_THREADS = 32  # that wait for the file server concurrently
PREFETCH_THREADS, PREFETCH_BYTES = 4, 2**22  # bytes per read
CHUNKS_READ_AHEAD = 48  # of this node
CHUNKS_IN_FLIGHT = 32
REMIND_AFTER_S = 10.0
MPI_POLL_S = 0.02  # of polling without a pause
CHECKSUM = struct.Struct("<q")  # of a piece (zlib.crc32)
CHANGED = -1  # instead of a checksum: the file has changed since it was inspected, or cannot be read


@contextlib.contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool; wait for its threads at the end, but not after an error: one may hang in a file system."""
    pool = ThreadPoolExecutor(threads, "mpiddp-stage")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def inspect_paths(files: Sequence[str], folders: Sequence[str], roots: Sequence[str]) -> list[File | Folder]:
    """Return the files and folders at these paths.

    They are inspected in shuffled order, because the kernel looks up names in the same folder serially (with FUSE of
    Linux 6.18, at a fifth of the speed).
    """
    def inspect(path: str) -> File | Folder | None:
        return inspect_folder(path) if path in known_folders else inspect_file(path, roots)

    known_folders = {*folders}
    shuffled = sorted([*files, *folders], key=lambda path: crc32(path.encode(errors="surrogateescape")))
    with thread_pool(READ_THREADS) as pool:
        return [entry for entry in pool.map(inspect, shuffled) if entry]


def inspect_file(path: str, roots: Sequence[str]) -> File | None:
    """Return a file, or the file outside of the roots to which a link leads; None for anything else.

    Links to paths in the roots are listed by their folder (Folder.names).
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


def inspect_folder(path: str) -> Folder | None:
    """Return a folder with the names in it; None for anything else."""
    try:
        with os.scandir(path) as entries:
            names = [(entry.name, os.readlink(entry.path) if entry.is_symlink() else "") for entry in entries]
        return Folder(path, os.stat(path).st_mtime_ns, tuple(sorted(names)))
    except OSError:
        return None


@contextlib.contextmanager
def prefetching(files: Mapping[str, Sequence[Range]]) -> Iterator[None]:
    """Read ranges of files into the page cache while this block runs."""
    with thread_pool(PREFETCH_THREADS) as pool:
        for path, ranges in files.items():
            for start, length in ranges:
                for block in range(start, start + length, PREFETCH_BYTES):
                    pool.submit(prefetch_range, path, block, min(PREFETCH_BYTES, start + length - block))
        yield


def prefetch_range(path: str, start: int, length: int) -> None:
    """Read a range of a file into the page cache, if it can be read."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_SEQUENTIAL)
        os.pread(file.fileno(), length, start)


def read_chunk(files: Sequence[File], chunk: Chunk) -> memoryview:
    """Return a buffer with the pieces of a chunk and their checksums.

    Large files are read with O_DIRECT if their file system supports it (man 2 open), so that they are not in memory
    twice. Their pieces begin at page boundaries, and so does the buffer.
    """
    buffer, start, checksums = new_buffer(chunk), 0, b""
    for piece in chunk.pieces:
        checksum = CHANGED
        for direct in (True, False) if piece.length < files[piece.file].size else (False,):
            with contextlib.suppress(OSError):
                checksum = read_piece(files[piece.file], piece, buffer[start:], direct)
                break
        checksums += CHECKSUM.pack(checksum)
        start += piece.length
    buffer[start:start + len(checksums)] = checksums
    return buffer


def read_piece(file: File, piece: Piece, target: memoryview, direct: bool) -> int:
    """Read a piece and return its checksum, CHANGED if the file has changed; raise OSError.

    A small file is read with one request, for one byte more than its size, to detect that it has grown. Its status is
    read first: right after opening, this needs no request. The status of a large file is read after each piece.
    """
    is_whole = piece.length == file.size
    wanted = target[:piece.length + 1] if is_whole else target[:-(-piece.length // PAGE) * PAGE]
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
    return crc32(target[:piece.length]) if is_same else CHANGED


def broadcast(
    rendezvous: Rendezvous, chunks: Sequence[Chunk], deadline: float, read: Callable[[Chunk], memoryview],
    begin: Callable[[], None], write: Callable[[Chunk, memoryview], None],
) -> None:
    """Each node reads its chunks with `read` and broadcasts them, so that each byte enters a node once. Collective.

    A thread calls `begin`, then `write` with each chunk, in order, and its buffer. Raises LocalLaunchError at the
    deadline (time.monotonic()).
    """
    unread = deque(chunk for chunk in chunks if chunk.reader == rendezvous.rank)
    reading: deque[Future[memoryview]] = deque()
    in_flight: deque[tuple[Chunk, memoryview, MPI.Request]] = deque()
    writing: deque[Future[None]] = deque()
    with thread_pool(READ_THREADS) as pool, thread_pool(1) as writer:
        writing.append(writer.submit(begin))

        def is_read() -> bool:
            rendezvous.comm.Iprobe()  # makes MPI progress, which testing a complete request does not
            return reading[0].done()

        def receive() -> None:
            chunk, buffer, request = in_flight.popleft()
            wait_for_node(rendezvous, chunk.reader, deadline, request.Test)
            writing.append(writer.submit(write, chunk, buffer))
            if len(writing) > CHUNKS_READ_AHEAD:
                writing.popleft().result()

        for chunk in chunks:
            while unread and len(reading) < CHUNKS_READ_AHEAD:
                reading.append(pool.submit(read, unread.popleft()))
            if chunk.reader == rendezvous.rank:
                wait_for_node(rendezvous, rendezvous.rank, deadline, is_read)
                buffer = reading.popleft().result()
            else:
                buffer = new_buffer(chunk)
            in_flight.append((chunk, buffer, rendezvous.comm.Ibcast(buffer, root=chunk.reader)))
            if len(in_flight) == CHUNKS_IN_FLIGHT:
                receive()
        while in_flight:
            receive()
        for future in writing:
            future.result()


def wait_for_node(rendezvous: Rendezvous, node: int, deadline: float, is_done: Callable[[], bool]) -> None:
    """Wait for a node until `is_done`, which calls MPI: MPI makes progress only inside its calls."""
    def poll() -> bool | None:
        until = time.monotonic() + MPI_POLL_S
        while not (done := is_done()) and time.monotonic() < until:
            time.sleep(0)  # lets other threads of this process run
        return done or None

    def remind(waited_s: float) -> None:
        if rendezvous.rank == 0:
            write_line(f"mpiddp: still waiting after {waited_s:.0f} s for {rendezvous.name(node)} (staging)")

    poll_until(poll, deadline, lambda: LocalLaunchError(
        "startup-timeout",
        actual=f"{rendezvous.name(node)} did not read its share of the environment before the startup timeout",
        needed="a responsive file system on every node",
        do="check that host, raise --startup-timeout SECONDS, or start without --stage",
    ), remind, REMIND_AFTER_S)


def new_buffer(chunk: Chunk) -> memoryview:
    """Return a page-aligned buffer for a chunk's data, its checksums, and an extra page to read into."""
    return memoryview(mmap.mmap(-1, chunk.size + len(chunk.pieces) * CHECKSUM.size + PAGE))


def checked_pieces(chunk: Chunk, buffer: memoryview) -> Iterator[tuple[Piece, memoryview, bool]]:
    """Yield each piece of a chunk, its data, and whether its file is unchanged since it was inspected.

    Raises ValueError if the data does not match its checksum.
    """
    checksums = CHECKSUM.iter_unpack(buffer[chunk.size:chunk.size + len(chunk.pieces) * CHECKSUM.size])
    start = 0
    for piece, (checksum,) in zip(chunk.pieces, checksums, strict=True):
        data, start = buffer[start:start + piece.length], start + piece.length
        if checksum not in (CHANGED, crc32(data)):
            raise ValueError("the received data does not match its checksum")
        yield piece, data, checksum != CHANGED
