"""A process that passes a rank's output on: to the terminal, to a log, to both."""

from __future__ import annotations

import os
import selectors
import socket
from string import Formatter

from ..beside.detached import fork_detached, reap, silence, take_title
from ..beside.messages import Forward, Forwarded
from ..beside.wire import Wire
from ..facts.files import open_for_writing
from ..say import say, write_some

FOREVER_S = 10**6
PIPE_BYTES = 65536  # which a pipe holds at most (man 7 pipe)
WRITE_BYTES = 4096  # PIPE_BUF: what a pipe takes in one piece (man 7 pipe)


class Relay:
    """A process that passes a rank's output on; it gets all of it even if the rank crashes."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        reading, self._writing = zip(os.pipe(), os.pipe(), strict=True)
        forking = fork_detached(lambda: relay(Wire(its), *reading), kept=(its.fileno(), *reading))
        reap(forking)
        its.close()
        for descriptor in reading:
            os.close(descriptor)
        self._control = Wire(self._socket)
        self._who = ""

    def dismiss(self) -> None:
        """End the relay, which is not needed."""
        self._control.close()
        for pipe in self._writing:
            os.close(pipe)

    def begin(self, log: str, prefix: str, who: str) -> None:
        """Take over stdout and stderr."""
        self._who = who
        self._control.send(Forward(log, prefix, who))
        for descriptor, pipe in enumerate(self._writing, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)

    def end(self) -> bool:
        """Wait until the relay has passed on what this rank wrote, and tell whether stdout lost some of it.

        A slow reader is waited for, as without a relay. Other processes may still write to the relay.
        """
        try:
            self._socket.shutdown(socket.SHUT_WR)
            message = self._control.receive(FOREVER_S)[0]
            assert isinstance(message, Forwarded)
            return message.lost
        except (EOFError, OSError):
            say(f"mpiddp: {self._who}: the process that passed its output on is gone, and output perhaps lost")
            return True


def relay(control: Wire, out: int, err: int) -> None:
    """Pass on what comes from two pipes until they are closed, and tell the rank whether its part was lost."""
    try:
        message = control.receive(FOREVER_S)[0]
    except EOFError:
        return
    assert isinstance(message, Forward)
    passing = Passing(*message)
    take_title(f"mpiddp: output of {message.who}")
    streams = {out: 1, err: 2}
    with selectors.DefaultSelector() as selector:
        for source in (out, err, control):
            selector.register(source, selectors.EVENT_READ)
        while streams:
            ready = {key.fileobj for key, _ in selector.select()}
            for source in [source for source in streams if source in ready]:
                data = os.read(source, PIPE_BYTES)
                passing.take(streams[source], data)
                if not data:
                    selector.unregister(source)
                    del streams[source]
            if control in ready:  # the rank ends, or is gone; what it wrote before was read above
                selector.unregister(control)
                for stream in streams.values():
                    passing.take(stream, b"")
                control.send(Forwarded(passing.lost))
    control.send(Forwarded(passing.lost))


class Passing:
    """Passes the output of the rank called `who` to the terminal, and to a `log` if that is not empty.

    `prefix` is put before the terminal's lines, with their time in the place of its field `time` (str.format).
    """

    def __init__(self, log: str, prefix: str, who: str) -> None:
        self._form = prefix if any(field for _, field, _, _ in Formatter().parse(prefix)) else ""
        self._prefix = b"" if self._form else prefix.format().encode(errors="replace")
        self._begun = {1: b"", 2: b""}
        self._terminal = {1: Sink(1, "stdout", who), 2: Sink(2, "stderr", who)}
        self._log = open_log(log, who) if log else None

    @property
    def lost(self) -> bool:
        """Tell whether stdout lost something."""
        return self._terminal[1].failed

    def take(self, stream: int, data: bytes) -> None:
        """Pass on data of a stream; empty data says that the stream pauses, and a line without an end is passed on."""
        if self._log is not None:
            self._log.write(data)
        for text in prefixed(self._begun, stream, data, self._now()) if self._prefix or self._form else [data]:
            self._terminal[stream].write(text)


    def _now(self) -> bytes:
        """Return the prefix of lines that come now."""
        if not self._form:
            return self._prefix
        from datetime import datetime

        return self._form.format(time=datetime.now().astimezone()).encode(errors="replace")


class Sink:
    """A descriptor that output goes to. What it can't take, on a full disk, is lost; that is said once.

    `size` is the position of the first byte. If `marks`, a line in the output says how much is missing.
    """

    def __init__(self, descriptor: int, name: str, who: str, size: int = 0, marks: bool = False) -> None:
        self.failed = False
        self._descriptor, self._name, self._who, self._size, self._marks = descriptor, name, who, size, marks
        self._missing = 0  # bytes since the last that was written

    def write(self, data: bytes) -> None:
        """Write as much of the data as the descriptor takes; drop it if nobody reads any more."""
        if not data:
            return
        mark = b"\n[mpiddp: %d bytes are missing here]\n" % self._missing if self._marks and self._missing else b""
        rest = mark + data
        try:
            while rest:
                count = write_some(self._descriptor, rest)
                rest, self._size = rest[count:], self._size + count
        except BrokenPipeError:
            silence(self._descriptor)
            return
        except OSError as error:
            self._fail(error)
        self._missing = len(rest) if len(rest) <= len(data) else self._missing + len(data)

    def _fail(self, error: OSError) -> None:
        """Say that output is lost, the first time that it happens."""
        if not self.failed:
            say(f"mpiddp: {self._who}: cannot write {self._name}: {error.strerror} (at byte {self._size}); "
                "this output is lost, what follows is tried again")
        self.failed = True


def open_log(log: str, who: str) -> Sink:
    """Return a log to which output is appended."""
    descriptor = open_for_writing(log, append=True)
    return Sink(descriptor, log, who, os.fstat(descriptor).st_size, marks=True)


def prefixed(begun: dict[int, bytes], source: int, data: bytes, prefix: bytes) -> list[bytes]:
    """Return the lines that new data completes, each with the prefix, in pieces that a pipe takes whole.

    `begun` holds the beginning of each source's last line; empty `data` completes it. A carriage return,
    with which progress bars begin anew, ends a line.
    """
    text = begun[source] + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    *lines, begun[source] = text.split(b"\n")
    if not data and begun[source]:
        lines.append(begun[source])
        begun[source] = b""
    pieces = [b""]
    for line in lines:
        if len(pieces[-1]) + len(prefix) + len(line) >= WRITE_BYTES:
            pieces.append(b"")
        pieces[-1] += prefix + line + b"\n"
    return pieces
