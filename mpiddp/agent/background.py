"""Runs slow tasks in other processes: an agent waits for no file, no terminal and no command."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from functools import partial

from ..base.files import parse_stream_path, try_write_file
from ..base.stderr import STDERR, set_writer, write_all, write_line
from ..ipc.event_loop import EventLoop
from ..ipc.helper_process import fork_daemon, reap, redirect_to_devnull

TASK_TIMEOUT_S = 1.0  # after which this process ends without a task, or prints that it is not done
MAX_RESULT_BYTES = 2**16


class BackgroundTasks:
    """Runs tasks that may hang in processes of their own, and calls a function with each result."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop, self._number = loop, 0
        self._required: dict[str, bool] = {}  # by name, whether the task may print something

    @property
    def is_busy(self) -> bool:
        """Whether a required task still runs, and is not late."""
        return bool(self._required)

    @property
    def may_print(self) -> bool:
        """Whether one of these may still print something."""
        return any(self._required.values())

    def write(self, path: str, content: str) -> None:
        """Write a file, or print why that fails; to a standard stream only the rank itself can write."""
        if (stream := parse_stream_path(path)) >= 0:
            write_line(content if stream == STDERR else f"mpiddp: cannot write {path}: the rank has exited, and its "
                       "standard streams are closed")
            return
        late = f"mpiddp: cannot write {path}: no response within {TASK_TIMEOUT_S:g} s"
        self.run(partial(try_write_file, path, content), write_line, late)

    def run(self, act: Callable[[], str | None], then: Callable[[str], object] = lambda _: None,
            late: str = "", timeout_s: float = TASK_TIMEOUT_S, is_required: bool = True) -> None:
        """Call `act` in another process, and `then` with its result, or with `late` after the timeout, unless empty.

        This process does not end before that if the task `is_required`.
        """
        self._number += 1
        name = f"task {self._number}"
        result_fd = start_detached(act)

        def end(result: str) -> None:
            self._required.pop(name, None)
            self._loop.cancel_timers(name)
            self._loop.unwatch(result_fd)
            os.close(result_fd)
            if result:
                then(result)

        if is_required:
            self._required[name] = bool(late)
        self._loop.watch(result_fd, lambda: end(os.read(result_fd, MAX_RESULT_BYTES).decode(errors="replace")))
        self._loop.set_timer(name, timeout_s, lambda: end(late))


def start_detached(act: Callable[[], str | None]) -> int:
    """Call `act` in another process, and return a descriptor from which its result can be read.

    It holds neither stdout nor stderr: a launcher waits until nobody holds them. Raises OSError if no descriptor is
    left; if no process can be started, the result is empty.
    """
    reading, writing = os.pipe()
    try:
        def run() -> None:
            redirect_to_devnull(0, 1, STDERR)
            if result := act():
                os.write(writing, result.encode(errors="replace")[:MAX_RESULT_BYTES])

        reap(fork_daemon(run, kept=(writing,), name="a background task of an agent"))
    finally:
        os.close(writing)
    return reading


def run_detached(act: Callable[[], str | None]) -> None:
    """Call `act` in another process, if one can be started, and ignore its result."""
    with contextlib.suppress(OSError):
        os.close(start_detached(act))


class NonblockingStderr:
    """Writes to stderr what it accepts at once; another process writes the rest, as long as it is read.

    This matters for a terminal that Ctrl-S has stopped, for a launcher that does not read, and for a file.
    """

    def __init__(self) -> None:
        self._writer_fd = -1  # a pipe to that process

    def install(self) -> None:
        """Print all lines of this process this way."""
        set_writer(self.write)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write without waiting."""
        if self._writer_fd < 0:
            data = data[write_now(descriptor, data):]
            if not data:
                return
            set_writer(write_all)  # also for the error if no process can be started: waiting is better then
            self._writer_fd = start_writer(descriptor)
            if self._writer_fd < 0:
                write_all(descriptor, data)
                return
            self.install()
        with contextlib.suppress(BlockingIOError):
            while data:
                data = data[os.write(self._writer_fd, data):]


def write_now(descriptor: int, data: bytes) -> int:
    """Write what a pipe or a terminal accepts at once, and return the number of bytes; 0 for anything else.

    It is opened anew: O_NONBLOCK would hold for every process that has the same open file (man 2 fcntl).
    """
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
        return 0
    try:
        reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        return len(data) if error.errno == errno.ENXIO else 0  # a pipe that nobody reads
    try:
        return os.write(reopened, data)
    except BlockingIOError:
        return 0
    finally:
        os.close(reopened)


def start_writer(descriptor: int) -> int:
    """Start a process that writes to a descriptor, and return a pipe to it; -1 if it cannot be started."""
    reading, writing = os.pipe()

    def run() -> None:
        while data := os.read(reading, MAX_RESULT_BYTES):
            write_all(descriptor, data)

    try:
        forking_child = fork_daemon(run, kept=(reading, descriptor), name="the stderr writer of an agent")
    finally:
        os.close(reading)
    if not forking_child:
        os.close(writing)
        return -1
    reap(forking_child)
    os.set_blocking(writing, False)
    return writing
