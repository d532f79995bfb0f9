"""The output relay process: forwards a rank's output to the terminal or to an aggregator, and to a log."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..base.errors import assert_never
from ..base.stderr import write_line
from ..base.text import field_names
from ..ipc.channel import Channel, Codec, Unreadable
from ..ipc.event_loop import EventLoop
from ..ipc.helper_process import set_process_title
from .log import RankLog
from .protocol import (
    AgentToRelay,
    AggregationConfig,
    CrashStack,
    Flush,
    Flushed,
    ForwardConfig,
    Forwarded,
    LossReply,
    QueryLoss,
    RankEnds,
    RankToRelay,
    RelaySocket,
    RelayToAgent,
    RelayToRank,
)
from .streams import DropPolicy, FdWriter, Prefixer

if TYPE_CHECKING:
    from .aggregator import Aggregator
    from .terminal import TerminalRenderer
    from .upstream import Upstream

RankChannel = Channel[RelayToRank, RankToRelay]
AgentChannel = Channel[RelayToAgent, AgentToRelay]
RANK_CODEC: Codec[RankToRelay] = Codec(RankToRelay)
AGENT_CODEC: Codec[AgentToRelay] = Codec(AgentToRelay)

NO_TIMEOUT_S = 10**6
PIPE_BYTES = 65536  # the capacity of a pipe (man 7 pipe)
CRASH_STACK_TIMEOUT_S = 1.0  # for the agent to send a crashed rank's stack


def forward_output(sock: socket.socket, out: int, err: int) -> None:
    """Forward the output in two pipes until their writers close them; the rank sends its requests over `sock`."""
    control = RankChannel(sock, RANK_CODEC)
    try:
        message, *others = control.receive(NO_TIMEOUT_S)
    except EOFError:
        return
    assert isinstance(message, ForwardConfig)
    set_process_title(f"mpiddp: output of {message.who}")
    Forwarder(control, {1: out, 2: err}, message).run(others)


class Forwarder:
    """Reads a rank's `streams` and writes them to its log and to a sink, which shows them."""

    def __init__(self, control: RankChannel, streams: dict[int, int], message: ForwardConfig) -> None:
        self._control, self._streams, self._rank_name = control, streams, message.who
        self._loop = EventLoop(self._on_error)
        self._is_held = False
        self._is_rank_gone = False
        self._awaits_stack = False  # from the agent, if the rank has crashed
        self._drop_policy: DropPolicy | None = None
        self._unfolded_prefix = ""  # for output that cannot be folded
        self._has_lost_output = False
        self._log = RankLog(message.log, message.who) if message.log.path else None
        self._sink: PassThrough | Aggregator | Upstream
        if message.folding is None:
            self._sink = PassThrough(message.prefix, message.who, message.shown)
        else:
            listener = control.take_descriptor() if message.folding.gathers else -1
            self._sink = self._make_folding_sink(message.folding, message.prefix, listener)
        for source in streams.values():
            os.set_blocking(source, False)
        self._loop.watch(control, self._receive)
        self._listen()

    def run(self, messages: list[RankToRelay | Unreadable]) -> None:
        """Forward all output, after answering messages that have already arrived."""
        self._answer(messages)
        self._loop.run()
        self._finish()

    def _finish(self) -> None:
        """Close the log, and report to the rank that all output is forwarded."""
        if self._log is not None:
            self._log.close()
        self._control.send(Forwarded(self._sink.has_lost_output or self._has_lost_output))

    def _make_folding_sink(
        self, folding: AggregationConfig, prefix: str, listener: int
    ) -> Aggregator | Upstream | PassThrough:
        """Return the sink for folded output: another relay, or an aggregator in this process."""
        self._unfolded_prefix, ranks = f"[{folding.rank}] ", int(folding.expected, 16)
        upstream: Upstream | None = None
        if folding.port:
            from .upstream import Upstream

            upstream = Upstream(self._loop, (folding.address, folding.port), folding.token, ranks)
        if listener < 0 and upstream is None:
            return self._pass_through()
        if listener < 0:
            assert upstream
            upstream.on_disconnect = self._replace_upstream
            upstream.on_drain = self._drain
            upstream.on_pause, upstream.on_resume = partial(self._hold, True), partial(self._hold, False)
            if folding.drops:
                self._drop_policy = DropPolicy(upstream.has_room)
            return upstream
        from .aggregator import Aggregator
        from .terminal import TerminalRenderer

        def make_renderer(error: str = "") -> TerminalRenderer:
            if error:
                write_line(f"mpiddp: {self._rank_name}: {error}; its node's output is folded separately")
            return TerminalRenderer(prefix, self._rank_name)

        aggregator = Aggregator(self._loop, folding, listener, upstream or make_renderer(), self._hold)
        if upstream is not None:
            upstream.on_disconnect, upstream.on_drain = make_renderer, partial(self._drain, aggregator=aggregator)
            upstream.on_resume = aggregator.resume_all
        if folding.drops:
            self._drop_policy = DropPolicy(aggregator.has_room)
        return aggregator

    def _pass_through(self) -> PassThrough:
        return PassThrough(self._unfolded_prefix, self._rank_name)

    def _replace_upstream(self, error: str) -> PassThrough:
        """Return the sink to use without the aggregator; processes that outlive the rank may still write."""
        if error:
            write_line(f"mpiddp: {self._rank_name}: {error}; its output is not folded")
        elif not self._is_rank_gone:
            write_line(f"mpiddp: {self._rank_name}: lost the connection to the output aggregator; "
                       "some output may be lost, and later output is not folded")
        return self._pass_through()

    def _listen(self) -> None:
        for stream, source in self._streams.items():
            self._loop.watch(source, partial(self._read, stream))

    def _hold(self, is_held: bool) -> None:
        """Stop or resume reading the rank's output; the rank blocks once a pipe is full."""
        if self._drop_policy is not None or is_held == self._is_held:
            return
        self._is_held = is_held
        if is_held:
            for source in self._streams.values():
                self._loop.unwatch(source)
        else:
            self._listen()

    def _read(self, stream: int) -> None:
        """Forward what a pipe holds; remove the stream if it has no writer any more."""
        try:
            data = os.read(self._streams[stream], PIPE_BYTES)
        except BlockingIOError:  # already read
            return
        if data:
            self._take(stream, data)
            return
        if not self._is_held:
            self._loop.unwatch(self._streams[stream])
        del self._streams[stream]
        self._pause(stream)
        self._close_if_done()

    def _close_if_done(self) -> None:
        """End after the rank, once all its output is shown; then its agent may report a failure."""
        if not self._streams and self._is_rank_gone and not self._awaits_stack:
            self._sink.flush(lambda: self._sink.close(self._end))

    def _take(self, stream: int, data: bytes) -> None:
        if self._log is not None:
            self._log.write(data)
        if self._drop_policy is not None:
            data = self._drop_policy.admit(stream, data)
        if data:
            self._sink.take(stream, data)

    def _pause(self, stream: int) -> None:
        if self._drop_policy is not None and (rest := self._drop_policy.finish(stream)):
            self._sink.take(stream, rest)
        self._sink.take(stream, b"")

    def _catch_up(self) -> None:
        """Forward what the rank has written so far."""
        for stream in list(self._streams):
            self._read(stream)

    def _drain(self, reply: Callable[[], object], aggregator: Aggregator | None = None) -> None:
        """Forward all output written so far, then reply."""
        self._catch_up()
        if aggregator is not None:
            aggregator.drain(reply)
        else:
            reply()

    def _receive(self) -> None:
        """Answer the rank's messages; finish when it has exited."""
        try:
            messages = self._control.receive()
        except (EOFError, OSError):
            self._loop.unwatch(self._control)
            self._catch_up()
            for stream in list(self._streams):
                self._pause(stream)
            self._is_rank_gone = True
            if self._awaits_stack:
                self._loop.set_timer("stack", CRASH_STACK_TIMEOUT_S, self._take_stack)
            if self._streams:
                self._sink.flush(self._finish)
            self._close_if_done()
        else:
            self._answer(messages)

    def _answer(self, messages: list[RankToRelay | Unreadable]) -> None:
        for message in messages:
            self._catch_up()
            match message:
                case RankEnds():
                    self._awaits_stack = False
                case Flush():
                    self._sink.flush(lambda: self._control.send(Flushed()))
                case QueryLoss():
                    self._control.send(LossReply(self._log.lost_from if self._log is not None else -1))
                case RelaySocket():
                    agent = AgentChannel(socket.socket(fileno=self._control.take_descriptor()), AGENT_CODEC)
                    self._awaits_stack = self._log is not None
                    self._loop.watch(agent, partial(self._receive_from_agent, agent))
                case ForwardConfig() | Unreadable():
                    pass
                case _:
                    assert_never(message)

    def _receive_from_agent(self, agent: AgentChannel) -> None:
        try:
            messages = agent.receive()
        except (EOFError, OSError):
            self._loop.unwatch(agent)
            self._take_stack()
            return
        for message in messages:
            self._catch_up()
            if isinstance(message, Flush):
                self._sink.flush(lambda: agent.send(Flushed()))
            elif isinstance(message, CrashStack):
                self._take_stack(message.text)

    def _take_stack(self, text: str = "") -> None:
        """Write the stack of a crash, if any, to the log; the agent sends nothing more."""
        if self._log is not None and text:
            self._log.write_stack(text)
        if self._awaits_stack:
            self._awaits_stack = False
            self._close_if_done()

    def _end(self) -> None:
        self._loop.stop()

    def _on_error(self, error: Exception) -> None:
        """Report an error in the relay itself; if output is folded, continue unfolded."""
        write_line(f"mpiddp: {self._rank_name}: error in the output relay: {type(error).__name__}: {error}; "
                   "some output may be lost")
        if isinstance(self._sink, PassThrough):
            return
        broken, self._sink, self._drop_policy, self._has_lost_output = self._sink, self._pass_through(), None, True
        if not self._is_held:
            for source in self._streams.values():
                self._loop.unwatch(source)
        self._is_held = False
        self._listen()
        broken.abandon()
        self._close_if_done()


class PassThrough:
    """The sink that writes a rank's output to the terminal, if it `is_shown`.

    Each line gets the prefix, in which a field `time` is replaced by the line's time (str.format).
    """

    def __init__(self, prefix: str, rank_name: str, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._form = prefix if field_names(prefix) else ""
        self._prefix = b"" if self._form else prefix.format().encode(errors="replace")
        self._writers = {1: FdWriter(1, "stdout", rank_name), 2: FdWriter(2, "stderr", rank_name)}
        self._prefixers = {stream: Prefixer(self._format_prefix) for stream in (1, 2)} if prefix else None

    @property
    def has_lost_output(self) -> bool:
        """Whether output to stdout was lost."""
        return self._writers[1].has_failed

    def take(self, stream: int, data: bytes) -> None:
        """Write data of a stream; empty data completes an unfinished line."""
        if not self._is_shown:
            return
        for text in self._prefixers[stream].take(data, time.monotonic()) if self._prefixers else [data]:
            self._writers[stream].write(text)

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` at once: no output waits here."""
        then()

    close = flush

    def _format_prefix(self) -> bytes:
        if not self._form:
            return self._prefix
        from datetime import datetime

        return self._form.format(time=datetime.now().astimezone()).encode(errors="replace")
