"""What people see of folded lines and of progress bars, on stdout and stderr of rank 0."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from ..base.text import field_names
from .fd_writer import Sink
from .line_merger import MergedLines, named
from .lines import BAR_S, pieces, prefixed


class Bar(NamedTuple):
    """The state of a rank's bar on a stream, 1 or 2; without text it is gone."""

    rank: int
    stream: int
    text: str


class Bars:
    """The bars that are drawn at the moment."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[int, int], Bar] = {}
        self._told: dict[tuple[int, int], Bar] = {}

    def take(self, bars: Iterable[Bar]) -> None:
        """Take new states."""
        for one in bars:
            if one.text.strip():
                self._drawn[one.rank, one.stream] = one
            else:
                self._drawn.pop((one.rank, one.stream), None)

    def gone(self, ranks: int) -> None:
        """Forget those of ranks, the bits of a number, that say nothing any more."""
        self._drawn = {key: one for key, one in self._drawn.items() if not ranks >> one.rank & 1}

    def lowest(self) -> Bar | None:
        """Return the bar to show."""
        return self._drawn[min(self._drawn)] if self._drawn else None

    def news(self) -> list[Bar]:
        """Return what somebody else has to know who shows one bar: since the last call, those that are gone, and it."""
        lowest = self.lowest()
        shown = {(lowest.rank, lowest.stream): lowest} if lowest else {}
        found = [one._replace(text="") for key, one in self._told.items() if key not in shown]
        found += [one for key, one in shown.items() if self._told.get(key) != one]
        self._told = shown
        return found


ERASE = b"\r\033[K"
DRAWING_S = 0.1  # between two states of a bar on a terminal
MANY = 1000  # prefixes that are kept


class Screen:
    """Shows folded lines after their ranks, and below them the progress bar of the lowest rank that draws one."""

    is_far = False

    def __init__(self, form: str, who: str) -> None:
        """Write to this process's stdout and stderr; `form` is a prefix with fields `rank` and `time`."""
        self._form, self._tells_time = form, "time" in field_names(form)
        self._prefixes: dict[int, bytes] = {}  # of ranks
        self._sinks = {1: Sink(1, "stdout", who), 2: Sink(2, "stderr", who)}
        self._is_terminal = {stream: os.isatty(stream) for stream in self._sinks}
        self._bars = Bars()
        self._erases = 0  # the stream, a terminal, on which a bar is drawn at the moment
        self._drawn_s = -BAR_S

    def has_room(self) -> bool:
        """Tell that more may be handed on: who writes waits until it is taken."""
        return True

    @property
    def lost(self) -> bool:
        """Tell whether stdout lost something."""
        return self._sinks[1].failed

    def show(self, lines: Sequence[MergedLines]) -> None:
        """Show lines."""
        self._erase()
        for stream, group in itertools.groupby(lines, key=lambda one: one.stream):
            for piece in pieces(b"".join(map(self._lines, group))):
                self._sinks[stream].write(piece)
        self._draw()

    def draw(self, bars: Iterable[Bar]) -> None:
        """Take the states of progress bars."""
        self._bars.take(bars)
        self._draw()

    def gone(self, ranks: int) -> None:
        """Forget the bars of ranks that say nothing any more."""
        self._bars.gone(ranks)

    def _draw(self) -> None:
        """Draw the bar of the lowest rank: in its place on a terminal, else as a line every BAR_S."""
        bar, now_s = self._bars.lowest(), time.monotonic()
        if bar is None:
            self._erase()
            return
        in_place = self._is_terminal[bar.stream]
        if now_s - self._drawn_s < (DRAWING_S if in_place else BAR_S) and (self._erases or not in_place):
            return
        self._drawn_s = now_s
        line = self._lines(MergedLines(1 << bar.rank, bar.stream, [bar.text]))
        self._sinks[bar.stream].write(ERASE + line[:-1] if in_place else line)
        self._erases = bar.stream if in_place else 0

    def abandon(self) -> None:
        """Show no bar any more."""
        self._erase()

    def settle(self, then: Callable[[], object]) -> None:
        """Call `then`, when nothing stands in the way of what others print."""
        self._erase()
        then()

    def _erase(self) -> None:
        """Remove the bar that is drawn on a terminal."""
        if self._erases:
            self._sinks[self._erases].write(ERASE)
            self._erases = 0

    def _lines(self, lines: MergedLines) -> bytes:
        """Return lines, each after its ranks."""
        return prefixed(str(lines).encode(errors="surrogateescape"), self._prefix(lines.ranks))

    def _prefix(self, ranks: int) -> bytes:
        if (found := self._prefixes.get(ranks)) is not None:
            return found
        now = datetime.now().astimezone() if self._tells_time else None
        found = self._form.format(rank=named(ranks), time=now).encode(errors="replace")
        if not self._tells_time:
            if len(self._prefixes) > MANY:
                self._prefixes.clear()
            self._prefixes[ranks] = found
        return found
