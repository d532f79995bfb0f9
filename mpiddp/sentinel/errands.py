"""What may take its time, done by other processes: a sentinel waits for no file, no terminal and no command."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from functools import partial

from ..base.files import parse_stream_path, try_write_file
from ..base.stderr import STDERR, set_writer, write_all, write_line
from ..ipc.event_loop import Loop
from ..ipc.helper_process import fork_detached, reap, silence

PATIENCE_S = 1.0  # for an errand, before this process ends without it, or says that it is not done
MOST_BYTES = 2**16  # of what an errand says


class Errands:
    """Runs what may hang in processes of their own, and calls a function with what comes of it."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self._number = loop, 0
        self._needed: dict[str, bool] = {}  # by name, whether something may be said

    @property
    def busy(self) -> bool:
        """Whether one is running that this process has to wait for before it ends; that is over when it is late."""
        return bool(self._needed)

    @property
    def speaking(self) -> bool:
        """Whether one of these may still have something to say."""
        return any(self._needed.values())

    def write(self, path: str, content: str) -> None:
        """Write a file that was asked for, or say why that cannot be done; to a standard stream the rank writes."""
        if (stream := parse_stream_path(path)) >= 0:
            write_line(content if stream == STDERR else f"mpiddp: cannot write {path}: the rank that had it is gone")
            return
        late = f"mpiddp: cannot write {path}: no answer within {PATIENCE_S:g} s"
        self.run(partial(try_write_file, path, content), write_line, late)

    def run(self, act: Callable[[], str | None], then: Callable[[str], object] = lambda _: None,
            late: str = "", patience_s: float = PATIENCE_S, needed: bool = True) -> None:
        """Call `act` in another process, and `then` with what it returns, or with `late` when its time is over.

        This process does not end before that if it is `needed`.
        """
        self._number += 1
        name = f"errand {self._number}"
        said = run_aside(act)

        def end(text: str) -> None:
            self._needed.pop(name, None)
            self._loop.drop_timers(name)
            self._loop.forget(said)
            os.close(said)
            if text:
                then(text)

        if needed:
            self._needed[name] = bool(late)
        self._loop.listen(said, lambda: end(os.read(said, MOST_BYTES).decode(errors="replace")))
        self._loop.set_timer(name, patience_s, lambda: end(late))


def run_aside(act: Callable[[], str | None]) -> int:
    """Call `act` in another process, and return a descriptor from which what it returns can be read.

    It holds neither stdout nor stderr: a launcher waits until nobody holds them. Raises OSError where no descriptor is
    left; where no process can be started, nothing can be read.
    """
    reading, writing = os.pipe()
    try:
        def do() -> None:
            silence(0, 1, STDERR)
            if text := act():
                os.write(writing, text.encode(errors="replace")[:MOST_BYTES])

        reap(fork_detached(do, kept=(writing,), name="a process beside a sentinel"))
    finally:
        os.close(writing)
    return reading


def run_unheard(act: Callable[[], str | None]) -> None:
    """Call `act` in another process, if one can be started."""
    with contextlib.suppress(OSError):
        os.close(run_aside(act))


class Voice:
    """Writes to stderr what it takes at once; the rest is written by another process, as long as anybody reads it.

    That is so for a terminal that Ctrl-S has stopped, for a launcher that is not read, and for a file.
    """

    def __init__(self) -> None:
        self._speaker = -1  # a pipe to that process

    def begin(self) -> None:
        """Let all that this process says go this way."""
        set_writer(self.write)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write without waiting."""
        if self._speaker < 0:
            data = data[written_now(descriptor, data):]
            if not data:
                return
            set_writer(write_all)  # also what is said where no process can be started: that had better wait
            self._speaker = speaker(descriptor)
            if self._speaker < 0:
                write_all(descriptor, data)
                return
            self.begin()
        with contextlib.suppress(BlockingIOError):
            while data:
                data = data[os.write(self._speaker, data):]


def written_now(descriptor: int, data: bytes) -> int:
    """Write what a pipe or a terminal takes at once, and return the number of bytes; 0 for anything else.

    It is opened anew: not to wait is what every process would do that has the same open file (man 2 fcntl, O_NONBLOCK).
    """
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISCHR(mode):
        return 0
    try:
        anew = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        return len(data) if error.errno == errno.ENXIO else 0  # of a pipe that nobody reads
    try:
        return os.write(anew, data)
    except BlockingIOError:
        return 0
    finally:
        os.close(anew)


def speaker(descriptor: int) -> int:
    """Start a process that writes to a descriptor, and return a pipe to it; -1 where it cannot be started."""
    reading, writing = os.pipe()

    def speak() -> None:
        while data := os.read(reading, MOST_BYTES):
            write_all(descriptor, data)

    try:
        forking = fork_detached(speak, kept=(reading, descriptor), name="a process that prints for a sentinel")
    finally:
        os.close(reading)
    if not forking:
        os.close(writing)
        return -1
    reap(forking)
    os.set_blocking(writing, False)
    return writing
