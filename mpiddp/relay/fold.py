"""Lines of many ranks as few: what several say at about the same time is one line. No I/O, no clock.

A source is whoever hands lines over: a rank, or the node of several.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Hashable, Sequence
from operator import attrgetter

from .said import Said, Shape, alike, begin_of, common, shape_of
from .waiting import GAP, Source, Waiting

CANDIDATES = 16  # lines with other numbers that are compared, to find the one that fits best
LONGEST = 5  # windows, for a line that ranks join one after the other
AHEAD = 10_000  # lines that a source may be ahead of the oldest one that waits
MANY = 1_000  # lines that wait: then no rank is waited for that has been silent for a whole window
MOST = 16 * 2**20  # characters of lines that wait

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
        self._number = self._done = self._size = 0  # lines that have come, and that have gone; characters that wait
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
        """Take the next line of a source, or several that all of its ranks have said."""
        if not self._waits and not self._expected & ~said.ranks:
            self._through.append(said)
            return
        one = self._source(source, said.ranks, now_s)
        one.settle()
        if len(self._usual) > MANY:
            self._usual.clear()
        rest: Said | None = said
        while rest is not None:
            if found := self._next(one, rest):
                one.anchor, rest = found
                one.anchor.ranks |= said.ranks
                one.anchor.joined_s, one.anchor.shared = now_s, True
            elif self._leads(one):
                self._append(one, rest, now_s)
                return
            else:
                line, rest = rest.parted(1)
                self._join(one, line, now_s)

    def _next(self, one: Source, said: Said) -> tuple[Waiting, Said | None] | None:
        """Return what follows a source's anchor, as far as a text begins like that, and the rest of the text.

        None if it does not, in its first line. So lines are compared where all ranks say the same.
        """
        found = one.anchor.after if one.anchor.is_linked else self._ends.after
        if one.own or found is self._ends or found.stream != said.stream:
            return None
        if not found.spread and not said.spread:
            if said.text.startswith(found.text) and said.text[len(found.text):len(found.text) + 1] in ("\n", ""):
                return found, said.after(len(found.text))
            if (size := common(found.text, said.text)) >= 0:
                return found.cut(size), said.after(size)
        ours = found.shape.numbers
        lines, theirs = alike(found.shape, said.text, self._usual)
        if not lines:
            return None
        begin, rest = said.parted(lines)
        size = len(begin_of(found.text, lines))
        if size < len(found.text):
            found = found.cut(size)
            ours = found.shape.numbers
        found.widen(begin.spread, ours, theirs[:len(ours)])
        return found, rest

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
        while self._waits:
            found.append(self._pop())
        return found

    def is_ahead(self, source: Hashable) -> bool:
        """Tell whether a source is too far ahead of others to be listened to."""
        if not self._waits or source not in self._sources:
            return False
        return self._sources[source].last.number - self._done > AHEAD

    @property
    def _waits(self) -> int:
        """The number of lines that wait."""
        return self._number - self._done

    def _source(self, source: Hashable, ranks: int, now_s: float) -> Source:
        if source not in self._sources:
            self._sources[source] = Source(self._ends)
            self._began_s = min(self._began_s, now_s)
        found = self._sources[source]
        found.spoke_s, found.ranks = now_s, found.ranks | ranks
        return found

    def _join(self, one: Source, said: Said, now_s: float) -> None:
        """Let a source say the line that fits, after its own ones, or a new one."""
        if self._leads(one):
            self._append(one, said, now_s)
            return
        self._index()
        found = None if said.spread else self._same(one, said)
        if found is None:
            shape = shape_of(said.text)
            found = self._alike(one, said, shape)
            if found is None:
                self._append(one, said, now_s)
                return
            found.widen(said.spread, found.shape.numbers, shape.numbers)
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

    def _alike(self, one: Source, said: Said, shape: Shape) -> Waiting | None:
        """Return the line that a source may join which has most of the same whole numbers, and of these the first.

        So step 7 of a rank that says less than others is not taken for their step 5.
        """
        lines = self._by_shape[said.stream].get(shape.text, ()) if shape.is_plain else ()
        at = bisect_right(lines, one.anchor.place, key=place)
        whole = [number if number.isdecimal() else None for number in shape.numbers]
        usual = self._usual.get(shape.text)
        found, most, enough = None, -1, usual or len(whole) - whole.count(None)
        for line in lines[at:at + CANDIDATES]:
            if not line.ranks & said.ranks and (equal := line.has(whole)) > most and one.may_join(line, said.ranks):
                found, most = line, equal
                if most >= enough:
                    break
        if usual is not None and most < usual:
            self._usual[shape.text] = usual - 1
            return None
        if found is not None:
            self._usual[shape.text] = most
        return found

    def _leads(self, source: Source) -> bool:
        """Tell whether nobody else has said what comes after a source's anchor."""
        return source is self._leader or not self._waits or (not source.own and self._ends.before is source.anchor)

    def _append(self, source: Source, said: Said, now_s: float) -> None:
        """Let a source say a new line."""
        self._leader = source if self._leads(source) else None
        one = Waiting(said, source, now_s)
        one.link(self._ends.before)
        lines = one.text.count("\n") + 1
        self._number += lines
        one.number, one.place = self._number, one.before.place + lines * GAP
        self._size += len(one.text) + 1
        source.own.append(one)
        if len(self._to_index) > 2 * self._waits + MANY:
            self._to_index = [line for line in self._to_index if line.is_linked]
        self._to_index.append(one)

    def _index(self) -> None:
        """Let the lines at the end be found by their text and shape."""
        if not self._to_index:
            return
        one = next((one for one in self._to_index if one.is_linked), self._ends)
        while one.before is not self._ends and not one.before.is_found:
            one = one.before
        self._to_index = []
        while one is not self._ends:
            for line in one.lines():
                self._note(line)
            one = one.after

    def _note(self, one: Waiting) -> None:
        one.is_found = True
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
            one.place = one.before.place + (one.text.count("\n") + 1) * GAP

    def _keys(self, one: Waiting) -> list[tuple[dict[str, list[Waiting]], str]]:
        """Return where a line is found, and under which key."""
        found = [(self._by_text[one.stream], one.text)]
        return [*found, (self._by_shape[one.stream], one.shape.text)] if one.shape.is_plain else found

    def _pop(self) -> Said:
        one = self._ends.after
        one.unlink()
        self._ends.place = one.place  # others come after it
        self._done += one.text.count("\n") + 1
        self._size -= len(one.text) + 1
        if one.is_found:
            for lines, key in self._keys(one):
                lines[key].pop(0)
                if not lines[key]:
                    del lines[key]
        return Said(one.ranks, one.stream, one.text, tuple(one.spread))

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
