"""Shows folded lines and progress bars on rank 0's stdout and stderr."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from ..base.text import field_names
from .line_merger import MergedLines, format_rank_bits
from .streams import BAR_INTERVAL_S, add_prefix, split_for_pipe
from .writer import Terminal

ERASE = b"\r\033[K"
TERMINAL_BAR_INTERVAL_S = 0.1  # between two states of a bar on a terminal
MAX_PREFIXES = 1000  # in the cache


class ProgressBar(NamedTuple):
    """The state of a rank's bar on a stream, 1 or 2; an empty text removes the bar."""

    rank: int
    stream: int
    text: str


class ProgressBars:
    """The bars that ranks are drawing."""

    def __init__(self) -> None:
        self._bars: dict[tuple[int, int], ProgressBar] = {}
        self._sent: dict[tuple[int, int], ProgressBar] = {}

    def update(self, bars: Iterable[ProgressBar]) -> None:
        """Take new states."""
        for bar in bars:
            if bar.text.strip():
                self._bars[bar.rank, bar.stream] = bar
            else:
                self._bars.pop((bar.rank, bar.stream), None)

    def remove_ranks(self, ranks: int) -> None:
        """Remove the bars of ranks, the bits of a number."""
        self._bars = {key: bar for key, bar in self._bars.items() if not ranks >> bar.rank & 1}

    def lowest(self) -> ProgressBar | None:
        """Return the bar of the lowest rank, the only one that is shown."""
        return self._bars[min(self._bars)] if self._bars else None

    def take_changes(self) -> list[ProgressBar]:
        """Return the changes of the lowest bar since the last call: removed bars, and its new state."""
        lowest = self.lowest()
        shown = {(lowest.rank, lowest.stream): lowest} if lowest else {}
        changes = [bar._replace(text="") for key, bar in self._sent.items() if key not in shown]
        changes += [bar for key, bar in shown.items() if self._sent.get(key) != bar]
        self._sent = shown
        return changes


class TerminalRenderer:
    """Shows folded lines, prefixed with their ranks, and below them the progress bar of the lowest rank with one."""

    is_remote = False

    def __init__(self, form: str, terminal: Terminal) -> None:
        """Write to `terminal`; `form` is a prefix with fields `rank` and `time`."""
        self._form, self._has_time = form, "time" in field_names(form)
        self._prefixes: dict[int, bytes] = {}  # of ranks
        self._terminal = terminal
        self._is_terminal = {stream: os.isatty(stream) for stream in (1, 2)}
        self._bars = ProgressBars()
        self._drawn_stream = 0  # the terminal stream that currently shows a bar; 0 for none
        self._drawn_s = -BAR_INTERVAL_S

    def has_room(self) -> bool:
        """Return whether more may be shown now."""
        return self._terminal.has_room

    def show(self, lines: Sequence[MergedLines]) -> None:
        """Show lines."""
        self._erase()
        for stream, group in itertools.groupby(lines, key=lambda block: block.stream):
            self._terminal.write(stream, split_for_pipe(b"".join(map(self._format, group))))
        self._draw()

    def draw(self, bars: Iterable[ProgressBar]) -> None:
        """Take new states of progress bars."""
        self._bars.update(bars)
        self._draw()

    def remove_ranks(self, ranks: int) -> None:
        """Remove the bars of ranks that have ended."""
        self._bars.remove_ranks(ranks)

    def _draw(self) -> None:
        """Draw the bar of the lowest rank: in place on a terminal, else as a line every BAR_INTERVAL_S."""
        bar, now_s = self._bars.lowest(), time.monotonic()
        if bar is None:
            self._erase()
            return
        in_place = self._is_terminal[bar.stream]
        interval_s = TERMINAL_BAR_INTERVAL_S if in_place else BAR_INTERVAL_S
        if now_s - self._drawn_s < interval_s and (self._drawn_stream or not in_place):
            return
        self._drawn_s = now_s
        line = self._format(MergedLines(1 << bar.rank, bar.stream, [bar.text]))
        self._terminal.write(bar.stream, [ERASE + line[:-1] if in_place else line])
        self._drawn_stream = bar.stream if in_place else 0

    def abandon(self) -> None:
        """Erase the bar."""
        self._erase()

    def flush(self, then: Callable[[], object]) -> None:
        """Erase the bar, so that others may print; call `then` when all is shown."""
        self._erase()
        self._terminal.flush(then)

    close = flush

    def _erase(self) -> None:
        if self._drawn_stream:
            self._terminal.write(self._drawn_stream, [ERASE])
            self._drawn_stream = 0

    def _format(self, lines: MergedLines) -> bytes:
        """Return lines, each prefixed with its ranks."""
        return add_prefix(str(lines).encode(errors="surrogateescape"), self._prefix(lines.ranks))

    def _prefix(self, ranks: int) -> bytes:
        if (prefix := self._prefixes.get(ranks)) is not None:
            return prefix
        now = datetime.now().astimezone() if self._has_time else None
        prefix = self._form.format(rank=format_rank_bits(ranks), time=now).encode(errors="replace")
        if not self._has_time:
            if len(self._prefixes) > MAX_PREFIXES:
                self._prefixes.clear()
            self._prefixes[ranks] = prefix
        return prefix
