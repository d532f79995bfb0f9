"""Writes that may block: an event loop hands them to a thread, and goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from ..base.process import THREAD_BLOCKED_SIGNALS, redirect_to_devnull
from ..base.stderr import write_line, write_some
from ..ipc.event_loop import EventLoop

MAX_UNWRITTEN_BYTES = 2**17  # then the rank that prints waits


class WriterThread:
    """Makes writes that may block, one after the other, in a thread that starts with the first one.

    The thread does not keep the process from ending, even if a write hangs.
    """

    def __init__(self, loop: EventLoop, on_room: Callable[[], object] = bool) -> None:
        """Make the loop call `on_room` when there is room again."""
        self.progress = 0  # the number of finished writes
        self._submitted = 0
        self._loop, self._on_room = loop, on_room
        self._queue: SimpleQueue[tuple[Callable[[], object], int]] = SimpleQueue()
        self._lock = threading.Lock()
        self._unwritten_bytes = 0
        self._is_full = self._has_thread = False

    @property
    def has_room(self) -> bool:
        """Whether more may be written now."""
        return not self._is_full

    @property
    def is_idle(self) -> bool:
        """Whether all is written so far."""
        return self.progress == self._submitted

    def submit(self, write: Callable[[], object], size: int = 0) -> None:
        """Call `write`, which writes `size` bytes, in the thread; any thread may call this.

        If no thread can be started, it is called here.
        """
        with self._lock:
            self._submitted += 1
            self._unwritten_bytes += size
            self._is_full = self._is_full or self._unwritten_bytes >= MAX_UNWRITTEN_BYTES
            self._queue.put((write, size))
            if self._has_thread:
                return
            try:
                threading.Thread(target=self._run, daemon=True, name="mpiddp-writer").start()
                self._has_thread = True
                return
            except RuntimeError:
                pass
        self._write_next()

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all that was submitted so far is written: at once, or by the loop."""
        if self.is_idle:
            then()
        else:
            self.submit(partial(self._loop.post, then))

    def wait(self, timeout_s: float) -> None:
        """Wait until all that was submitted so far is written, or for the timeout."""
        written = threading.Event()
        self.submit(written.set)
        written.wait(timeout_s)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, THREAD_BLOCKED_SIGNALS)
        while True:
            self._write_next()

    def _write_next(self) -> None:
        write, size = self._queue.get()
        try:
            write()
        except Exception as error:
            self._loop.post(partial(reraise, error))
        with self._lock:
            self.progress += 1
            self._unwritten_bytes -= size
            has_room_again = self._is_full and self._unwritten_bytes <= MAX_UNWRITTEN_BYTES // 2
            self._is_full = self._is_full and not has_room_again
        if has_room_again:
            self._loop.post(self._on_room)


def reraise(error: Exception) -> None:
    """Raise an error of a thread."""
    raise error


class FdWriter:
    """Writes to a descriptor. If writing fails, as on a full disk, output is lost; this is reported once."""

    def __init__(self, descriptor: int, name: str, rank_name: str) -> None:
        self.has_failed = False
        self.rank_name = rank_name
        self._descriptor, self._name = descriptor, name
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write data; drop what cannot be written, silently if the reader of a pipe has closed it."""
        try:
            while data:
                count = write_some(self._descriptor, data)
                data, self._size = data[count:], self._size + count
        except BrokenPipeError:
            redirect_to_devnull(self._descriptor)
        except OSError as error:
            if not self.has_failed:
                report_loss(self.rank_name, self._name, error, self._size)
            self.has_failed = True

    def write_pieces(self, pieces: Sequence[bytes]) -> None:
        """Write each piece by one write, as far as possible."""
        for piece in pieces:
            self.write(piece)


class Terminal:
    """Stdout and stderr of this process, on which it shows output of ranks.

    One thread writes to both, in the order in which output came.
    """

    def __init__(self, loop: EventLoop, rank_name: str, on_room: Callable[[], object]) -> None:
        """Make the loop call `on_room` when there is room again."""
        self._thread = WriterThread(loop, on_room)
        self._writers = {1: FdWriter(1, "stdout", rank_name), 2: FdWriter(2, "stderr", rank_name)}

    def name_rank(self, rank_name: str) -> None:
        """Call the rank so in messages from now on."""
        for writer in self._writers.values():
            writer.rank_name = rank_name

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
    def has_lost_output(self) -> bool:
        """Whether output to stdout was lost."""
        return self._writers[1].has_failed

    def write(self, stream: int, pieces: Sequence[bytes]) -> None:
        """Write to stdout, 1, or stderr, 2, each piece by one write."""
        if pieces:
            self._thread.submit(partial(self._writers[stream].write_pieces, pieces), sum(map(len, pieces)))

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all is written so far."""
        self._thread.flush(then)


def report_loss(rank_name: str, target: str, error: OSError, position: int, hint: str = "") -> None:
    """Report that a rank's output to a file is lost from a byte on; `hint` ends the message."""
    write_line(f"mpiddp: {rank_name}: cannot write {target}: {error.strerror} (at byte {position}); "
               f"this output is lost; later writes will be retried{hint}")
