"""Lines of many ranks as few: what several say at about the same time is one line. No I/O, no clock.

A source is whoever hands lines over: a rank, or the node of several.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter, eq

from .said import NUMBER, Said, Spread

CANDIDATES = 16  # lines with other numbers that are compared, to find the one that fits best
LONGEST = 5  # windows, for a line that ranks join one after the other
AHEAD = 10_000  # lines that a source may be ahead of the oldest one that waits
MANY = 1_000  # lines that wait: then no rank is waited for that has been silent for a whole window
MOST = 16 * 2**20  # characters of lines that wait
OWN = 64  # the last lines that a source alone has said, which may still change places with those of others
GAP = 2**20  # between the places of two lines

place = attrgetter("place")


class Waiting:
    """A line that waits for more ranks to say it: its `shape` is what stands between its `numbers`.

    Lines are linked, each to the one `before` and `after`, in the order of their `place`. The line came as the
    `number`th, from `source`; it is `shared` once another source has said it, too.
    """

    __slots__ = ("after", "before", "began_s", "joined_s", "number", "numbers", "place", "ranks", "said", "shape",
                 "shared", "source", "spread")

    def __init__(self, said: Said, shape: str, numbers: list[str], source: Hashable, now_s: float) -> None:
        self.said, self.shape, self.numbers, self.source = said, shape, numbers, source
        self.ranks, self.spread = said.ranks, list(said.spread)
        self.began_s = self.joined_s = now_s
        self.place = self.number = 0
        self.shared = False
        self.before = self.after = self

    def link(self, before: Waiting) -> None:
        """Stand after `before`."""
        self.before, self.after = before, before.after
        before.after = self.after.before = self

    def unlink(self) -> None:
        """Stand nowhere."""
        self.before.after, self.after.before = self.after, self.before

    def has(self, whole: Sequence[str | None]) -> int:
        """Return how many of these numbers this line has in the same place; None is for one that does not count."""
        return sum(map(eq, self.numbers, whole))

    def widen(self, said: Said, numbers: Sequence[str]) -> None:
        """Let more ranks have said it with numbers of their own."""
        self.spread = self.spread or [Spread(one, one, (one,)) for one in self.numbers]
        theirs = said.spread or [Spread(one, one, (one,)) for one in numbers]
        for at, other in enumerate(theirs):
            if other.some != self.spread[at].some or not other.some:
                self.spread[at] = self.spread[at].joined(other)


class Source:
    """What a source has said last: lines of its `own`, that it alone has said, after the `anchor`, which stays before.

    `ranks` are those for which it has spoken.
    """

    __slots__ = ("anchor", "own", "ranks", "spoke_s")

    def __init__(self, anchor: Waiting) -> None:
        self.anchor, self.own = anchor, list[Waiting]()
        self.ranks, self.spoke_s = 0, 0.0

    @property
    def last(self) -> Waiting:
        """The line that it has said last."""
        return self.own[-1] if self.own else self.anchor

    def settle(self) -> None:
        """Let the anchor be the last line that others have said, too."""
        if not self.own:
            return
        at = next((at for at in range(len(self.own), 0, -1) if self.own[at - 1].shared), max(0, len(self.own) - OWN))
        if at:
            self.anchor = self.own[at - 1]
            del self.own[:at]

    def may_join(self, one: Waiting, ranks: int) -> bool:
        """Tell whether its next line, of `ranks`, may be one that waits: none of these has said that, or more since."""
        if one.ranks & ranks:
            return False
        return one not in self.own or not any(other.ranks & ranks for other in self.own[self.own.index(one):])


class Fold:
    """Holds lines back until all of the ranks that are expected have said them, or none does any more.

    That is so when no rank has joined a line for `window_s`. Each source's lines stay in their order.
    """

    def __init__(self, expected: int, window_s: float) -> None:
        self._expected, self._window_s = expected, window_s
        self._ends = Waiting(Said(0, 0, ""), "", [], None, 0.0)  # before the first line, and after the last one
        self._waits = self._number = self._size = 0
        self._began_s = math.inf
        self._by_text: dict[int, dict[str, list[Waiting]]] = {1: {}, 2: {}}  # of each stream
        self._by_shape: dict[int, dict[str, list[Waiting]]] = {1: {}, 2: {}}
        self._usual: dict[str, int] = {}  # whole numbers that lines of a shape had in common
        self._sources: dict[Hashable, Source] = {}
        self._awaited: Source | None = None  # for which the first line waits, or has waited

    def take(self, source: Hashable, said: Said, now_s: float) -> None:
        """Take the next line of a source."""
        one = self._source(source, said.ranks, now_s)
        one.settle()
        self._join(one, source, said, now_s)

    def take_lines(self, source: Hashable, ranks: int, stream: int, lines: Iterable[str], now_s: float) -> None:
        """Take the next lines of a source, all of the same ranks: as take(), and quicker."""
        one, known = self._source(source, ranks, now_s), self._by_text[stream]
        one.settle()
        for text in lines:
            same = known.get(text)
            if same is not None and not one.own and same[0].place > one.anchor.place:
                one.anchor = found = same[0]
                found.ranks |= ranks
                found.joined_s = now_s
                found.shared = True
            else:
                self._join(one, source, Said(ranks, stream, text), now_s)

    def gone(self, ranks: int) -> None:
        """Expect nothing of these ranks any more."""
        self._expected &= ~ranks

    def ready(self, now_s: float, is_due: bool = False) -> list[Said]:
        """Return the lines for which nobody is waited any more, in their order.

        With `is_due` all sources have been heard, and so they are not waited for any longer than a window.
        """
        found = []
        while self._waits and self._is_ready(self._ends.after, now_s, is_due):
            found.append(self._pop())
        return found

    def due_s(self) -> float | None:
        """Return when to look for lines that are ready, if nothing comes before; None if no line waits."""
        return self._end_of(self._ends.after) if self._waits else None

    def rest(self) -> list[Said]:
        """Return all lines that wait."""
        return [self._pop() for _ in range(self._waits)]

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

    def _join(self, one: Source, source: Hashable, said: Said, now_s: float) -> None:
        """Let a source say the line that fits, after its own ones, or a new one."""
        numbers: list[str] = []
        found = None if said.spread else self._same(one, said)
        if found is None:
            parts = NUMBER.split(said.text)
            shape, numbers = "\n".join(parts[::2]), parts[1::2]
            found = self._alike(one, said, shape, numbers)
            if found is None:
                one.own.append(self._append(said, shape, numbers, source, now_s))
                return
            found.widen(said, numbers)
        found.ranks |= said.ranks
        found.joined_s = now_s
        if found.source != source:
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
            if (equal := line.has(whole)) > most and one.may_join(line, said.ranks):
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

    def _append(self, said: Said, shape: str, numbers: list[str], source: Hashable, now_s: float) -> Waiting:
        one = Waiting(said, shape, numbers, source, now_s)
        one.link(self._ends.before)
        one.place = one.before.place + GAP
        self._number += 1
        one.number = self._number
        self._waits += 1
        self._size += len(said.text)
        for lines, key in self._keys(one):
            lines.setdefault(key, []).append(one)
        return one

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
        one, said = self._ends.after, self._ends.after.said
        one.unlink()
        self._ends.place = one.place  # others come after it
        self._waits -= 1
        self._size -= len(said.text)
        for lines, key in self._keys(one):
            lines[key].pop(0)
            if not lines[key]:
                del lines[key]
        return Said(one.ranks, said.stream, said.text, tuple(one.spread))

    def _is_ready(self, one: Waiting, now_s: float, is_due: bool) -> bool:
        missing = self._expected & ~one.ranks
        if not missing or self._size > MOST or (is_due and now_s >= self._end_of(one)):
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
