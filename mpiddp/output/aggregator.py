"""Output of several ranks comes together: on each node that of its ranks, and on rank 0's node that of all nodes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from ..ipc.event_loop import EventLoop
from ..ipc.listener import AuthListener, enable_keepalive
from .line_merger import LineMerger, MergedLines
from .lines import Splitter
from .protocol import AggregationConfig
from .terminal import Bar, Bars
from .upstream import OUTPUT, Kind, Link, lines_of, ranks_of

if TYPE_CHECKING:
    from .terminal import Screen
    from .upstream import Upstream

NODE = 0.25  # of the window, for the lines of a node: rank 0's node waits for other nodes afterwards
SETTLING_S, SETTLING_NODE_S = 0.6, 0.3  # for all, and for those of a node, to hand on what they have said
CLOSING_S = 2.0  # for the others to end after this rank
DRAWING_S = 0.2  # between two looks at progress bars

OWN = "own"  # the source that is this rank


class Gathering:
    """Folds what comes from sources: this process's own rank, other ranks, and nodes; `way` is where it goes."""

    def __init__(self, loop: EventLoop, folding: AggregationConfig, listener: int, way: Screen | Upstream,
                 hold: Callable[[bool], None]) -> None:
        """Listen at a descriptor for other relays; `hold` is called to hold the own rank back, or to let it go on."""
        self._loop, self._way, self._hold = loop, way, hold
        self._left = int(folding.expected, 16)  # the ranks that may say something
        self._bit = 1 << folding.rank
        self._merger = LineMerger(self._left, folding.window_s * (NODE if folding.port else 1), folding.drops)
        self._entrance = AuthListener(
            loop, socket.socket(fileno=listener), folding.token, self._left.bit_count(), self._admit)
        self._links: dict[Hashable, Link] = {}
        self._admitted = 0  # so many, each a source of that number
        self._splitters: dict[tuple[Hashable, int], Splitter] = {}
        self._held: set[Hashable] = set()
        self._awaited: set[Hashable] = set()  # links that hand on what they have
        self._after: list[Callable[[], object]] = []  # what to do when they have
        self._closed: Callable[[], object] | None = None
        self._bars = Bars()

    @property
    def lost(self) -> bool:
        """Tell whether stdout lost something."""
        return self._way.lost

    def has_room(self) -> bool:
        """Tell whether the own rank may say more now."""
        return self._way.has_room() and not self._merger.is_ahead(OWN)

    def take(self, stream: int, data: bytes) -> None:
        """Take data of the own rank; empty data says that the stream pauses."""
        self._take_data(OWN, self._bit, stream, data)
        self._show(OWN)

    def settle(self, then: Callable[[], object]) -> None:
        """Show all that the ranks have said before, then call `then`."""
        self.drain(partial(self._way.settle, then))

    def drain(self, then: Callable[[], object]) -> None:
        """Let all hand on what they have, then call `then`."""
        self._after.append(then)
        if len(self._after) > 1:
            return
        for source, link in list(self._links.items()):
            self._ask(source, link)
        self._loop.set_timer("settling", SETTLING_NODE_S if self._way.is_far else SETTLING_S, self._settled)
        self._settle_if_through()

    def _ask(self, source: Hashable, link: Link) -> None:
        """Ask a relay for what it has."""
        if link.send(Kind.DRAIN):
            self._awaited.add(source)

    def close(self, then: Callable[[], object]) -> None:
        """Call `then` when the other ranks have ended, too, or do not; this one has."""
        self._gone(OWN, self._bit)
        self._closed = then
        self._loop.set_timer("closing", CLOSING_S, self._close)
        self._close_if_through()

    def abandon(self) -> None:
        """Let the others show their output themselves."""
        for name in ("window", "bars", "settling", "closing"):
            self._loop.cancel_timers(name)
        self._entrance.close()
        for link in self._links.values():
            self._loop.unwatch(link.fileno())
            link.close()
        self._links.clear()
        self._way.abandon()
        after, self._after = self._after, []
        for act in after:
            self._loop.call_safely(act)

    def _admit(self, connection: socket.socket) -> None:
        """Take the connection of another relay, which has shown the token."""
        connection.settimeout(None)
        enable_keepalive(connection)
        self._admitted += 1
        self._links[self._admitted] = link = Link(connection)
        self._loop.watch(link.fileno(), partial(self._hear, self._admitted))

    def _hear(self, source: int) -> None:
        link = self._links[source]
        if self._closed is not None:  # what comes late is waited for
            self._loop.set_timer("closing", CLOSING_S, self._close)
        try:
            for kind, data in link.receive():
                link.untold += len(data) if kind in OUTPUT else 0
                self._take(source, link, kind, data)
        except EOFError:
            self._drop(source, link)
        self._show(source)

    def _take(self, source: int, link: Link, kind: Kind, data: bytes) -> None:
        match kind:
            case Kind.STDOUT | Kind.STDERR:
                self._take_data(source, link.ranks, int(kind), data)
            case Kind.LINES:
                now_s = time.monotonic()
                for lines in lines_of(data):
                    self._merger.take(source, lines, now_s)
            case Kind.RANKS:
                link.ranks = ranks_of(data)
                if self._after:
                    self._ask(source, link)
            case Kind.BAR:
                self._draw(*(Bar(*one) for one in json.loads(data)))
            case Kind.GONE:
                self._gone(None, ranks_of(data))
            case Kind.SETTLE:
                self.settle(partial(link.send, Kind.SETTLED))
            case Kind.DRAINED:
                self._awaited.discard(source)
                self._settle_if_through()
            case _:
                raise ValueError(f"{kind!r} from another relay")

    def _take_data(self, source: Hashable, ranks: int, stream: int, data: bytes) -> None:
        """Take what one rank has written."""
        splitter = self._splitters.get((source, stream))
        if splitter is None:
            splitter = self._splitters[source, stream] = Splitter()
        before = splitter.bar
        block = splitter.take(data)
        if block is not None:
            lines = block.decode(errors="surrogateescape").split("\n")
            self._merger.take(source, MergedLines(ranks, stream, lines), time.monotonic())
        if splitter.bar != before:
            self._draw(Bar(ranks.bit_length() - 1, stream, splitter.bar.decode(errors="surrogateescape")))

    def _draw(self, *bars: Bar) -> None:
        """Hand on soon which progress bar is to be seen."""
        self._bars.take(bars)
        if not self._loop.has_timer("bars"):
            self._loop.set_timer("bars", DRAWING_S, self._draw_bars)

    def _draw_bars(self) -> None:
        if news := self._bars.news():
            self._way.draw(news)

    def _show_due(self) -> None:
        """Hand on the lines that have waited for a window, now that all sources have been heard."""
        self._show(is_due=True)

    def _show(self, source: Hashable = None, is_due: bool = False) -> None:
        """Hand on the lines that are ready; hold a source back that is far ahead of others, until it is not."""
        now_s = time.monotonic()
        if ready := self._merger.ready(now_s, is_due):
            self._draw_bars()
            self._way.show(ready)
        due_s = self._merger.due_s()
        if due_s is not None and not self._loop.has_timer("window"):
            self._loop.set_timer("window", max(0.0, due_s - now_s), self._show_due)
        if source == OWN or source in self._links:
            self._let_go_on(source)
        if self._held and self._way.has_room():
            self.let_all_go_on()

    def let_all_go_on(self) -> None:
        """Let sources go on that were held back, if they may."""
        for source in list(self._held):
            self._let_go_on(source)

    def _let_go_on(self, source: Hashable) -> None:
        """Let a source go on, by telling it that what it has said is taken; hold it back if it is ahead of others."""
        held = not self._way.has_room() or self._merger.is_ahead(source)
        (self._held.add if held else self._held.discard)(source)
        if source == OWN:
            self._hold(held)
        elif not held and (link := self._links[source]).untold:
            link.send(Kind.TAKEN, b"%d" % link.untold)
            link.untold = 0

    def _drop(self, source: int, link: Link) -> None:
        """Forget a relay that has ended."""
        self._loop.unwatch(link.fileno())
        for stream in (1, 2):
            if (source, stream) in self._splitters:
                self._take_data(source, link.ranks, stream, b"")
        del self._links[source]
        self._held.discard(source)
        link.close()
        self._awaited.discard(source)
        self._gone(source, link.ranks)

    def _gone(self, source: Hashable, ranks: int) -> None:
        """Expect nothing more of these ranks."""
        self._left &= ~ranks
        for key in [key for key in self._splitters if key[0] == source]:
            del self._splitters[key]
        self._merger.gone(ranks)
        self._bars.gone(ranks)
        self._show()
        self._way.gone(ranks)
        self._settle_if_through()
        self._close_if_through()

    def _settle_if_through(self) -> None:
        """Settle once all have handed on what they have, those too that have not connected yet."""
        missing = self._left & ~self._bit
        for link in self._links.values():
            missing &= ~link.ranks
        if self._after and not self._awaited and not missing:
            self._settled()

    def _settled(self) -> None:
        """Show all that has been handed on, and do what was to be done after that."""
        self._loop.cancel_timers("settling")
        self._awaited.clear()
        self._show_rest()
        after, self._after = self._after, []
        for act in after:
            self._loop.call_safely(act)

    def _show_rest(self) -> None:
        if rest := self._merger.rest():
            self._way.show(rest)

    def _close_if_through(self) -> None:
        if self._closed is not None and not self._left & ~self._bit:
            self._close()

    def _close(self) -> None:
        """Show what is left, and end."""
        self._loop.cancel_timers("closing")
        then, self._closed = self._closed, None
        self._show_rest()
        if then is not None:
            then()
