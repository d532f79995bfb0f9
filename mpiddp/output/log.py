"""The file with a rank's output: rotated, compressed when it is complete, and its entry in the index."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from ..base.files import open_for_reading, open_for_writing
from ..base.stderr import write_line, write_some
from ..failure.rank import LogPlan
from .index import TAIL_BYTES, note

SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
GZIP_LEVEL = 6  # gzip's own default
PIECE_BYTES = 2**20


def compress(path: str, compression: str, anew: bool = False) -> str:
    """Compress a file after what its compressed file has already, or `anew`; remove it and return the other's path.

    At any moment one of the two files has all of it. Raises OSError where that fails: then the file stays as it is.
    """
    import shutil  # which loads every compressor that Python has

    target = path + SUFFIXES[compression]
    with replacing(path, target) as sink:
        if not anew and os.path.exists(target):
            with os.fdopen(open_for_reading(target), "rb") as before:
                shutil.copyfileobj(before, sink, PIECE_BYTES)
        with os.fdopen(open_for_reading(path), "rb") as source, compressor(sink, compression) as compressed:
            shutil.copyfileobj(source, compressed, PIECE_BYTES)
    return target


def restore(path: str, compression: str) -> None:
    """Take a file out of its compressed file, in whose place it is then; do nothing if it is there already."""
    import shutil

    target = path + SUFFIXES[compression]
    if os.path.exists(path) or not os.path.exists(target):
        return
    with (replacing(target, path) as sink, os.fdopen(open_for_reading(target), "rb") as source,
          decompressor(source, compression) as data):
        shutil.copyfileobj(data, sink, PIECE_BYTES)


@contextlib.contextmanager
def replacing(source: str, target: str) -> Iterator[IO[bytes]]:
    """Yield a file that takes the place of `target` when the block has ended; then `source` is removed."""
    part = f"{target}.part"
    try:
        with os.fdopen(open_for_writing(part, job_folder=True), "wb") as sink:
            yield sink
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    os.unlink(source)


def compressor(sink: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file that compresses what is written to it; zstd's by Python (from 3.14) or by the package zstandard."""
    if compression == "gzip":
        import gzip

        return gzip.GzipFile("", "wb", GZIP_LEVEL, sink)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(sink, "wb")
    import zstandard

    found: contextlib.AbstractContextManager[Any] = zstandard.ZstdCompressor().stream_writer(sink, closefd=False)
    return found


def decompressor(source: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file of what a compressed one holds, of all its parts."""
    if compression == "gzip":
        import gzip

        return gzip.GzipFile("", "rb", fileobj=source)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(source, "rb")
    import zstandard

    found: contextlib.AbstractContextManager[Any] = zstandard.ZstdDecompressor().stream_reader(
        source, read_across_frames=True, closefd=False)
    return found


LINE_BYTES = 4096  # by which a file may grow over its limit until a line ends
LINE_END = re.compile(rb"[\r\n]")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Log:
    """The log of the rank called `who`, a plain file that is compressed, if that is wanted, when it is complete.

    What can't be written to it, on a full disk, is lost. That is said once on a node; the index tells it of each rank.
    What follows is tried again, in a file that is opened anew, and a line in the log says how much is missing before
    it.
    """

    def __init__(self, plan: LogPlan, who: str) -> None:
        self.lost = -1  # the position in the output of the first byte that was lost, -1 for none
        self._plan, self._who = plan, who
        self._descriptor = -1  # of the file, -1 where it is closed
        self._size = 0  # of the file, in bytes
        self._at = -1  # the position of the next byte, after what the file held before; -1 before that is known
        self._missing = 0  # bytes since the last that was written
        self._ends_line = True
        self._tail = b""
        self._compressing: threading.Thread | None = None
        self._saying: socket.socket | None = None
        with contextlib.suppress(OSError):  # that is told of when there is something to be written
            self._open()

    def write(self, data: bytes) -> None:
        """Write what the rank has written."""
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._write_lines(data)

    def write_stack(self, text: str) -> None:
        """Write the stack of a crash, which is no output of the rank's."""
        self._write_lines(b"\n" * (not self._ends_line) + text.encode(errors="replace") + b"\n")

    def close(self, is_complete: bool) -> None:
        """Close the file, compress it if it `is_complete` and that is wanted, and fill in the index.

        What is written after this goes on in the file, or in a new one.
        """
        self._await_compression()
        self._close()
        is_there = is_complete and bool(self._plan.compression) and os.path.exists(self._plan.path)
        file = self._compress(self._plan.path) if is_there else None
        note(self._plan, file=file, lost=self.lost if self.lost >= 0 else None, tail=self._tail)

    def _write_lines(self, data: bytes) -> None:
        """Write data to one file, or the first lines of it to one and the rest to the next."""
        while data:
            count = len(data)
            if self._plan.most_bytes:
                with contextlib.suppress(OSError):
                    self._open()
                    self._rotate_if_full()
                    self._open()
                    count = fitting(data, self._plan.most_bytes - self._size) or count
            self._put(data[:count])
            data = data[count:]
        self._rotate_if_full()

    def _rotate_if_full(self) -> None:
        """Begin a new file if this one has its most bytes, at a line's end if that is near."""
        most = self._plan.most_bytes
        if not most or self._descriptor < 0 or self._size < most + (0 if self._ends_line else LINE_BYTES):
            return
        self._await_compression()
        former = f"{self._plan.path}.1"
        with contextlib.suppress(OSError, RuntimeError):  # that is tried again; no thread can be started
            is_there = os.path.exists(self._plan.path)  # nobody has removed it
            if is_there:
                os.replace(self._plan.path, former)
            self._close()
            if is_there and self._plan.compression:
                compressing = threading.Thread(target=self._compress, args=(former, True))
                compressing.start()
                self._compressing = compressing
            self._open()

    def _await_compression(self) -> None:
        """Wait until the last file that was rotated is compressed."""
        if self._compressing is not None:
            self._compressing.join()
            self._compressing = None

    def _compress(self, path: str, anew: bool = False) -> str | None:
        """Compress a file, `anew` in the place of the one before, and return the path; None if it stays as it is."""
        try:
            return compress(path, self._plan.compression, anew)
        except Exception as error:  # of a library, too
            if self._is_first():
                why = getattr(error, "strerror", "") or error
                write_line(f"mpiddp: {self._who}: cannot compress {path}: {why}; it stays as it is")
            return None

    def _restore(self) -> None:
        """Go on with a log of an earlier attempt, which is complete and compressed, so that it is rotated in time."""
        with contextlib.suppress(Exception):  # it stays as it is, and this one is compressed into it
            restore(self._plan.path, self._plan.compression)

    def _put(self, data: bytes) -> None:
        """Write as much of the data as the file takes."""
        mark = b"\n[mpiddp: %d bytes are missing here]\n" % self._missing if self._missing else b""
        rest = mark + data
        try:
            while rest:
                rest = rest[self._write(rest):]
        except OSError as error:
            self._close()
            self._fail(error, max(self._at, 0) + len(data) - min(len(rest), len(data)))
        self._at = max(self._at, 0) + len(data)
        self._missing = len(rest) if len(rest) <= len(data) else self._missing + len(data)
        self._ends_line = data.endswith((b"\n", b"\r"))

    def _write(self, data: bytes) -> int:
        """Write some of the data, in a file that is opened again if it takes none for another reason than room.

        The server of a shared file system may have come back, and not know the file any more that was open (ESTALE).
        """
        self._open()
        try:
            count = write_some(self._descriptor, data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            self._close()
            self._open()
            count = write_some(self._descriptor, data)
        self._size += count
        return count

    def _open(self) -> None:
        if self._descriptor < 0:
            if self._at < 0 and self._plan.most_bytes and self._plan.compression:
                self._restore()
            self._descriptor = open_for_writing(self._plan.path, append=True, job_folder=True)
            self._size = os.fstat(self._descriptor).st_size
            if self._at < 0:
                self._at = self._size

    def _close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def _fail(self, error: OSError, at: int) -> None:
        """Say that output is lost from position `at` on, the first time that it happens."""
        if self.lost >= 0:
            return
        self.lost = at
        note(self._plan, lost=at)
        if self._is_first():
            others = f"; {self._plan.ranks_file} tells of other ranks" if self._plan.ranks_file else ""
            write_line(f"mpiddp: {self._who}: cannot write {self._plan.path}: {error.strerror} (at byte {at}); "
                       f"this output is lost, what follows is tried again{others}")

    def _is_first(self) -> bool:
        """Tell whether no other rank of the job on this node has said so; the kernel frees the name with a process."""
        if self._saying is not None:
            return False
        try:
            self._saying = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._saying.bind(f"\0mpiddp logs {self._plan.token}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def fitting(data: bytes, room: int) -> int:
    """Return how much of the data belongs into a file with so much room: up to the end of the line that fills it."""
    if len(data) < room:
        return len(data)
    stop = max(room + LINE_BYTES, 0)
    found = LINE_END.search(data, max(room - 1, 0), stop)
    return found.end() if found else min(len(data), stop)
