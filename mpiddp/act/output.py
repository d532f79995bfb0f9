"""Where a rank's stdout and stderr go: to the terminal, to a log, to both, native output included."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys

from .detached import fork_detached, reap, silence
from .say import say
from .wire import Wire

DRAINING_S = 2.0  # for the relay to write what it has
WRITE_BYTES = 4096  # PIPE_BUF: what a pipe takes in one piece (man 7 pipe)


def create(log: str) -> str:
    """Make a file and the folders above it, and return why that failed, empty where it did not."""
    try:
        os.makedirs(os.path.dirname(log), exist_ok=True)
        with open(log, "ab"):
            return ""
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


class Output:
    """The output of one rank; without a log and a prefix that of a rank that is shown stays as it is."""

    def __init__(self, relayed: bool) -> None:
        """Fork a relay if the output may have to go two ways, or to get a prefix: before MPI is there."""
        self._relay = Relay() if relayed else None
        self._terminal: tuple[int, int] | None = None
        self._shown = True

    def begin(self, shown: bool, log: str, prefix: str) -> None:
        """Send what is written from now on to the terminal if `shown`, and to the file `log` if there is one."""
        self._shown = shown
        if self._relay is not None and not shown:
            self._relay.dismiss()
            self._relay = None
        if shown and not (log or prefix):
            return
        flush_python()
        self._terminal = os.dup(1), os.dup(2)
        if self._relay is not None:
            self._relay.begin(log, prefix)
            return
        file = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)

    def reveal(self, text: str) -> None:
        """Print a text on the terminal too, if this rank's output is not shown there."""
        if self._terminal and not self._shown:
            say(text, self._terminal[1])

    def end(self) -> None:
        """Return when all that was written has arrived; from now on it goes to the terminal again."""
        if self._terminal is None:
            return
        flush_python()
        for descriptor, former in enumerate(self._terminal, start=1):
            os.dup2(former, descriptor)
        if self._relay is not None:
            self._relay.end()


class Relay:
    """A process that passes a rank's output on, and has all of it also when the rank crashes."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        self._sources = os.pipe(), os.pipe()
        reading, self._writing = zip(*self._sources, strict=True)
        forking = fork_detached(lambda: relay(Wire(its), *reading), kept=(its.fileno(), *reading))
        reap(forking)
        its.close()
        for descriptor in reading:
            os.close(descriptor)
        self._control = Wire(ours)

    def dismiss(self) -> None:
        """Let it end, because it is not needed."""
        self._control.close()
        for pipe in self._writing:
            os.close(pipe)

    def begin(self, log: str, prefix: str) -> None:
        """Take over stdout and stderr."""
        self._control.send(log=log, prefix=prefix)
        for descriptor, pipe in enumerate(self._writing, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)

    def end(self) -> None:
        """Wait until the relay has passed on all that it got, and is gone."""
        with contextlib.suppress(EOFError, OSError):
            self._control.receive(DRAINING_S)


def relay(control: Wire, out: int, err: int) -> None:
    """Pass on what comes from two pipes, until they are closed."""
    try:
        message = control.receive(timeout_s=10**6)[0]
    except EOFError:
        return
    log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if message["log"] else None
    prefix = message["prefix"].encode()
    begun = {out: b"", err: b""}
    with selectors.DefaultSelector() as selector:
        selector.register(out, selectors.EVENT_READ, 1)
        selector.register(err, selectors.EVENT_READ, 2)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 65536)
                if log is not None:
                    write_all(log, data)
                if not data:
                    selector.unregister(key.fd)
                lines = prefixed(begun, key.fd, data, prefix) if prefix else [data]
                for text in lines:
                    write_all(key.data, text)


def prefixed(begun: dict[int, bytes], source: int, data: bytes, prefix: bytes) -> list[bytes]:
    """Return the lines that new data completes, prefixed, in pieces that a pipe takes whole.

    `begun` holds each source's last line, which is complete when the data ends (empty `data`). A
    carriage return, by which progress bars begin anew, ends a line.
    """
    text = begun[source] + data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    *lines, begun[source] = text.split(b"\n")
    if not data and begun[source]:
        lines.append(begun[source])
    pieces = [b""]
    for line in lines:
        if len(pieces[-1]) + len(prefix) + len(line) >= WRITE_BYTES:
            pieces.append(b"")
        pieces[-1] += prefix + line + b"\n"
    return pieces


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a descriptor; where nobody reads any more, nowhere."""
    while data:
        try:
            data = data[os.write(descriptor, data):]
        except OSError:
            silence(descriptor)


def flush_python() -> None:
    """Write out what Python's streams hold."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
