"""The file with a rank's output: rotated, compressed when it is complete, and its record in the index."""

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
from .index import TAIL_BYTES, update_record

SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
GZIP_LEVEL = 6  # gzip's own default
COPY_BYTES = 2**20


def compress(path: str, compression: str, is_new: bool = False) -> str:
    """Compress a file, remove it, and return the path of the compressed file.

    What the compressed file holds already stays before that, unless it `is_new`. At any moment one of the two files has
    all of it. Raises OSError where that fails: then the file stays as it is.
    """
    import shutil  # which loads every compressor that Python has

    target = path + SUFFIXES[compression]
    with replace_file(path, target) as sink:
        if not is_new and os.path.exists(target):
            with os.fdopen(open_for_reading(target), "rb") as before:
                shutil.copyfileobj(before, sink, COPY_BYTES)
        with os.fdopen(open_for_reading(path), "rb") as source, open_compressor(sink, compression) as compressed:
            shutil.copyfileobj(source, compressed, COPY_BYTES)
    return target


def restore(path: str, compression: str) -> None:
    """Decompress a file into `path` and remove the compressed one; do nothing if `path` is there already."""
    import shutil

    target = path + SUFFIXES[compression]
    if os.path.exists(path) or not os.path.exists(target):
        return
    with (replace_file(target, path) as sink, os.fdopen(open_for_reading(target), "rb") as source,
          open_decompressor(source, compression) as data):
        shutil.copyfileobj(data, sink, COPY_BYTES)


@contextlib.contextmanager
def replace_file(source: str, target: str) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `target` at the end of the block; then remove `source`."""
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


def open_compressor(sink: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file that compresses what is written to it; zstd's by Python (from 3.14) or by the package zstandard."""
    if compression == "gzip":
        import gzip

        return gzip.GzipFile("", "wb", GZIP_LEVEL, sink)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(sink, "wb")
    import zstandard

    writer: contextlib.AbstractContextManager[Any] = zstandard.ZstdCompressor().stream_writer(sink, closefd=False)
    return writer


def open_decompressor(source: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file that decompresses `source`, all its frames."""
    if compression == "gzip":
        import gzip

        return gzip.GzipFile("", "rb", fileobj=source)
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdFile(source, "rb")
    import zstandard

    reader: contextlib.AbstractContextManager[Any] = zstandard.ZstdDecompressor().stream_reader(
        source, read_across_frames=True, closefd=False)
    return reader


LINE_BYTES = 4096  # by which a file may grow over its limit until a line ends
LINE_END = re.compile(rb"[\r\n]")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RankLog:
    """The log of the rank called `rank_name`: a plain file, compressed when it is complete if that is wanted.

    What can't be written, on a full disk, is lost. That is reported once on a node; the index has it for each rank.
    Later writes are tried again, in a file that is opened anew, and a line in the log says how much is missing before
    it.
    """

    def __init__(self, plan: LogPlan, rank_name: str) -> None:
        self.lost_from = -1  # the position in the output of the first byte that was lost, -1 for none
        self._plan, self._rank_name = plan, rank_name
        self._descriptor = -1  # of the file, -1 where it is closed
        self._size = 0  # of the file, in bytes
        self._position = -1  # of the next byte, after what the file held before; -1 before that is known
        self._missing = 0  # bytes since the last that was written
        self._ends_line = True
        self._tail = b""
        self._compressing: threading.Thread | None = None
        self._report_lock: socket.socket | None = None  # its name is held by the process that reports on this node
        with contextlib.suppress(OSError):  # reported when there is something to be written
            self._open()

    def write(self, data: bytes) -> None:
        """Write output of the rank."""
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._write_lines(data)

    def write_stack(self, text: str) -> None:
        """Write the stack of a crash, which is no output of the rank's."""
        self._write_lines(b"\n" * (not self._ends_line) + text.encode(errors="replace") + b"\n")

    def close(self, is_complete: bool) -> None:
        """Close the file, compress it if it `is_complete` and that is wanted, and update the index.

        What is written after this goes on in the file, or in a new one.
        """
        self._await_compression()
        self._close()
        is_there = is_complete and bool(self._plan.compression) and os.path.exists(self._plan.path)
        file = self._compress(self._plan.path) if is_there else None
        update_record(self._plan, file=file, lost=self.lost_from if self.lost_from >= 0 else None, tail=self._tail)

    def _write_lines(self, data: bytes) -> None:
        """Write data to one file, or the first lines of it to one and the rest to the next."""
        while data:
            count = len(data)
            if self._plan.most_bytes:
                with contextlib.suppress(OSError):
                    self._open()
                    self._rotate_if_full()
                    self._open()
                    count = count_fitting(data, self._plan.most_bytes - self._size) or count
            self._write_all(data[:count])
            data = data[count:]
        self._rotate_if_full()

    def _rotate_if_full(self) -> None:
        """Begin a new file if this one has reached its limit, at a line's end if that is near."""
        limit = self._plan.most_bytes
        if not limit or self._descriptor < 0 or self._size < limit + (0 if self._ends_line else LINE_BYTES):
            return
        self._await_compression()
        former = f"{self._plan.path}.1"
        with contextlib.suppress(OSError, RuntimeError):  # tried again later; no thread can be started
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
        if self._compressing is not None:
            self._compressing.join()
            self._compressing = None

    def _compress(self, path: str, is_new: bool = False) -> str | None:
        """Compress a file as compress() does, and return the new path; None if the file stays as it is."""
        try:
            return compress(path, self._plan.compression, is_new)
        except Exception as error:  # of a library, too
            if self._can_report():
                reason = getattr(error, "strerror", "") or error
                write_line(f"mpiddp: {self._rank_name}: cannot compress {path}: {reason}; it stays as it is")
            return None

    def _write_all(self, data: bytes) -> None:
        note = b"\n[mpiddp: %d bytes are missing here]\n" % self._missing if self._missing else b""
        rest = note + data
        try:
            while rest:
                rest = rest[self._write_some(rest):]
        except OSError as error:
            self._close()
            self._report_loss(error, max(self._position, 0) + len(data) - min(len(rest), len(data)))
        self._position = max(self._position, 0) + len(data)
        self._missing = len(rest) if len(rest) <= len(data) else self._missing + len(data)
        self._ends_line = data.endswith((b"\n", b"\r"))

    def _write_some(self, data: bytes) -> int:
        """Write some of the data; if the file takes none for another reason than room, open it again.

        The server of a shared file system may have come back without knowing the open file (ESTALE).
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
            if self._position < 0 and self._plan.most_bytes and self._plan.compression:
                with contextlib.suppress(Exception):  # an earlier attempt's log stays as it is: this one is added to it
                    restore(self._plan.path, self._plan.compression)  # so that it is rotated in time
            self._descriptor = open_for_writing(self._plan.path, append=True, job_folder=True)
            self._size = os.fstat(self._descriptor).st_size
            if self._position < 0:
                self._position = self._size

    def _close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1

    def _report_loss(self, error: OSError, position: int) -> None:
        """Report that output is lost from a position on, the first time that it happens."""
        if self.lost_from >= 0:
            return
        self.lost_from = position
        update_record(self._plan, lost=position)
        if self._can_report():
            others = f"; {self._plan.ranks_file} tells of other ranks" if self._plan.ranks_file else ""
            write_line(f"mpiddp: {self._rank_name}: cannot write {self._plan.path}: {error.strerror} "
                       f"(at byte {position}); this output is lost, what follows is tried again{others}")

    def _can_report(self) -> bool:
        """Return whether no rank of the job on this node has reported; the kernel frees the name with a process."""
        if self._report_lock is not None:
            return False
        try:
            self._report_lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._report_lock.bind(f"\0mpiddp logs {self._plan.token}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def count_fitting(data: bytes, room: int) -> int:
    """Return how many bytes go into a file with so much room: up to the end of the line that fills it."""
    if len(data) < room:
        return len(data)
    stop = max(room + LINE_BYTES, 0)
    end = LINE_END.search(data, max(room - 1, 0), stop)
    return end.end() if end else min(len(data), stop)
