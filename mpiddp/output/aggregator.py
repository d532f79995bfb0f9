"""Aggregates the output of several ranks: on each node that of its ranks, on rank 0's node that of the whole job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from ..base.errors import assert_never
from ..ipc.authentication import AuthListener, enable_keepalive
from ..ipc.channel import Codec, Unreadable
from ..ipc.connection import Connection
from ..ipc.event_loop import EventLoop
from .line_merger import LineMerger, MergedLines
from .protocol import (
    Accepted,
    AggregationConfig,
    Bars,
    Drain,
    Drained,
    Flush,
    Flushed,
    FromAggregator,
    Lines,
    Output,
    RanksDone,
    ServedRanks,
    ToAggregator,
)
from .streams import Splitter
from .terminal import ProgressBar, ProgressBars
from .upstream import decode_bars, decode_lines

if TYPE_CHECKING:
    from .terminal import TerminalRenderer
    from .upstream import Upstream

NODE_WINDOW_SHARE = 0.25  # of the window, to merge a node's lines: rank 0's node then waits for the other nodes
DRAIN_TIMEOUT_S, NODE_DRAIN_TIMEOUT_S = 0.6, 0.3  # for all sources, or those of one node, to send their output
CLOSE_TIMEOUT_S = 2.0  # for the other ranks to end after this one
BAR_UPDATE_INTERVAL_S = 0.2

OWN_RANK = "own"  # the source of this process's own rank
CODEC: Codec[ToAggregator] = Codec(ToAggregator)


class Source:
    """Another rank or node that sends its output."""

    def __init__(self, connection: Connection[FromAggregator, ToAggregator]) -> None:
        self.connection = connection
        self.ranks = 0  # whose output it sends
        self.unaccepted_bytes = 0  # of its output


class Aggregator:
    """Merges the output of its sources (its own rank, other ranks, nodes) and sends it to `sink`."""

    def __init__(
        self, loop: EventLoop, folding: AggregationConfig, listener: int, sink: TerminalRenderer | Upstream,
        update_own: Callable[[], None],
    ) -> None:
        """Accept other agents on the descriptor `listener`; `update_own` is called when has_room() may have changed."""
        self._loop, self._sink, self._update_own = loop, sink, update_own
        self._expected = int(folding.expected, 16)  # ranks that may still send output
        self._own_bit = 1 << folding.rank
        window_s = folding.window_s * (NODE_WINDOW_SHARE if folding.port else 1)
        self._merger = LineMerger(self._expected, window_s, folding.drops, folding.keeps_numbers)
        self._listener = AuthListener(
            loop, socket.socket(fileno=listener), folding.token, self._expected.bit_count(), self._admit)
        self._sources: dict[Hashable, Source] = {}  # by their keys
        self._last_source = 0
        self._splitters: dict[tuple[Hashable, int], Splitter] = {}
        self._held: set[Hashable] = set()  # keys of sources
        self._draining: set[Hashable] = set()  # those that have not answered Drain yet
        self._after_drain: list[Callable[[], object]] = []
        self._after_close: Callable[[], object] | None = None
        self._bars = ProgressBars()

    def has_room(self) -> bool:
        """Return whether the own rank may write now."""
        return self._sink.has_room() and not self._merger.is_ahead(OWN_RANK)

    def take(self, stream: int, data: bytes) -> None:
        """Take data of the own rank; empty data completes an unfinished line."""
        self._take_data(OWN_RANK, self._own_bit, stream, data)
        self._show(OWN_RANK)

    def flush(self, then: Callable[[], object]) -> None:
        """Call `then` when all output that the ranks have written so far is shown."""
        self.drain(partial(self._sink.flush, then))

    def drain(self, then: Callable[[], object]) -> None:
        """Call `then` when all sources have sent their output, or at the timeout."""
        self._after_drain.append(then)
        if len(self._after_drain) > 1:
            return
        for key in self._sources:
            self._request_drain(key)
        timeout_s = NODE_DRAIN_TIMEOUT_S if self._sink.is_remote else DRAIN_TIMEOUT_S
        self._loop.set_timer("drain", timeout_s, self._end_drain)
        self._end_drain_if_done()

    def _request_drain(self, key: Hashable) -> None:
        self._draining.add(key)
        self._sources[key].connection.send(Drain())

    def close(self, then: Callable[[], object]) -> None:
        """Call `then` when the other ranks have ended as well as this one, or at the timeout."""
        self._end_ranks(OWN_RANK, self._own_bit)
        self._after_close = then
        self._loop.set_timer("close", CLOSE_TIMEOUT_S, self._close)
        self._close_if_done()

    def abandon(self) -> None:
        """Disconnect the other agents; they then show their output themselves."""
        for name in ("window", "bars", "drain", "close"):
            self._loop.cancel_timers(name)
        self._listener.close()
        for source in self._sources.values():
            source.connection.close()
        self._sources.clear()
        self._sink.abandon()
        self._call_after_drain()

    def _admit(self, connection: socket.socket) -> None:
        """Accept the authenticated connection of another agent."""
        enable_keepalive(connection, may_stall=True)
        self._last_source += 1
        key = self._last_source
        self._sources[key] = Source(Connection(
            self._loop, connection, CODEC, partial(self._receive, key), lambda _: self._disconnect(key)))

    def _receive(self, key: int, messages: list[ToAggregator | Unreadable]) -> None:
        if self._after_close is not None:  # late output extends the timeout
            self._loop.set_timer("close", CLOSE_TIMEOUT_S, self._close)
        for message in messages:
            self._take_message(key, self._sources[key], message)
        self._show(key)

    def _take_message(self, key: int, source: Source, message: ToAggregator | Unreadable) -> None:
        match message:
            case Output(stream, data):
                source.unaccepted_bytes += len(data)
                self._take_data(key, source.ranks, stream, data)
            case Lines(data):
                source.unaccepted_bytes += len(data)
                now_s = time.monotonic()
                for lines in decode_lines(data):
                    self._merger.add(key, lines, now_s)
            case ServedRanks(ranks):
                source.ranks = int(ranks, 16)
                if self._after_drain:
                    self._request_drain(key)
            case Bars(data):
                self._update_bars(*decode_bars(data))
            case RanksDone(ranks):
                self._end_ranks(None, int(ranks, 16))
            case Flush():
                self.flush(partial(source.connection.send, Flushed()))
            case Drained():
                self._draining.discard(key)
                self._end_drain_if_done()
            case Unreadable(error):
                raise ValueError(error)
            case _:
                assert_never(message)

    def _take_data(self, source: Hashable, ranks: int, stream: int, data: bytes) -> None:
        splitter = self._splitters.get((source, stream))
        if splitter is None:
            splitter = self._splitters[source, stream] = Splitter()
        before = splitter.bar
        block = splitter.take(data)
        if block is not None:
            lines = block.decode(errors="surrogateescape").split("\n")
            self._merger.add(source, MergedLines(ranks, stream, lines), time.monotonic())
        if splitter.bar != before:
            self._update_bars(
                ProgressBar(ranks.bit_length() - 1, stream, splitter.bar.decode(errors="surrogateescape")))

    def _update_bars(self, *bars: ProgressBar) -> None:
        """Take new states of progress bars; the sink gets them within BAR_UPDATE_INTERVAL_S."""
        self._bars.update(bars)
        if not self._loop.has_timer("bars"):
            self._loop.set_timer("bars", BAR_UPDATE_INTERVAL_S, self._draw_bars)

    def _draw_bars(self) -> None:
        if changes := self._bars.take_changes():
            self._sink.draw(changes)

    def _show(self, source: Hashable = None, is_due: bool = False) -> None:
        """Show the lines that are ready; pause `source` if it is far ahead of others.

        With `is_due` all sources have been read, and lines that have waited for a window are shown.
        """
        now_s = time.monotonic()
        if ready := self._merger.pop_ready(now_s, is_due):
            self._draw_bars()
            self._sink.show(ready)
        due_s = self._merger.next_due_s()
        if due_s is not None and not self._loop.has_timer("window"):
            self._loop.set_timer("window", max(0.0, due_s - now_s), partial(self._show, is_due=True))
        if source == OWN_RANK or source in self._sources:
            self._hold_or_resume(source)
        if self._held and self._sink.has_room():
            self.resume_all()

    def resume_all(self) -> None:
        """Resume the paused sources for which there is room."""
        for source in list(self._held):
            self._hold_or_resume(source)

    def _hold_or_resume(self, source: Hashable) -> None:
        """Pause a source if it is far ahead of others; otherwise acknowledge its output, which resumes it."""
        is_held = not self._sink.has_room() or self._merger.is_ahead(source)
        (self._held.add if is_held else self._held.discard)(source)
        if source == OWN_RANK:
            self._update_own()
        elif not is_held and (size := self._sources[source].unaccepted_bytes):
            self._sources[source].unaccepted_bytes = 0
            self._sources[source].connection.send(Accepted(size))

    def _disconnect(self, key: int) -> None:
        """Remove a source that has ended."""
        ranks = self._sources.pop(key).ranks
        for stream in (1, 2):
            if (key, stream) in self._splitters:
                self._take_data(key, ranks, stream, b"")
        self._held.discard(key)
        self._draining.discard(key)
        self._end_ranks(key, ranks)

    def _end_ranks(self, source: Hashable, ranks: int) -> None:
        """Expect no more output of these ranks."""
        self._expected &= ~ranks
        for key in [key for key in self._splitters if key[0] == source]:
            del self._splitters[key]
        self._merger.remove_ranks(ranks)
        self._bars.remove_ranks(ranks)
        self._show()
        self._sink.remove_ranks(ranks)
        self._end_drain_if_done()
        self._close_if_done()

    def _end_drain_if_done(self) -> None:
        """End a drain once all sources have sent their output, including those that had not connected yet."""
        missing = self._expected & ~self._own_bit
        for source in self._sources.values():
            missing &= ~source.ranks
        if self._after_drain and not self._draining and not missing:
            self._end_drain()

    def _end_drain(self) -> None:
        """Show all output, then make the calls that waited for the drain."""
        self._loop.cancel_timers("drain")
        self._draining.clear()
        self._show_rest()
        self._call_after_drain()

    def _call_after_drain(self) -> None:
        after, self._after_drain = self._after_drain, []
        for act in after:
            self._loop.call_safely(act)

    def _show_rest(self) -> None:
        if rest := self._merger.pop_all():
            self._sink.show(rest)

    def _close_if_done(self) -> None:
        if self._after_close is not None and not self._expected & ~self._own_bit:
            self._close()

    def _close(self) -> None:
        """Show the remaining lines, then call the function given to close()."""
        self._loop.cancel_timers("close")
        then, self._after_close = self._after_close, None
        self._show_rest()
        if then is not None:
            self._sink.close(then)
