"""The relay's process: it passes a rank's output on, to the terminal, to a log, to both, or to be folded."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..base.stderr import write_line
from ..base.text import field_names
from ..ipc.channel import Wire
from ..ipc.event_loop import Loop
from ..ipc.helper_process import take_title
from ..sentinel.protocol import Message
from .fd_writer import Sink
from .lines import Prefixer
from .log import Log
from .protocol import (
    AskLost,
    CrashStack,
    Folding,
    Forward,
    Forwarded,
    Lost,
    Outflow,
    OutputSettled,
    RankEnds,
    SettleOutput,
)

if TYPE_CHECKING:
    from .aggregator import Gathering
    from .fd_writer import Overflow
    from .terminal import Screen
    from .upstream import Upstream

FOREVER_S = 10**6
PIPE_BYTES = 65536  # which a pipe holds at most (man 7 pipe)
STACK_S = 1.0  # for the sentinel to send the stack of a rank that is gone


def relay(control: Wire, out: int, err: int) -> None:
    """Pass on what comes from two pipes until they are closed, and tell the rank whether its part was lost."""
    try:
        message, *others = control.receive(FOREVER_S)
    except EOFError:
        return
    assert isinstance(message, Forward)
    take_title(f"mpiddp: output of {message.who}")
    Process(control, {1: out, 2: err}, message).run(others)


class Process:
    """Reads a rank's `streams`, and writes them to its log and to wherever they are shown."""

    def __init__(self, control: Wire, streams: dict[int, int], message: Forward) -> None:
        self._control, self._streams, self._who = control, streams, message.who
        self._loop = Loop(self._excuse)
        self._held = self._is_gone = False
        self._in_order = False  # the rank ends so
        self._awaits_stack = False  # which the sentinel sends when the rank has crashed
        self._overflow: Overflow | None = None
        self._alone = ""  # before lines that are not folded where they should be
        self._has_lost = False
        self._log = Log(message.log, message.who) if message.log.path else None
        self._way: Passing | Gathering | Upstream
        if message.folding is None:
            self._way = Passing(message.prefix, message.who, message.shown)
        else:
            listener = control.take_descriptor() if message.folding.gathers else -1
            self._way = self._fold(message.folding, message.prefix, listener)
        for source in streams.values():
            os.set_blocking(source, False)
        self._loop.listen(control, self._hear)
        self._listen()

    def run(self, messages: list[Message]) -> None:
        """Pass all on; these messages have come already."""
        self._answer(messages)
        self._loop.run()
        self._tell_all()

    def _tell_all(self) -> None:
        """Tell the rank that all is passed on, and the index of the logs how this one stands."""
        if self._log is not None:
            self._log.close(is_complete=self._in_order)
        self._control.send(Forwarded(self._way.lost or self._has_lost))

    def _fold(self, folding: Folding, prefix: str, listener: int) -> Gathering | Upstream | Passing:
        """Return where output goes that is folded: to another relay, or to what gathers that of others here."""
        from .fd_writer import Overflow

        self._alone, ranks = f"[{folding.rank}] ", int(folding.expected, 16)
        upstream: Upstream | None = None
        if folding.port:
            from .upstream import Upstream

            try:
                upstream = Upstream(self._loop, (folding.address, folding.port), folding.token, ranks)
            except OSError as error:
                write_line(f"mpiddp: {self._who}: its output cannot be folded with that of others: {error}")
        if listener < 0 and upstream is None:
            return self._show_alone()
        if listener < 0:
            assert upstream
            upstream.on_lost = self._lose
            upstream.on_drain = self._drain
            upstream.on_full, upstream.on_room = partial(self._hold, True), partial(self._hold, False)
            if folding.drops:
                self._overflow = Overflow(upstream.has_room)
            return upstream
        from .aggregator import Gathering
        from .terminal import Screen

        def screen() -> Screen:
            return Screen(prefix, self._who)

        gathering = Gathering(self._loop, folding, listener, upstream or screen(), self._hold)
        if upstream is not None:
            upstream.on_lost, upstream.on_drain = screen, partial(self._drain, gathering=gathering)
            upstream.on_room = gathering.let_all_go_on
        if folding.drops:
            self._overflow = Overflow(gathering.has_room)
        return gathering

    def _show_alone(self) -> Passing:
        return Passing(self._alone, self._who)

    def _lose(self) -> Passing:
        """Go on without the relay that folded this one's output; what the rank has left running may still write."""
        if not self._is_gone:
            write_line(f"mpiddp: {self._who}: the relay that its output was folded by is gone; some of it may be lost")
        return self._show_alone()

    def _listen(self) -> None:
        for stream, source in self._streams.items():
            self._loop.listen(source, partial(self._read, stream))

    def _hold(self, held: bool) -> None:
        """Do not read what the rank writes: it waits, once the pipe is full."""
        if self._overflow is not None or held == self._held:
            return
        self._held = held
        if held:
            for source in self._streams.values():
                self._loop.forget(source)
        else:
            self._listen()

    def _read(self, stream: int) -> None:
        """Pass on what has come; empty data says that nobody has the stream open any more."""
        try:
            data = os.read(self._streams[stream], PIPE_BYTES)
        except BlockingIOError:  # it was read already
            return
        if data:
            self._take(stream, data)
            return
        if not self._held:
            self._loop.forget(self._streams[stream])
        del self._streams[stream]
        self._pause(stream)
        self._close_if_through()

    def _close_if_through(self) -> None:
        """End when the rank has; but not before all is shown: its sentinel may report on it then."""
        if not self._streams and self._is_gone and not self._awaits_stack:
            self._way.settle(lambda: self._way.close(self._end))

    def _take(self, stream: int, data: bytes) -> None:
        if self._log is not None:
            self._log.write(data)
        if self._overflow is not None:
            data = self._overflow.let_through(stream, data)
        if data:
            self._way.take(stream, data)

    def _pause(self, stream: int) -> None:
        """Pass on a line that has no end."""
        if self._overflow is not None and (rest := self._overflow.rest(stream)):
            self._way.take(stream, rest)
        self._way.take(stream, b"")

    def _catch_up(self) -> None:
        """Pass on what the rank has written by now."""
        for stream in list(self._streams):
            self._read(stream)

    def _drain(self, reply: Callable[[], object], gathering: Gathering | None = None) -> None:
        """Hand on all that there is, then reply."""
        self._catch_up()
        if gathering is not None:
            gathering.drain(reply)
        else:
            reply()

    def _hear(self) -> None:
        """Hear the rank: when it ends, or is gone, tell it whether all it wrote is passed on."""
        try:
            messages = self._control.receive()
        except (EOFError, OSError):
            self._loop.forget(self._control)
            self._catch_up()
            for stream in list(self._streams):
                self._pause(stream)
            self._is_gone = True
            if self._awaits_stack:
                self._loop.set_timer("stack", STACK_S, self._take_stack)
            if self._streams:
                self._way.settle(self._tell_all)
            self._close_if_through()
        else:
            self._answer(messages)

    def _answer(self, messages: list[Message]) -> None:
        """Answer what the rank asks."""
        for message in messages:
            self._catch_up()
            if isinstance(message, RankEnds):
                self._in_order, self._awaits_stack = message.in_order, False
            elif isinstance(message, SettleOutput):
                self._way.settle(lambda: self._control.send(OutputSettled()))
            elif isinstance(message, AskLost):
                self._control.send(Lost(self._log.lost if self._log is not None else -1))
            elif isinstance(message, Outflow):
                sentinel = Wire(socket.socket(fileno=self._control.take_descriptor()))
                self._awaits_stack = self._log is not None
                self._loop.listen(sentinel, partial(self._hear_sentinel, sentinel))

    def _hear_sentinel(self, sentinel: Wire) -> None:
        try:
            messages = sentinel.receive()
        except (EOFError, OSError):
            self._loop.forget(sentinel)
            self._take_stack()
            return
        for message in messages:
            self._catch_up()
            if isinstance(message, SettleOutput):
                self._way.settle(lambda: sentinel.send(OutputSettled()))
            elif isinstance(message, CrashStack):
                self._take_stack(message.text)

    def _take_stack(self, text: str = "") -> None:
        """Write the stack of a crash to the log, empty for none: nothing more is waited for."""
        if self._log is not None and text:
            self._log.write_stack(text)
        if self._awaits_stack:
            self._awaits_stack = False
            self._close_if_through()

    def _end(self) -> None:
        self._loop.over = True

    def _excuse(self, error: Exception) -> None:
        """Say what went wrong here, and let the rank's output pass on by itself, where it was to be folded."""
        write_line(f"mpiddp: output of {self._who}: {type(error).__name__}: {error}; some of it may be lost")
        if isinstance(self._way, Passing):
            return
        broken, self._way, self._overflow, self._has_lost = self._way, self._show_alone(), None, True
        if not self._held:
            for source in self._streams.values():
                self._loop.forget(source)
        self._held = False
        self._listen()
        broken.abandon()
        self._close_if_through()


class Passing:
    """Passes the output of the rank called `who` to the terminal, if it is `shown`.

    `prefix` is put before its lines, with their time in the place of its field `time` (str.format).
    """

    def __init__(self, prefix: str, who: str, shown: bool = True) -> None:
        self._shown = shown
        self._form = prefix if field_names(prefix) else ""
        self._prefix = b"" if self._form else prefix.format().encode(errors="replace")
        self._terminal = {1: Sink(1, "stdout", who), 2: Sink(2, "stderr", who)}
        self._lines = {stream: Prefixer(self._now) for stream in (1, 2)} if prefix else None

    @property
    def lost(self) -> bool:
        """Tell whether stdout lost something."""
        return self._terminal[1].failed

    def take(self, stream: int, data: bytes) -> None:
        """Pass on data of a stream; empty data says that the stream pauses, and a line without an end is passed on."""
        if not self._shown:
            return
        for text in self._lines[stream].take(data, time.monotonic()) if self._lines else [data]:
            self._terminal[stream].write(text)

    def settle(self, then: Callable[[], object]) -> None:
        """Call `then`: all is passed on."""
        then()

    def close(self, then: Callable[[], object]) -> None:
        """Call `then`: all is passed on."""
        then()

    def _now(self) -> bytes:
        """Return the prefix of lines that come now."""
        if not self._form:
            return self._prefix
        from datetime import datetime

        return self._form.format(time=datetime.now().astimezone()).encode(errors="replace")
