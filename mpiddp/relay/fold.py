"""Lines of many ranks as few: what several say at about the same time is one line. No I/O, no clock.

Ranks are the bits of a number, so that thousands take little room. A source is whoever hands lines over: a rank, or the
node of several.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

NUMBER = re.compile(r"((?:(?<![\w.])[-+])?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
SOME = 3  # values of a number that are listed; of more, the smallest and the largest are shown
CANDIDATES = 16  # lines with other numbers that are compared, to find the one that fits best
LONGEST = 5  # windows, for a line that ranks join one after the other
AHEAD = 10_000  # lines that a source may be ahead of the oldest one that waits
MANY = 1_000  # lines that wait: then no rank is waited for that has been silent for a whole window
MOST = 16 * 2**20  # characters of lines that wait
MASKS = 32  # sets of ranks of a source whose places are told apart

seq = attrgetter("seq")


class Spread(NamedTuple):
    """What a number is on several ranks: at least `low`, at most `high`; `some` lists up to SOME different ones."""

    low: str
    high: str
    some: tuple[str, ...]

    def __str__(self) -> str:
        """Return it in words: 7, {7,8}, or 7…90."""
        if not self.some:
            return f"{self.low}…{self.high}"
        return self.low if len(self.some) == 1 else "{" + ",".join(self.some) + "}"

    def joined(self, other: Spread) -> Spread:
        """Return what the number is on the ranks of both."""
        some = sorted({*self.some, *other.some}, key=value) if self.some and other.some else ()
        low, high = min(self.low, other.low, key=value), max(self.high, other.high, key=value)
        return Spread(low, high, tuple(some) if len(some) <= SOME else ())


class Said(NamedTuple):
    """A line that `ranks` have said on a stream, 1 or 2: `text`, with `spread` in the place of its numbers, if any."""

    ranks: int
    stream: int
    text: str
    spread: tuple[Spread, ...] = ()

    def __str__(self) -> str:
        """Return the line."""
        if not self.spread:
            return self.text
        numbers = iter(self.spread)
        return NUMBER.sub(lambda _: str(next(numbers)), self.text)


class Waiting:
    """A line that waits for more ranks to say it: its `shape` is what stands between its `numbers`."""

    __slots__ = ("began_s", "joined_s", "numbers", "ranks", "said", "seq", "shape", "spread")

    def __init__(self, number: int, said: Said, shape: str, numbers: list[str], now_s: float) -> None:
        self.seq, self.said, self.shape, self.numbers = number, said, shape, numbers
        self.ranks, self.spread = said.ranks, list(said.spread)
        self.began_s = self.joined_s = now_s

    def has(self, numbers: Sequence[str]) -> int:
        """Return how many of these are whole numbers that this line has in the same place."""
        return sum(ours == theirs and theirs.isdecimal() for ours, theirs in zip(self.numbers, numbers, strict=True))

    def widen(self, said: Said, numbers: Sequence[str]) -> None:
        """Let more ranks have said it with numbers of their own."""
        self.spread = self.spread or [Spread(one, one, (one,)) for one in self.numbers]
        theirs = said.spread or [Spread(one, one, (one,)) for one in numbers]
        for at, other in enumerate(theirs):
            if other.some != self.spread[at].some or not other.some:
                self.spread[at] = self.spread[at].joined(other)


class Fold:
    """Holds lines back until all of the ranks that are expected have said them, or none does any more.

    That is so when no rank has joined a line for `window_s`. Each source's lines stay in their order.
    """

    def __init__(self, expected: int, window_s: float) -> None:
        self._expected, self._window_s = expected, window_s
        self._waiting: deque[Waiting] = deque()
        self._number = self._size = 0
        self._by_text: dict[int, dict[str, list[Waiting]]] = {1: {}, 2: {}}  # of each stream
        self._by_shape: dict[int, dict[str, list[Waiting]]] = {1: {}, 2: {}}
        self._places: dict[Hashable, dict[int, int]] = {}  # of each source's ranks, the number of their last line
        self._spoke: dict[Hashable, float] = {}

    def take(self, source: Hashable, said: Said, now_s: float) -> None:
        """Take the next line of a source."""
        self._spoke[source] = now_s
        places = self._places.setdefault(source, {})
        found = self._find(said, place_of(places, said.ranks), now_s)
        found.ranks |= said.ranks
        places[said.ranks] = found.seq
        if len(places) > MASKS:
            self._places[source] = {-1: max(places.values())}  # all ranks

    def take_lines(self, source: Hashable, ranks: int, stream: int, lines: Iterable[str], now_s: float) -> None:
        """Take the next lines of a source, all of the same ranks: as take(), and quicker."""
        self._spoke[source] = now_s
        places = self._places.setdefault(source, {})
        place, known = place_of(places, ranks), self._by_text[stream]
        for text in lines:
            same = known.get(text)
            if same is not None and same[0].seq > place:
                found = same[0]
                found.joined_s = now_s
            else:
                found = self._find(Said(ranks, stream, text), place, now_s)
            found.ranks |= ranks
            place = found.seq
        places[ranks] = place

    def gone(self, ranks: int) -> None:
        """Expect nothing of these ranks any more."""
        self._expected &= ~ranks

    def ready(self, now_s: float) -> list[Said]:
        """Return the lines for which nobody is waited any more, in their order."""
        found = []
        while self._waiting and self._is_ready(self._waiting[0], now_s):
            found.append(self._pop())
        return found

    def due_s(self) -> float | None:
        """Return when to look for lines that are ready, if nothing comes before; None if no line waits."""
        return self._end_of(self._waiting[0]) if self._waiting else None

    def rest(self) -> list[Said]:
        """Return all lines that wait."""
        return [self._pop() for _ in range(len(self._waiting))]

    def is_ahead(self, source: Hashable) -> bool:
        """Tell whether a source is too far ahead of others to be listened to."""
        last = max(self._places.get(source, {}).values(), default=0)
        return bool(self._waiting) and last - self._waiting[0].seq >= AHEAD

    def _find(self, said: Said, place: int, now_s: float) -> Waiting:
        """Return the line after a place that a source's next one joins."""
        if not said.spread and (same := self._by_text[said.stream].get(said.text)):
            at = bisect_right(same, place, key=seq)
            if at < len(same):
                same[at].joined_s = now_s
                return same[at]
        parts = NUMBER.split(said.text)
        shape, numbers = "\n".join(parts[::2]), parts[1::2]
        found = fitting(self._by_shape[said.stream].get(shape, ()), place, numbers)
        if found is None:
            return self._append(said, shape, numbers, now_s)
        found.joined_s = now_s
        found.widen(said, numbers)
        return found

    def _append(self, said: Said, shape: str, numbers: list[str], now_s: float) -> Waiting:
        self._number += 1
        self._size += len(said.text)
        one = Waiting(self._number, said, shape, numbers, now_s)
        self._waiting.append(one)
        self._by_shape[said.stream].setdefault(shape, []).append(one)
        if not said.spread:
            self._by_text[said.stream].setdefault(said.text, []).append(one)
        return one

    def _pop(self) -> Said:
        one = self._waiting.popleft()
        said = one.said
        self._size -= len(said.text)
        remove_first(self._by_shape[said.stream], one.shape)
        if not said.spread:
            remove_first(self._by_text[said.stream], said.text)
        return Said(one.ranks, said.stream, said.text, tuple(one.spread))

    def _is_ready(self, one: Waiting, now_s: float) -> bool:
        missing = self._expected & ~one.ranks
        if not missing or self._size > MOST or now_s >= self._end_of(one):
            return True
        return len(self._waiting) > MANY and not missing & self._talking(now_s)

    def _end_of(self, one: Waiting) -> float:
        return min(one.joined_s + self._window_s, one.began_s + LONGEST * self._window_s)

    def _talking(self, now_s: float) -> int:
        """Return the ranks of sources that have spoken within the last window."""
        found = 0
        for source, spoke_s in self._spoke.items():
            if now_s - spoke_s < self._window_s:
                for ranks in self._places[source]:
                    found |= ranks
        return found


def place_of(places: Mapping[int, int], ranks: int) -> int:
    """Return the number of the last line of any of these ranks, 0 if none has said one."""
    found = places.get(ranks, 0)
    if len(places) > (ranks in places):
        found = max([found, *(at for others, at in places.items() if others & ranks)])
    return found


def fitting(lines: Sequence[Waiting], place: int, numbers: Sequence[str]) -> Waiting | None:
    """Return the line after a place that has most of the same whole numbers, and of these the first.

    So step 7 of a rank that says less than others is not taken for their step 5.
    """
    at = bisect_right(lines, place, key=seq)
    found, most, possible = None, -1, sum(map(str.isdecimal, numbers))
    for one in lines[at:at + CANDIDATES]:
        if (equal := one.has(numbers)) > most:
            found, most = one, equal
        if most == possible:
            break
    return found


def remove_first(lines: dict[str, list[Waiting]], key: str) -> None:
    """Remove the oldest of the lines that are kept under a key."""
    found = lines[key]
    if len(found) == 1:
        del lines[key]
    else:
        del found[0]


def value(number: str) -> tuple[float, str]:
    """Return what numbers are ordered by."""
    return float(number), number


def bits(ranks: Iterable[int]) -> int:
    """Return ranks as the bits of a number."""
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


def named(ranks: int) -> str:
    """Return the ranks that a number's bits are, as in 0-3,8."""
    digits = f"{ranks:b}"[::-1]
    return ",".join(f"{one.start()}" if one.end() - one.start() == 1 else f"{one.start()}-{one.end() - 1}"
                    for one in re.finditer("1+", digits))
