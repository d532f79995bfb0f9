"""Merges the lines of many ranks: equal ones, and those that differ in numbers alone, become one. No I/O, no clock.

A source is a rank, or a node that has merged the lines of its ranks. Ranks are the bits of an integer, so that
thousands take little memory.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, compress, count, groupby
from operator import attrgetter, eq, ne

# A number, or a terminal's escape sequence, as for a colour. A sign belongs to a number that follows no letter, digit
# or point. An expression that begins with a set of characters is fast.
TOKEN = re.compile(r"([-+0-9\033](?:(?:(?<=[0-9])|(?<=[-+])(?<![\w.].)(?=[0-9]))[0-9]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
                   r"|(?<=\033)\[[0-9;:?]*[A-Za-z]))")
ESCAPE = "\033"  # begins an escape sequence
MASK = "\ud800"  # stands for a number; decoded output never contains it, not even as an escaped byte
LISTED = 3  # different values of a number that are listed; of more, the smallest and the largest are shown
COLUMNS = 16  # ranks whose numbers are kept, before only the smallest and the largest are

CANDIDATES = 16  # pending lines that are compared to find the one with the most equal integers
OWN = 64  # lines that a source alone has printed which may still move before a line that others have printed
LONGEST = 5  # windows, for a line that ranks join one after the other
AHEAD = 10_000  # lines that a source may be ahead of the oldest pending one
MANY = 1_000  # pending lines from which on a rank is not waited for that has been silent for a window
MOST = 16 * 2**20  # characters of pending lines

place = attrgetter("place")


class MergedLines:
    """Consecutive lines that `ranks` have printed on a stream, 1 or 2, as one of them printed them.

    Where numbers differ, `others` has those of other ranks: each a list of all numbers in the lines.
    """

    __slots__ = ("_masked", "lines", "others", "ranks", "stream")

    def __init__(self, ranks: int, stream: int, lines: list[str], others: Sequence[list[str]] = ()) -> None:
        self.ranks, self.stream, self.lines, self.others = ranks, stream, lines, others
        self._masked: tuple[list[str], list[str]] | None = None

    def __str__(self) -> str:
        """Return the text that people see."""
        text = "\n".join(self.lines)
        if not self.others:
            return text
        own = self.numbers
        numbers = own.copy()
        for at in {at for column in self.others for at in compress(count(), map(ne, own, column))}:
            numbers[at] = value_range({own[at], *(column[at] for column in self.others)})
        if ESCAPE in text:
            rest = iter(numbers)
            return TOKEN.sub(lambda token: token[0] if token[0].startswith(ESCAPE) else next(rest), text)
        parts = [""] * (2 * len(numbers) + 1)
        parts[::2], parts[1::2] = "\n".join(self.masks).split(MASK), numbers
        return "".join(parts)

    @property
    def masks(self) -> list[str]:
        """The lines without escape sequences, and with MASK in the place of each number."""
        return self.mask()[0]

    @property
    def numbers(self) -> list[str]:
        """The numbers of all lines."""
        return self.mask()[1]

    def mask(self) -> tuple[list[str], list[str]]:
        """Return the masks, and the numbers."""
        if self._masked is None:
            text = "\n".join(self.lines)
            parts = TOKEN.split(text)
            numbers = parts[1::2]
            if ESCAPE in text:
                parts[1::2] = ["" if token.startswith(ESCAPE) else MASK for token in numbers]
                numbers = [token for token in numbers if not token.startswith(ESCAPE)]
                self._masked = "".join(parts).split("\n"), numbers
            else:
                self._masked = MASK.join(parts[::2]).split("\n"), numbers
        return self._masked

    def cut(self, size: int) -> MergedLines:
        """Remove the first lines, and return them."""
        first = MergedLines(self.ranks, self.stream, self.lines[:size])
        if self.others or self._masked is not None:
            masks, numbers = self.mask()
            end = sum(mask.count(MASK) for mask in masks[:size])
            first._masked = masks[:size], numbers[:end]
            first.others = [column[:end] for column in self.others] if end else ()
            del masks[:size], numbers[:end]
            self.others = [column[end:] for column in self.others] if numbers else ()
        del self.lines[:size]
        return first

    def merge(self, other: MergedLines) -> None:
        """Add ranks that have printed the same lines, but for numbers."""
        self.ranks |= other.ranks
        if other.others or (self.lines != other.lines and self.numbers != other.numbers):
            self.others = [*self.others, other.numbers, *other.others]
            if len(self.others) > COLUMNS:
                self.others = extremes(self.others)


def extremes(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return columns in which each number has one value more than LISTED at most, its smallest and its largest too."""
    if len(columns) <= LISTED + 1:
        return list(map(list, columns))
    found = []
    for values in zip(*columns, strict=True):
        low_to_high = sorted({*values}, key=value)
        found.append([*low_to_high[:LISTED], low_to_high[-1]])
    longest = max(map(len, found))
    return [[one[min(at, len(one) - 1)] for one in found] for at in range(longest)]


def value_range(numbers: Iterable[str]) -> str:
    """Return different numbers as people see them: {7,8}, or 7…90."""
    low_to_high = sorted(numbers, key=value)
    return "{" + ",".join(low_to_high) + "}" if len(low_to_high) <= LISTED else f"{low_to_high[0]}…{low_to_high[-1]}"


def value(number: str) -> tuple[float, str]:
    """Return what numbers are sorted by."""
    return float(number), number


def named(ranks: int) -> str:
    """Return the ranks that are the bits of an integer, as in 0-3,8."""
    digits = f"{ranks:b}"[::-1]
    return ",".join(f"{one.start()}" if one.end() - one.start() == 1 else f"{one.start()}-{one.end() - 1}"
                    for one in re.finditer("1+", digits))


class Cursor:
    """How far a source is: at `anchor`, and after that, lines of its `own`, which no other source has printed.

    `ranks` are those whose lines it has handed over, the last ones at `heard_s`.
    """

    __slots__ = ("anchor", "heard_s", "own", "ranks")

    def __init__(self, anchor: PendingLines) -> None:
        self.anchor, self.own = anchor, list[PendingLines]()
        self.ranks, self.heard_s = 0, 0.0

    def advance(self, one: PendingLines) -> None:
        """Let lines of its own, up to this one, stay where they are."""
        size = self.own.index(one) + 1
        self.anchor = one
        for fixed in self.own[:size]:
            fixed.owner = None
        del self.own[:size]


class PendingLines(MergedLines):
    """Lines that wait for more ranks, in a linked list in the order of their `place`.

    As long as one source alone has printed them, and they may move, that is their `owner`. A place is that of the first
    line: the number of lines that came before it. Where lines are moved in between, their place has a component more.
    """

    __slots__ = ("after", "before", "began_s", "is_indexed", "joined_s", "owner", "place")

    place: tuple[int, ...]

    def __init__(self, lines: MergedLines, owner: Cursor | None, now_s: float) -> None:
        super().__init__(lines.ranks, lines.stream, lines.lines, lines.others)
        self._masked, self.owner = lines._masked, owner
        self.began_s = self.joined_s = now_s
        self.is_indexed = False
        self.before = self.after = self

    def link(self, before: PendingLines) -> None:
        """Stand after `before`."""
        self.before, self.after = before, before.after
        before.after = self.after.before = self

    def unlink(self) -> None:
        """Stand nowhere."""
        self.before.after, self.after.before = self.after, self.before
        self.before = self.after = self

    @property
    def is_linked(self) -> bool:
        """Tell whether they still wait."""
        return self.after is not self

    def split(self, size: int) -> PendingLines:
        """Return the first lines, which from now on stand before the others by themselves."""
        if size == len(self.lines):
            return self
        first = PendingLines(self.cut(size), self.owner, self.began_s)
        first.joined_s, first.place = self.joined_s, self.place
        self.place = (*self.place[:-1], self.place[-1] + size)
        first.link(self.before)
        if self.owner is not None:
            self.owner.own.insert(self.owner.own.index(self), first)
        return first


class LineMerger:
    """Keeps lines until all ranks that are expected have printed them, or no more of them will.

    That is so when no rank has joined them for `window_s`, or when very many lines wait, if it `hurries`. The lines of
    a source stay in their order.
    """

    def __init__(self, expected: int, window_s: float, hurries: bool = False) -> None:
        self._expected, self._window_s = expected, window_s
        self._most_lines = AHEAD // 2 if hurries else math.inf
        self._ends = PendingLines(MergedLines(0, 0, []), None, 0.0)  # before the first line, and after the last one
        self._ends.place, self._ends.is_indexed = (-1,), True
        self._number = self._done = self._size = 0  # lines that have come, and that have gone; characters that wait
        self._moved = 0  # lines that have been moved
        self._began_s = math.inf
        self._by_mask: dict[tuple[int, str], list[PendingLines]] = {}  # single lines, by their stream, too
        self._leader: Cursor | None = None  # which alone has printed all lines after its anchor
        self._through: list[MergedLines] = []  # lines that wait for nobody
        self._usual: dict[str, int] = {}  # how many integers were equal when lines of a mask were merged
        self._cursors: dict[Hashable, Cursor] = {}
        self._awaited: Cursor | None = None  # for which the first line waits, or has waited

    def take(self, source: Hashable, lines: MergedLines, now_s: float) -> None:
        """Take the next lines of a source; they belong to the merger from now on."""
        if not self._waits and not self._expected & ~lines.ranks:
            self._through.append(lines)
            return
        cursor = self._cursor(source, lines.ranks, now_s)
        if len(self._usual) > MANY:
            self._usual.clear()
        while lines.lines:
            following = cursor.anchor.after if cursor.anchor.is_linked else self._ends.after
            if size := 0 if cursor.own else self._alike(following, lines):
                self._join(cursor, following.split(size), lines.cut(size), now_s)
            elif self._leads(cursor):
                self._append(cursor, lines, now_s)
                return
            else:
                line = lines.cut(1)
                if found := self._find(cursor, line):
                    self._join(cursor, found, line, now_s)
                else:
                    self._append(cursor, line, now_s)

    def gone(self, ranks: int) -> None:
        """Expect nothing of these ranks any more."""
        self._expected &= ~ranks

    def ready(self, now_s: float, is_due: bool = False) -> list[MergedLines]:
        """Return the lines that wait for nobody any more, in their order.

        With `is_due` all sources have been heard, and so they are not waited for any longer than a window.
        """
        found, self._through = self._through, []
        while self._waits and self._is_ready(self._ends.after, now_s, is_due):
            found.append(self._pop())
        return found

    def due_s(self) -> float | None:
        """Return when to look for lines that are ready, if nothing comes before; None if no line waits."""
        return self._end_of(self._ends.after) if self._waits else None

    def rest(self) -> list[MergedLines]:
        """Return all lines that wait."""
        found, self._through = self._through, []
        while self._waits:
            found.append(self._pop())
        return found

    def is_ahead(self, source: Hashable) -> bool:
        """Tell whether a source is too far ahead of others to be listened to."""
        if not self._waits or source not in self._cursors:
            return False
        cursor = self._cursors[source]
        last = cursor.own[-1] if cursor.own else cursor.anchor
        return last.place[0] + len(last.lines) - self._done > AHEAD

    @property
    def _waits(self) -> int:
        """The number of lines that wait."""
        return self._number - self._done

    def _cursor(self, source: Hashable, ranks: int, now_s: float) -> Cursor:
        if source not in self._cursors:
            self._cursors[source] = Cursor(self._ends)
            self._began_s = min(self._began_s, now_s)
        found = self._cursors[source]
        found.heard_s, found.ranks = now_s, found.ranks | ranks
        return found

    def _alike(self, ours: PendingLines, theirs: MergedLines) -> int:
        """Return with how many lines both begin alike, but for numbers.

        Of integers as many have to be equal as usual, or all: step 7 is not step 5.
        """
        if ours is self._ends or ours.stream != theirs.stream:
            return 0
        size = min(len(ours.lines), len(theirs.lines))
        if ours.lines[:size] == theirs.lines[:size]:
            return size
        masks, numbers = ours.masks, ours.numbers
        size = next(compress(count(), map(ne, masks, theirs.masks)), size)
        differing = (at for at in compress(count(), map(ne, numbers, theirs.numbers)) if numbers[at].isdecimal())
        first = next(differing, None)
        if first is None:
            return size
        ends = list(accumulate(mask.count(MASK) for mask in masks[:size]))
        for at, group in groupby(chain([first], differing), key=partial(bisect_right, ends)):
            if at == size:
                break
            integers = sum(map(str.isdecimal, numbers[ends[at - 1] if at else 0:ends[at]]))
            if integers - len(list(group)) < self._usual.get(masks[at], integers):
                return at
        return size

    def _find(self, cursor: Cursor, line: MergedLines) -> PendingLines | None:
        """Return the line that a source may join which has the most equal integers, and of these the first.

        So step 7 of a rank that prints less than others does not become their step 5.
        """
        self._index()
        mask, lines = line.masks[0], self._by_mask.get((line.stream, line.masks[0]), [])
        at = bisect_right(lines, cursor.anchor.place, key=place)
        integers = [number if number.isdecimal() else None for number in line.numbers]
        usual = self._usual.get(mask)
        found, most, enough = None, -1, len(integers) - integers.count(None) if usual is None else usual
        for one in lines[at:at + CANDIDATES]:
            if (equal := sum(map(eq, one.numbers, integers))) > most and may_join(cursor, one, line.ranks):
                found, most = one, equal
                if most >= enough:
                    break
        if usual is not None and most < usual:
            self._usual[mask] = usual - 1
            return None
        if found is not None:
            self._usual[mask] = most
        return found

    def _index(self) -> None:
        """Let all lines be found by their mask, each by itself; those that cannot be yet are at the end."""
        one = self._ends.before
        while not one.is_indexed:
            one = one.before
        while (one := one.after) is not self._ends:
            one.mask()  # all lines at once
            for _ in range(len(one.lines)):
                line = one.split(1)
                line.is_indexed = True
                self._by_mask.setdefault((line.stream, line.masks[0]), []).append(line)

    def _leads(self, cursor: Cursor) -> bool:
        """Tell whether nobody else has printed what comes after a source's anchor."""
        return cursor is self._leader or not self._waits or (not cursor.own and self._ends.before is cursor.anchor)

    def _append(self, cursor: Cursor, lines: MergedLines, now_s: float) -> None:
        """Put lines of a source at the end."""
        self._leader = cursor if self._leads(cursor) else None
        one = PendingLines(lines, cursor, now_s)
        one.place = (self._number,)
        one.link(self._ends.before)
        self._number += len(one.lines)
        self._size += sum(map(len, one.lines)) + len(one.lines)
        cursor.own.append(one)
        if len(cursor.own) > OWN:
            cursor.advance(cursor.own[-OWN - 1])

    def _join(self, cursor: Cursor, one: PendingLines, lines: MergedLines, now_s: float) -> None:
        """Merge lines of a source with those that wait; what it alone has printed before moves before them."""
        one.merge(lines)
        one.joined_s = now_s
        if one.owner is cursor:
            return
        if one.owner is not None:
            one.owner.advance(one)
        for own in cursor.own:
            if own.place > one.place:
                same = self._by_mask[own.stream, own.masks[0]]
                same.remove(own)
                own.unlink()
                own.link(one.before)
                own.place = (*one.place[:-1], one.place[-1] - 1, self._moved)
                self._moved += 1
                insort(same, own, key=place)
            own.owner = None
        cursor.anchor, cursor.own = one, []

    def _pop(self) -> MergedLines:
        one = self._ends.after
        if one.owner is not None:
            one.owner.advance(one)
        one.unlink()
        self._ends.place = one.place  # others come after it
        self._done += len(one.lines)
        self._size -= sum(map(len, one.lines)) + len(one.lines)
        if one.is_indexed:
            key = one.stream, one.masks[0]
            self._by_mask[key].remove(one)
            if not self._by_mask[key]:
                del self._by_mask[key]
        return one.cut(len(one.lines))  # what is left of it, and of its links, takes little memory

    def _is_ready(self, one: PendingLines, now_s: float, is_due: bool) -> bool:
        missing = self._expected & ~one.ranks
        if not missing or (is_due and now_s >= self._end_of(one)):
            return True
        if self._size > MOST or self._waits > self._most_lines:
            return True
        if self._waits > MANY and not missing & self._talking(now_s):
            return True
        return self._have_passed(one, missing)

    def _have_passed(self, one: PendingLines, missing: int) -> bool:
        """Tell whether the ranks that a line lacks have all printed what comes after it."""
        awaited = self._awaited
        if awaited is not None and awaited.ranks & missing and awaited.anchor.place <= one.place:
            return False
        for cursor in self._cursors.values():
            if cursor.ranks & missing:
                if cursor.anchor.place <= one.place:
                    self._awaited = cursor
                    return False
                missing &= ~cursor.ranks
        return not missing

    def _end_of(self, one: PendingLines) -> float:
        return min(one.joined_s + self._window_s, one.began_s + LONGEST * self._window_s)

    def _talking(self, now_s: float) -> int:
        """Return the ranks of sources that were heard in the last window; all, while the first one is not over."""
        found = -1 if now_s - self._began_s < self._window_s else 0
        for cursor in self._cursors.values():
            if now_s - cursor.heard_s < self._window_s:
                found |= cursor.ranks
        return found


def may_join(cursor: Cursor, one: PendingLines, ranks: int) -> bool:
    """Tell whether ranks of a source may join a line that waits: none has printed that already, or more since."""
    if one.ranks & ranks:
        return False
    return one.owner is not cursor or not any(own.ranks & ranks for own in cursor.own[cursor.own.index(one):])
