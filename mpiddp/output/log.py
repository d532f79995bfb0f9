"""The log of a rank's output."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from functools import partial

from ..base.files import open_for_writing
from ..base.ranks import LogPlan
from ..base.stderr import write_some
from ..ipc.event_loop import EventLoop
from .index import TAIL_BYTES, find_last_line
from .writer import WriterThread, report_loss

MAX_EARLY_BYTES = 2**16  # of output that comes before it is known whether there is a log
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RankLog:
    """The log of the rank called `rank_name`.

    Output that cannot be written, as on a full disk, is lost. This is reported once per node. Later writes are retried,
    in a newly opened file, after a line with the number of missing bytes.
    """

    def __init__(self, plan: LogPlan, rank_name: str) -> None:
        self.lost_from = -1  # the position in the output of the first lost byte, -1 for none
        self._plan, self._rank_name = plan, rank_name
        self._descriptor = -1  # -1 while the file is closed
        self._position = -1  # of the next byte, counting the file's earlier content; -1 until the first open
        self._opened_at = 0  # the position when the file was opened
        self._missing = 0  # bytes lost since the last successful write
        self._ends_line = True
        self._tail = b""
        self._report_lock: socket.socket | None = None  # the process that binds its name reports for this node

    def write(self, data: bytes) -> None:
        """Write output of the rank."""
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._write_all(data)

    def write_text(self, text: str) -> None:
        """Write a text that does not count as the rank's output: the stack of a crash, or a report."""
        self._write_all(b"\n" * (not self._ends_line) + text.rstrip("\n").encode(errors="replace") + b"\n")

    def close(self) -> None:
        """Close the file; later writes reopen it."""
        self._close()

    @property
    def last_line(self) -> str:
        """The last line of the rank's output that is not empty."""
        return find_last_line(self._tail)

    def _write_all(self, data: bytes) -> None:
        note = format_missing(self._missing) if self._missing else b""
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
            return write_some(self._descriptor, data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            self._close()
            self._open()
            return write_some(self._descriptor, data)

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = open_for_writing(self._plan.path, append=True, job_folder=True)
            if self._position < 0:
                self._position = os.fstat(self._descriptor).st_size
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
        """Report the first loss of output, at a position."""
        if self.lost_from >= 0:
            return
        self.lost_from = position
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


class LogWriter:
    """Writes a rank's log, if it has one, in a thread: a file system may hang."""

    def __init__(self, loop: EventLoop, on_room: Callable[[], object]) -> None:
        """Keep what is written until open(); the loop calls `on_room` when there is room again."""
        self._thread = WriterThread(loop, on_room)
        self._log: RankLog | None = None
        self._early: bytes | None = b""  # None from open() on
        self._missing = 0  # early bytes that were not kept

    def open(self, plan: LogPlan, rank_name: str) -> None:
        """Write what came so far, and all that comes, to a log; without a path there is none."""
        early, self._early = self._early, None
        if plan.path:
            self._log = RankLog(plan, rank_name)
            if early:
                self.write(early + (format_missing(self._missing) if self._missing else b""))

    @property
    def has_room(self) -> bool:
        """Whether more may be written now."""
        return self._thread.has_room

    @property
    def is_idle(self) -> bool:
        """Whether all is written so far."""
        return self._thread.is_idle

    @property
    def progress(self) -> int:
        """A number that grows with each write."""
        return self._thread.progress

    @property
    def lost_from(self) -> int:
        """The position of the first byte that the log has lost so far, -1 for none."""
        return self._log.lost_from if self._log is not None else -1

    @property
    def last_line(self) -> str:
        """The last line of the output that is in the log and not empty."""
        return self._log.last_line if self._log is not None else ""

    def write(self, data: bytes) -> None:
        """Write output of the rank."""
        if self._log is not None:
            self._thread.submit(partial(self._log.write, data), len(data))
        elif self._early is not None:
            kept = data[:MAX_EARLY_BYTES - len(self._early)]
            self._early += kept
            self._missing += len(data) - len(kept)

    def write_text(self, text: str) -> None:
        """Write a text that does not count as the rank's output."""
        if self._log is not None:
            self._thread.submit(partial(self._log.write_text, text), len(text))

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all is written so far."""
        if self._log is not None:
            self._thread.flush(then)
        else:
            then()

    def close(self, then: Callable[[], object]) -> None:
        """Close the log; call `then` when that is done."""
        if self._log is not None:
            self._thread.submit(self._log.close)
        self.flush(then)


def format_missing(count: int) -> bytes:
    """Return the line that stands for missing bytes."""
    return b"\n[mpiddp: bytes missing here: %d]\n" % count
