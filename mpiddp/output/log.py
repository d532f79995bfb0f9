"""The log of a rank's output: rotated, compressed when it is complete, and its record in the index."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import threading
from typing import IO, Any

from ..base.files import open_for_reading, open_for_writing, replace_file
from ..base.ranks import LogPlan
from ..base.stderr import write_line, write_some
from .index import TAIL_BYTES, update_record
from .streams import report_loss

SUFFIXES = {"gzip": ".gz", "zstd": ".zst"}
GZIP_LEVEL = 6  # gzip's own default
COPY_BYTES = 2**20


def compress(path: str, compression: str, is_new: bool = False) -> str:
    """Compress a file, remove it, and return the path of the compressed file.

    If a compressed file exists, this appends to it, unless it `is_new`. At any moment one of the two files is whole.
    Raises OSError if this fails: then the file is unchanged.
    """
    import shutil  # here, because it loads every compressor that Python has

    target = path + SUFFIXES[compression]
    with replace_file(target, f"{target}.part", job_folder=True) as sink:
        if not is_new and os.path.exists(target):
            with os.fdopen(open_for_reading(target), "rb") as before:
                shutil.copyfileobj(before, sink, COPY_BYTES)
        with os.fdopen(open_for_reading(path), "rb") as source, open_compressor(sink, compression) as compressed:
            shutil.copyfileobj(source, compressed, COPY_BYTES)
    os.unlink(path)
    return target


def restore(path: str, compression: str) -> None:
    """Decompress a file into `path` and remove the compressed one; do nothing if `path` exists."""
    import shutil

    target = path + SUFFIXES[compression]
    if os.path.exists(path) or not os.path.exists(target):
        return
    with (replace_file(path, f"{path}.part", job_folder=True) as sink,
          os.fdopen(open_for_reading(target), "rb") as source, open_decompressor(source, compression) as data):
        shutil.copyfileobj(data, sink, COPY_BYTES)
    os.unlink(target)


def open_compressor(sink: IO[bytes], compression: str) -> contextlib.AbstractContextManager[Any]:
    """Return a file that compresses into `sink`; zstd by Python (from 3.14) or by the package zstandard."""
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
    """Return a file that decompresses all frames of `source`."""
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


LINE_BYTES = 4096  # by which a file may exceed its limit to complete a line
LINE_END = re.compile(rb"[\r\n]")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RankLog:
    """The log of the rank called `rank_name`: a plain file, compressed when it is complete if so configured.

    Output that cannot be written, as on a full disk, is lost. This is reported once per node; the index records it for
    each rank. Later writes are retried, in a newly opened file, after a line with the number of missing bytes.
    """

    def __init__(self, plan: LogPlan, rank_name: str) -> None:
        self.lost_from = -1  # the position in the output of the first lost byte, -1 for none
        self._plan, self._rank_name = plan, rank_name
        self._descriptor = -1  # -1 while the file is closed
        self._size = 0  # of the file, in bytes
        self._position = -1  # of the next byte, counting the file's earlier content; -1 until the first open
        self._opened_at = 0  # the position when the file was opened
        self._missing = 0  # bytes lost since the last successful write
        self._ends_line = True
        self._tail = b""
        self._compressing: threading.Thread | None = None
        self._report_lock: socket.socket | None = None  # the process that binds its name reports for this node
        with contextlib.suppress(OSError):  # reported by the first write
            self._open()

    def write(self, data: bytes) -> None:
        """Write output of the rank."""
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._write_lines(data)

    def write_stack(self, text: str) -> None:
        """Write the stack of a crash, which does not count as the rank's output."""
        self._write_lines(b"\n" * (not self._ends_line) + text.encode(errors="replace") + b"\n")

    def close(self, is_complete: bool) -> None:
        """Close the file, compress it if it `is_complete` and compression is configured, and update the index.

        Later writes reopen the file, or begin a new one.
        """
        self._await_compression()
        self._close()
        is_there = is_complete and bool(self._plan.compression) and os.path.exists(self._plan.path)
        file = self._compress(self._plan.path) if is_there else None
        update_record(self._plan, file=file, lost=self.lost_from if self.lost_from >= 0 else None, tail=self._tail)

    def _write_lines(self, data: bytes) -> None:
        """Write data, rotating the file between lines where it reaches its limit."""
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
        """Begin a new file if this one has reached its limit, at a line end if one is near."""
        limit = self._plan.most_bytes
        if not limit or self._descriptor < 0 or self._size < limit + (0 if self._ends_line else LINE_BYTES):
            return
        self._await_compression()
        rotated = f"{self._plan.path}.1"
        with contextlib.suppress(OSError, RuntimeError):  # retried later; no thread can be started
            is_there = os.path.exists(self._plan.path)  # it may have been removed
            if is_there:
                os.replace(self._plan.path, rotated)
            self._close()
            if is_there and self._plan.compression:
                compressing = threading.Thread(target=self._compress, args=(rotated, True))
                compressing.start()
                self._compressing = compressing
            self._open()

    def _await_compression(self) -> None:
        if self._compressing is not None:
            self._compressing.join()
            self._compressing = None

    def _compress(self, path: str, is_new: bool = False) -> str | None:
        """Compress a file as compress() does, and return the new path; None if that fails."""
        try:
            return compress(path, self._plan.compression, is_new)
        except Exception as error:  # also of a library
            if self._can_report():
                reason = getattr(error, "strerror", "") or error
                write_line(f"mpiddp: {self._rank_name}: cannot compress {path}: {reason}; it stays uncompressed")
            return None

    def _write_all(self, data: bytes) -> None:
        note = b"\n[mpiddp: bytes missing here: %d]\n" % self._missing if self._missing else b""
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
        """Write some of the data; on any error but a lack of room, reopen the file and retry once.

        A file server that has restarted may not know the open file any more (ESTALE).
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
                with contextlib.suppress(Exception):  # then close() appends this log to that of an earlier attempt
                    restore(self._plan.path, self._plan.compression)  # so that it counts towards the limit
            self._descriptor = open_for_writing(self._plan.path, append=True, job_folder=True)
            self._size = os.fstat(self._descriptor).st_size
            if self._position < 0:
                self._position = self._size
            self._opened_at = self._position

    def _close(self) -> None:
        """Close the file; NFS may report only now that it could not store what was written (man 2 close)."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:
                self._report_loss(error, self._opened_at)

    def _report_loss(self, error: OSError, position: int) -> None:
        """Report the first loss of output, at a position, and record it in the index."""
        if self.lost_from >= 0:
            return
        self.lost_from = position
        update_record(self._plan, lost=position)
        if self._can_report():
            hint = f"; lost output of all ranks: {self._plan.ranks_file}" if self._plan.ranks_file else ""
            report_loss(self._rank_name, self._plan.path, error, position, hint)

    def _can_report(self) -> bool:
        """Return whether no rank of the job on this node has reported; the kernel frees the name at process exit."""
        if self._report_lock is not None:
            return False
        try:
            self._report_lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._report_lock.bind(f"\0mpiddp logs {self._plan.token}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def count_fitting(data: bytes, room: int) -> int:
    """Return how many bytes to write to a file with this much room: up to the end of the line that fills it."""
    if len(data) < room:
        return len(data)
    stop = max(room + LINE_BYTES, 0)
    end = LINE_END.search(data, max(room - 1, 0), stop)
    return end.end() if end else min(len(data), stop)
