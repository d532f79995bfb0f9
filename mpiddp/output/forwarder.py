"""A rank's output in its agent: read from pipes, written to a log, and shown, or sent to an aggregator to be folded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..base.stderr import write_line
from ..base.text import field_names
from ..ipc.event_loop import EventLoop, LoopPart
from .log import LogWriter
from .protocol import AggregationConfig, ForwardConfig
from .streams import DropPolicy, Prefixer
from .writer import Terminal

if TYPE_CHECKING:
    from .aggregator import Aggregator
    from .terminal import TerminalRenderer
    from .upstream import Upstream

PIPE_BYTES = 65536  # the capacity of a pipe (man 7 pipe)
SMALL_READ_BYTES = 2**14  # reading less costs more for what is done around it than for the bytes
READ_INTERVAL_S = 0.001  # at least, after a small read: output then comes in larger pieces
FLUSH_TIMEOUT_S = 1.5
DESCENDANTS_GRACE_S = 0.2  # for what processes write that outlive the rank
STALL_TIMEOUT_S = 10.0  # after which output is given up that no terminal and no file takes


class RankOutput:
    """Reads what a rank writes to its stdout and stderr, and writes it to a log and to a sink, which shows it.

    Until configure() it is shown as it comes. The rank waits while terminal or log take nothing; this process does not.
    A rank that has the launcher's own streams has none here.
    """

    def __init__(self, loop: EventLoop, streams: dict[int, int], rank_name: str) -> None:
        """Read the pipes `streams`, by the numbers of the rank's descriptors, 1 and 2."""
        self._streams, self._rank_name = streams, rank_name
        self._loop = LoopPart(loop, "output", self._on_error)
        self._terminal = Terminal(self._loop, rank_name, self._resume)
        self._log = LogWriter(self._loop, self._resume)
        self._sink: PassThrough | Aggregator | Upstream = PassThrough(self._terminal)
        self._resume_others: Callable[[], object] = bool  # the other sources of an aggregator
        self._drop_policy: DropPolicy | None = None
        self._unfolded_prefix = ""  # for output that cannot be folded
        self._watched: set[int] = set()  # the pipes that the loop reads
        self._waiting: list[int] = []  # streams that got data during READ_INTERVAL_S, in this order
        self._flushes = 0
        self.is_shown = True  # on the terminal
        self._after_finish: Callable[[], object] | None = None
        self._is_rank_gone = self._is_closing = self._is_finished = False
        self._progress = 0  # as of the last check
        self._has_given_up = False
        for source in streams.values():
            os.set_blocking(source, False)
        self._update_reading()

    @property
    def lost_from(self) -> int:
        """The position of the first byte that the log has lost so far, -1 for none."""
        return self._log.lost_from

    @property
    def last_line(self) -> str:
        """The last line of the output that is in the log and not empty; empty without a log."""
        return self._log.last_line

    @property
    def has_lost_output(self) -> bool:
        """Whether stdout has lost some output."""
        return self._has_given_up or self._terminal.has_lost_output

    def configure(self, config: ForwardConfig, listener: int = -1) -> None:
        """Forward output as `config` says from now on; other aggregators connect to the descriptor `listener`."""
        self._catch_up()
        self._rank_name, self.is_shown = config.who, config.shown
        self._terminal.name_rank(config.who)
        self._log.open(config.log, config.who)
        if config.folding is None:
            self._sink = PassThrough(self._terminal, config.prefix, config.shown)
        else:
            self._sink = self._make_folding_sink(config.folding, config.prefix, listener)
        self._update_reading()

    def show_text(self, text: str) -> None:
        """Print a text of mpiddp's own on stderr, after what the rank has written; it is not in the log."""
        self._catch_up()
        self._terminal.write(2, [f"{text}\n".encode(errors="replace")])

    def log_text(self, text: str) -> None:
        """Write a text of mpiddp's own to the log, after what the rank has written: the stack of a crash, a report."""
        self._catch_up()
        self._log.write_text(text)

    def flush(self, then: Callable[[], object], timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Call `then` when all that the rank has written so far is shown and logged, or at the timeout.

        If output is folded, this holds for what all ranks have written. Lines without an end count as finished.
        """
        self._catch_up()
        for stream in self._streams:
            self._complete_line(stream)
        self._flushes += 1
        timer, missing = f"flush {self._flushes}", 2

        def done(is_late: bool = False) -> None:
            nonlocal missing
            missing = 0 if is_late else missing - 1
            if missing == 0:
                self._loop.cancel_timers(timer)
                then()

        self._loop.set_timer(timer, timeout_s, partial(done, is_late=True))
        self._sink.flush(done)
        self._log.flush(done)

    def finish(self, then: Callable[[], object]) -> None:
        """Call `then` when all output is shown and logged; the rank has ended.

        This waits for a slow reader, but not for one that takes nothing during STALL_TIMEOUT_S. Processes that outlive
        the rank can write for DESCENDANTS_GRACE_S. If this is called again, only the last `then` is called.
        """
        self._after_finish = then
        if self._is_finished:
            self._end()
        elif not self._is_rank_gone:
            self._is_rank_gone = True
            self._loop.set_timer("stall", STALL_TIMEOUT_S, self._check_progress)
            self._loop.set_timer("descendants", DESCENDANTS_GRACE_S, self._end_streams)
            self._catch_up()
            self._close_if_done()

    def _make_folding_sink(
        self, folding: AggregationConfig, prefix: str, listener: int
    ) -> Aggregator | Upstream | PassThrough:
        """Return the sink for folded output: another rank's aggregator, or an aggregator in this process."""
        self._unfolded_prefix, ranks = f"[{folding.rank}] ", int(folding.expected, 16)
        upstream: Upstream | None = None
        if folding.port:
            from .upstream import Upstream

            upstream = Upstream(self._loop, (folding.address, folding.port), folding.token, ranks)
        if listener < 0:
            assert upstream
            upstream.on_disconnect = self._replace_upstream
            upstream.on_drain = self._drain
            upstream.on_resume = self._update_reading
            if folding.drops:
                self._drop_policy = DropPolicy(upstream.has_room)
            return upstream
        from .aggregator import Aggregator
        from .terminal import TerminalRenderer

        def make_renderer(error: str = "") -> TerminalRenderer:
            if error:
                write_line(f"mpiddp: {self._rank_name}: {error}; its node's output is folded separately")
            return TerminalRenderer(prefix, self._terminal)

        aggregator = Aggregator(self._loop, folding, listener, upstream or make_renderer(), self._update_reading)
        self._resume_others = aggregator.resume_all
        if upstream is not None:
            upstream.on_disconnect, upstream.on_drain = make_renderer, partial(self._drain, aggregator=aggregator)
            upstream.on_resume = aggregator.resume_all
        if folding.drops:
            self._drop_policy = DropPolicy(aggregator.has_room)
        return aggregator

    def _pass_through(self) -> PassThrough:
        return PassThrough(self._terminal, self._unfolded_prefix)

    def _replace_upstream(self, error: str) -> PassThrough:
        """Return the sink to use without the aggregator."""
        if error:
            write_line(f"mpiddp: {self._rank_name}: {error}; its output is not folded")
        elif not self._is_rank_gone:
            write_line(f"mpiddp: {self._rank_name}: lost the connection to the output aggregator; "
                       "some output may be lost, and later output is not folded")
        return self._pass_through()

    def _update_reading(self) -> None:
        """Read the pipes while there is room for more; else the rank blocks once a pipe is full."""
        has_room = self._log.has_room and (self._drop_policy is not None or self._sink.has_room())
        wanted = {source: stream for stream, source in self._streams.items()
                  if has_room and stream not in self._waiting}
        for source in self._watched - wanted.keys():
            self._loop.unwatch(source)
        for source in wanted.keys() - self._watched:
            self._loop.watch(source, partial(self._read_soon, wanted[source]))
        self._watched = set(wanted)

    def _resume(self) -> None:
        """Continue when terminal or log have room again."""
        self._resume_others()
        self._update_reading()

    def _read_soon(self, stream: int) -> None:
        """Read a pipe, READ_INTERVAL_S after the last small read."""
        if self._loop.has_timer("read"):
            self._waiting.append(stream)
            self._update_reading()
        else:
            self._read(stream)

    def _read_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._update_reading()
        for stream in waiting:
            if self._streams.get(stream) in self._watched:  # else there is no room, or it has ended
                self._read(stream)

    def _read(self, stream: int) -> None:
        """Forward what a pipe holds; remove the stream if it has no writer any more."""
        try:
            data = os.read(self._streams[stream], PIPE_BYTES)
        except BlockingIOError:  # already read
            return
        if data:
            if len(data) < SMALL_READ_BYTES:
                self._loop.set_timer("read", READ_INTERVAL_S, self._read_waiting)
            self._take(stream, data)
        else:
            self._end_stream(stream)
            self._close_if_done()

    def _catch_up(self) -> None:
        """Forward what the rank has written so far."""
        for stream in list(self._streams):
            self._read(stream)

    def _take(self, stream: int, data: bytes) -> None:
        self._log.write(data)
        if self._drop_policy is not None:
            data = self._drop_policy.admit(stream, data)
        if data:
            self._sink.take(stream, data)
        self._update_reading()

    def _complete_line(self, stream: int) -> None:
        if self._drop_policy is not None and (rest := self._drop_policy.finish(stream)):
            self._sink.take(stream, rest)
        self._sink.take(stream, b"")

    def _drain(self, reply: Callable[[], object], aggregator: Aggregator | None = None) -> None:
        """Forward all output written so far, then reply."""
        self._catch_up()
        if aggregator is not None:
            aggregator.drain(reply)
        else:
            reply()

    def _end_stream(self, stream: int) -> None:
        """Read a stream no more."""
        source = self._streams.pop(stream)
        self._update_reading()
        os.close(source)
        self._complete_line(stream)

    def _end_streams(self) -> None:
        """Forward what processes have written that outlive the rank, and then no more."""
        self._catch_up()
        for stream in list(self._streams):
            self._end_stream(stream)
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Close sink and log after the rank's end, once all its output was read."""
        if self._streams or not self._is_rank_gone or self._is_closing:
            return
        self._is_closing, missing = True, 2

        def done() -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                self._end()

        self._loop.cancel_timers("descendants")
        self._sink.flush(lambda: self._sink.close(done))
        self._log.close(done)

    def _check_progress(self) -> None:
        """Give up if a write has taken the time since the last check."""
        is_idle = self._terminal.is_idle and self._log.is_idle
        progress = self._terminal.progress + self._log.progress
        if is_idle or progress != self._progress:
            self._progress = progress
            self._loop.set_timer("stall", STALL_TIMEOUT_S, self._check_progress)
        else:
            self._has_given_up = True
            write_line(f"mpiddp: {self._rank_name}: no output could be written for {STALL_TIMEOUT_S:g} s; "
                       "the rest is lost")
            self._end()

    def _end(self) -> None:
        self._is_finished = True
        self._loop.cancel_timers("stall", "descendants")
        then, self._after_finish = self._after_finish, None
        if then is not None:
            then()

    def _on_error(self, error: Exception) -> None:
        """Report an error of our own; if output is folded, continue unfolded."""
        write_line(f"mpiddp: {self._rank_name}: error in forwarding its output: {type(error).__name__}: {error}; "
                   "some output may be lost")
        if isinstance(self._sink, PassThrough):
            return
        broken, self._sink, self._drop_policy, self._has_given_up = self._sink, self._pass_through(), None, True
        self._resume_others = bool
        for source in self._watched:  # anew: the loop drops a source whose function has raised
            self._loop.unwatch(source)
        self._watched = set()
        broken.abandon()
        self._is_closing = False
        self._update_reading()
        self._close_if_done()


class PassThrough:
    """The sink that writes a rank's output to the terminal, if it `is_shown`.

    Each line gets the prefix, in which a field `time` is replaced by the line's time (str.format).
    """

    def __init__(self, terminal: Terminal, prefix: str = "", is_shown: bool = True) -> None:
        self._terminal, self._is_shown = terminal, is_shown
        self._form = prefix if field_names(prefix) else ""
        self._prefix = b"" if self._form else prefix.format().encode(errors="replace")
        self._prefixers = {stream: Prefixer(self._format_prefix) for stream in (1, 2)} if prefix else None

    def has_room(self) -> bool:
        """Return whether more may be written now."""
        return self._terminal.has_room

    def take(self, stream: int, data: bytes) -> None:
        """Write data of a stream; empty data completes an unfinished line."""
        if self._is_shown:
            pieces = self._prefixers[stream].take(data, time.monotonic()) if self._prefixers else [data][:len(data)]
            self._terminal.write(stream, pieces)

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all is shown."""
        self._terminal.flush(then)

    close = flush

    def _format_prefix(self) -> bytes:
        if not self._form:
            return self._prefix
        from datetime import datetime

        return self._form.format(time=datetime.now().astimezone()).encode(errors="replace")
