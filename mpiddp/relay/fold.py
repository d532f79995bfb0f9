"""Lines of many ranks as few: what several say at about the same time is one line. No I/O, no clock.

A source is whoever hands lines over: a rank, or the node of several.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

from .said import Said, split
from .waiting import Source, Waiting

CANDIDATES = 16  # lines with other numbers that are compared, to find the one that fits best
LONGEST = 5  # windows, for a line that ranks join one after the other
AHEAD = 10_000  # lines that a source may be ahead of the oldest one that waits
MANY = 1_000  # lines that wait: then no rank is waited for that has been silent for a whole window
MOST = 16 * 2**20  # characters of lines that wait
GAP = 2**20  # between the places of two lines

place = attrgetter("place")


class Fold:
    """Holds lines back until all of the ranks that are expected have said them, or none does any more.

    That is so when no rank has joined a line for `window_s`, or if it `hurries`, when very many lines wait. Each
    source's lines stay in their order.
    """

    def __init__(self, expected: int, window_s: float, hurries: bool = False) -> None:
        self._expected, self._window_s = expected, window_s
        self._most_lines = AHEAD // 2 if hurries else math.inf
        self._ends = Waiting(Said(0, 0, ""), None, 0.0)  # before the first line, and after the last one
        self._ends.place = self._ends.number = 0
        self._waits = self._number = self._size = 0
        self._began_s = math.inf
        self._by_text: dict[int, dict[str, list[Waiting]]] = {1: {}, 2: {}}  # of each stream
        self._by_shape: dict[int, dict[str, list[Waiting]]] = {1: {}, 2: {}}
        self._to_index: list[Waiting] = []  # lines at the end, which these do not have yet
        self._leader: Source | None = None  # that alone has said all that comes after its anchor
        self._through: list[Said] = []  # lines for which nobody has to wait
        self._usual: dict[str, int] = {}  # whole numbers that lines of a shape had in common
        self._sources: dict[Hashable, Source] = {}
        self._awaited: Source | None = None  # for which the first line waits, or has waited

    def take(self, source: Hashable, said: Said, now_s: float) -> None:
        """Take the next line of a source."""
        one = self._source(source, said.ranks, now_s)
        one.settle()
        self._join(one, said, now_s)

    def take_lines(self, source: Hashable, ranks: int, stream: int, lines: Iterable[str], now_s: float) -> None:
        """Take the next lines of a source, all of the same ranks: as take(), and quicker."""
        if not self._waits and not self._expected & ~ranks:
            self._through += [Said(ranks, stream, text) for text in lines]
            return
        one = self._source(source, ranks, now_s)
        one.settle()
        found = one.anchor if one.anchor.is_linked else self._ends
        for text in lines:
            if not one.own and (after := found.after).text == text and after.said.stream == stream:
                found = one.anchor = after  # as where all say the same
                found.ranks |= ranks
                found.joined_s = now_s
                found.shared = True
            else:
                self._join(one, Said(ranks, stream, text), now_s)
                found = one.anchor if one.anchor.is_linked else self._ends

    def gone(self, ranks: int) -> None:
        """Expect nothing of these ranks any more."""
        self._expected &= ~ranks

    def ready(self, now_s: float, is_due: bool = False) -> list[Said]:
        """Return the lines for which nobody is waited any more, in their order.

        With `is_due` all sources have been heard, and so they are not waited for any longer than a window.
        """
        found, self._through = self._through, []
        while self._waits and self._is_ready(self._ends.after, now_s, is_due):
            found.append(self._pop())
        return found

    def due_s(self) -> float | None:
        """Return when to look for lines that are ready, if nothing comes before; None if no line waits."""
        return self._end_of(self._ends.after) if self._waits else None

    def rest(self) -> list[Said]:
        """Return all lines that wait."""
        found, self._through = self._through, []
        return [*found, *(self._pop() for _ in range(self._waits))]

    def is_ahead(self, source: Hashable) -> bool:
        """Tell whether a source is too far ahead of others to be listened to."""
        if not self._waits or source not in self._sources:
            return False
        return self._sources[source].last.number - self._ends.after.number >= AHEAD

    def _source(self, source: Hashable, ranks: int, now_s: float) -> Source:
        if source not in self._sources:
            self._sources[source] = Source(self._ends)
            self._began_s = min(self._began_s, now_s)
        found = self._sources[source]
        found.spoke_s, found.ranks = now_s, found.ranks | ranks
        return found

    def _join(self, one: Source, said: Said, now_s: float) -> None:
        """Let a source say the line that fits, after its own ones, or a new one."""
        if one is self._leader or not self._waits:
            self._append(one, said, now_s)
            return
        self._index()
        found = None if said.spread else self._same(one, said)
        if found is None:
            shape, numbers = split(said.text)
            found = self._alike(one, said, shape, numbers)
            if found is None:
                self._append(one, said, now_s)
                return
            found.widen(said, numbers)
        found.ranks |= said.ranks
        found.joined_s = now_s
        if found.source is not one:
            found.shared = True
            self._move(one.own, found)
            one.anchor, one.own = found, []

    def _same(self, one: Source, said: Said) -> Waiting | None:
        """Return the first line with the same text that a source may join."""
        lines = self._by_text[said.stream].get(said.text, ())
        for found in lines[bisect_right(lines, one.anchor.place, key=place):]:
            if one.may_join(found, said.ranks):
                return found
        return None

    def _alike(self, one: Source, said: Said, shape: str, numbers: Sequence[str]) -> Waiting | None:
        """Return the line that a source may join which has most of the same whole numbers, and of these the first.

        So step 7 of a rank that says less than others is not taken for their step 5.
        """
        lines = self._by_shape[said.stream].get(shape, ())
        at = bisect_right(lines, one.anchor.place, key=place)
        whole = [number if number.isdecimal() else None for number in numbers]
        usual = self._usual.get(shape)
        found, most, enough = None, -1, len(whole) - whole.count(None) if usual is None else usual
        for line in lines[at:at + CANDIDATES]:
            if not line.ranks & said.ranks and (equal := line.has(whole)) > most and one.may_join(line, said.ranks):
                found, most = line, equal
                if most >= enough:
                    break
        if usual is not None and most < usual:
            self._usual[shape] = usual - 1
            return None
        if found is not None:
            self._usual[shape] = most
            if len(self._usual) > MANY:
                self._usual.clear()
        return found

    def _append(self, source: Source, said: Said, now_s: float) -> None:
        """Let a source say a new line."""
        if source is not self._leader:
            follows = self._ends.before is source.anchor and not source.own
            self._leader = source if follows or not self._waits else None
        one = Waiting(said, source, now_s)
        one.link(self._ends.before)
        one.place = one.before.place + GAP
        self._number += 1
        one.number = self._number
        self._waits += 1
        self._size += len(one.text)
        source.own.append(one)
        if len(self._to_index) > 2 * self._waits + MANY:
            self._to_index = [line for line in self._to_index if line.is_linked]
        self._to_index.append(one)

    def _index(self) -> None:
        """Let the lines at the end be found by their text and shape."""
        lines, self._to_index = self._to_index, []
        for one in lines:
            if one.is_linked:
                one.shape, one.numbers = split(one.text)
                for found, key in self._keys(one):
                    found.setdefault(key, []).append(one)

    def _move(self, own: Sequence[Waiting], line: Waiting) -> None:
        """Let lines that a source alone has said stand before another one, if they stand after it."""
        for one in own:
            if one.place < line.place:
                continue
            keys = self._keys(one)
            for lines, key in keys:
                lines[key].remove(one)
            one.unlink()
            one.link(line.before)
            if line.place - one.before.place < 2:
                self._renumber()
            one.place = (one.before.place + line.place) // 2
            for lines, key in keys:
                insort(lines[key], one, key=place)

    def _renumber(self) -> None:
        """Make room between the places of lines."""
        one = self._ends
        while (one := one.after) is not self._ends:
            one.place = one.before.place + GAP

    def _keys(self, one: Waiting) -> list[tuple[dict[str, list[Waiting]], str]]:
        """Return where a line is found, and under which key."""
        found = [(self._by_shape[one.said.stream], one.shape)]
        return found if one.said.spread else [*found, (self._by_text[one.said.stream], one.said.text)]

    def _pop(self) -> Said:
        one = self._ends.after
        one.unlink()
        self._ends.place = one.place  # others come after it
        self._waits -= 1
        self._size -= len(one.text)
        if hasattr(one, "shape"):
            for lines, key in self._keys(one):
                lines[key].pop(0)
                if not lines[key]:
                    del lines[key]
        return Said(one.ranks, one.said.stream, one.text, tuple(one.spread))

    def _is_ready(self, one: Waiting, now_s: float, is_due: bool) -> bool:
        missing = self._expected & ~one.ranks
        if not missing or (is_due and now_s >= self._end_of(one)):
            return True
        if self._size > MOST or self._waits > self._most_lines:
            return True
        if self._waits > MANY and not missing & self._talking(now_s):
            return True
        return self._have_passed(one, missing)

    def _have_passed(self, one: Waiting, missing: int) -> bool:
        """Tell whether the ranks that a line lacks have all said what comes after it."""
        awaited = self._awaited
        if awaited is not None and awaited.ranks & missing and awaited.anchor.place <= one.place:
            return False
        for source in self._sources.values():
            if source.ranks & missing:
                if source.anchor.place <= one.place:
                    self._awaited = source
                    return False
                missing &= ~source.ranks
        return not missing

    def _end_of(self, one: Waiting) -> float:
        return min(one.joined_s + self._window_s, one.began_s + LONGEST * self._window_s)

    def _talking(self, now_s: float) -> int:
        """Return the ranks of sources that have spoken within the last window; all, while the first one is not over."""
        found = -1 if now_s - self._began_s < self._window_s else 0
        for one in self._sources.values():
            if now_s - one.spoke_s < self._window_s:
                found |= one.ranks
        return found
