"""The file with a rank's output, and its entry in the index."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
from typing import Protocol

from ..beside.index import TAIL_BYTES, note
from ..facts.files import open_for_writing
from ..plan.member import LogPlan
from ..say import say, write_some

LINE_BYTES = 4096  # by which a file may grow over its limit until a line ends
LINE_END = re.compile(rb"[\r\n]")
BLOCK_BYTES = 2**18  # that are compressed together
PAUSE_S = 1.0  # after which what has come is compressed, whatever it is
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class File(Protocol):
    """What a log is written to."""

    @property
    def size(self) -> int:
        """The bytes of the file."""

    def write(self, data: bytes) -> int:
        """Write some of the data, and return how many bytes."""

    def close(self) -> None:
        """Close the file."""


class Plain:
    """A file to which output is appended as it is."""

    def __init__(self, path: str) -> None:
        self._descriptor = open_for_writing(path, append=True, job_folder=True)
        self.size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> int:
        """Write some of the data, and return how many bytes."""
        count = write_some(self._descriptor, data)
        self.size += count
        return count

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Log:
    """The log of the rank called `who`. What can't be written to it, on a full disk, is lost.

    That is said once on a node; the index tells it of each rank. What follows is tried again, in a file that is opened
    anew, and a line in the log says how much is missing before it.
    """

    def __init__(self, plan: LogPlan, who: str) -> None:
        self.lost = -1  # the position in the output of the first byte that was lost, -1 for none
        self._plan, self._who = plan, who
        self._file: File | None = None
        self._at = -1  # the position of the next byte, after what the file held before; -1 before that is known
        self._missing = 0  # bytes since the last that was written
        self._ends_line = True
        self._tail = self._waiting = b""
        self._due_s = 0.0  # when what waits has to be compressed, on time.monotonic()'s clock
        self._block = min(BLOCK_BYTES, plan.most_bytes // 4 or BLOCK_BYTES) if plan.compression else 0
        self._saying: socket.socket | None = None
        with contextlib.suppress(OSError):  # that is told of when there is something to be written
            self._opened()

    def write(self, data: bytes) -> None:
        """Write data, or what of it makes a block; the rest waits until more comes, or pause()."""
        if not data:
            return
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        if not self._block:
            self._write_lines(data)
            return
        if not self._waiting:
            self._due_s = time.monotonic() + PAUSE_S
        self._waiting += data
        while len(self._waiting) >= self._block:
            lines = self._waiting.rfind(b"\n", 0, self._block) + 1
            self._write_block(lines or self._block)
        if self._waiting and time.monotonic() >= self._due_s:
            self.pause()

    @property
    def patience_s(self) -> float | None:
        """The seconds until pause() has to be called, None for never."""
        return max(0.0, self._due_s - time.monotonic()) if self._waiting else None

    def pause(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._write_block(len(self._waiting))

    def settle(self) -> None:
        """Write what waits, and fill in the index."""
        self.pause()
        note(self._plan, lost=self.lost if self.lost >= 0 else None, tail=self._tail)

    def _write_block(self, count: int) -> None:
        block, self._waiting = self._waiting[:count], self._waiting[count:]
        self._due_s = time.monotonic() + PAUSE_S
        self._put(block)
        self._rotate_if_full()

    def _write_lines(self, data: bytes) -> None:
        """Write data to one file, or the first lines of it to one and the rest to the next."""
        while data:
            count = len(data)
            if self._plan.most_bytes:
                with contextlib.suppress(OSError):
                    self._opened()
                    self._rotate_if_full()
                    count = fitting(data, self._plan.most_bytes - self._opened().size) or count
            self._put(data[:count])
            data = data[count:]
        self._rotate_if_full()

    def _rotate_if_full(self) -> None:
        """Begin a new file if this one has its most bytes, at a line's end if that is near."""
        most, file = self._plan.most_bytes, self._file
        if most and file and file.size >= most + (0 if self._ends_line else LINE_BYTES):
            with contextlib.suppress(OSError):
                os.replace(self._plan.path, former(self._plan.path))
                self._close()
                self._opened()

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
        try:
            return self._opened().write(data)
        except OSError as error:
            if error.errno in NO_ROOM or self._file is None:
                raise
            self._close()
        return self._opened().write(data)

    def _opened(self) -> File:
        if self._file is None:
            self._file = open_file(self._plan)
            if self._at < 0:
                self._at = 0 if self._plan.compression else self._file.size
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _fail(self, error: OSError, at: int) -> None:
        """Say that output is lost from position `at` on, the first time that it happens."""
        if self.lost >= 0:
            return
        self.lost = at
        note(self._plan, lost=at)
        if self._is_first():
            others = f"; {self._plan.ranks_file} tells of other ranks" if self._plan.ranks_file else ""
            say(f"mpiddp: {self._who}: cannot write {self._plan.path}: {error.strerror} (at byte {at}); "
                f"this output is lost, what follows is tried again{others}")

    def _is_first(self) -> bool:
        """Tell whether no other rank of the job on this node has said so; the kernel frees the name with a process."""
        self._saying = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._saying.bind(f"\0mpiddp logs {self._plan.token}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        return True


def open_file(plan: LogPlan) -> File:
    """Open the file of a log, to go on in it."""
    if not plan.compression:
        return Plain(plan.path)
    from .compression import Compressed

    return Compressed(plan.path, plan.compression)


def former(path: str) -> str:
    """Return what a log is called after a new one was begun: rank-00013.n07.log.1, or rank-00013.n07.log.1.gz."""
    stem, dot, kind = path.rpartition(".log")
    return f"{stem}{dot}.1{kind}"


def fitting(data: bytes, room: int) -> int:
    """Return how much of the data belongs into a file with so much room: up to the end of the line that fills it."""
    if len(data) < room:
        return len(data)
    stop = max(room + LINE_BYTES, 0)
    found = LINE_END.search(data, max(room - 1, 0), stop)
    return found.end() if found else min(len(data), stop)
