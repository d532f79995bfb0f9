"""Progress bars of many ranks: the one of the lowest rank that draws one is shown. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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
