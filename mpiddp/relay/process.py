"""The relay's process: it passes a rank's output on, to the terminal, to a log, to both."""

from __future__ import annotations

import os
import selectors
from string import Formatter

from ..beside.detached import take_title
from ..beside.messages import AskLost, Forward, Forwarded, Lost
from ..beside.wire import Wire
from ..plan.member import LogPlan
from .lines import prefixed
from .log import Log
from .sink import Sink

FOREVER_S = 10**6
PIPE_BYTES = 65536  # which a pipe holds at most (man 7 pipe)


def relay(control: Wire, out: int, err: int) -> None:
    """Pass on what comes from two pipes until they are closed, and tell the rank whether its part was lost."""
    try:
        message, *others = control.receive(FOREVER_S)
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
            ready = {key.fileobj for key, _ in selector.select(0 if others else passing.patience_s)}
            if not ready:
                passing.pause()
            for source in [source for source in streams if source in ready]:
                data = os.read(source, PIPE_BYTES)
                passing.take(streams[source], data)
                if not data:
                    selector.unregister(source)
                    del streams[source]
            if others or (control in ready and asks(control)):  # what the rank wrote before was read above
                others = []
                passing.pause()
                control.send(Lost(passing.log_lost))
            elif control in ready:  # the rank ends, or is gone
                selector.unregister(control)
                for stream in streams.values():
                    passing.take(stream, b"")
                passing.settle()
                control.send(Forwarded(passing.lost))
    passing.settle()
    control.send(Forwarded(passing.lost))


def asks(control: Wire) -> bool:
    """Tell whether the rank asks what its log has lost, and does not end."""
    try:
        return AskLost() in control.receive(0)
    except (EOFError, OSError):
        return False


class Passing:
    """Passes the output of the rank called `who` to the terminal if it is `shown`, and to a `log` if there is one.

    `prefix` is put before the terminal's lines, with their time in the place of its field `time` (str.format).
    """

    def __init__(self, log: LogPlan, prefix: str, who: str, shown: bool) -> None:
        self._form = prefix if any(field for _, field, _, _ in Formatter().parse(prefix)) else ""
        self._prefix = b"" if self._form else prefix.format().encode(errors="replace")
        self._begun = {1: b"", 2: b""}
        self._terminal = {1: Sink(1, "stdout", who), 2: Sink(2, "stderr", who)}
        self._log = Log(log, who) if log.path else None
        self._shown = shown

    @property
    def lost(self) -> bool:
        """Tell whether stdout lost something."""
        return self._terminal[1].failed

    @property
    def log_lost(self) -> int:
        """The first byte that the log has lost, -1 for none."""
        return self._log.lost if self._log is not None else -1

    @property
    def patience_s(self) -> float | None:
        """The seconds without output after which pause() is to be called, None for never."""
        return self._log.patience_s if self._log is not None else None

    def pause(self) -> None:
        """Write to the log what waits for more."""
        if self._log is not None:
            self._log.pause()

    def settle(self) -> None:
        """Let the log tell the index how it stands."""
        if self._log is not None:
            self._log.settle()

    def take(self, stream: int, data: bytes) -> None:
        """Pass on data of a stream; empty data says that the stream pauses, and a line without an end is passed on."""
        if self._log is not None:
            self._log.write(data)
        if not self._shown:
            return
        for text in prefixed(self._begun, stream, data, self._now()) if self._prefix or self._form else [data]:
            self._terminal[stream].write(text)

    def _now(self) -> bytes:
        """Return the prefix of lines that come now."""
        if not self._form:
            return self._prefix
        from datetime import datetime

        return self._form.format(time=datetime.now().astimezone()).encode(errors="replace")
