"""Merges lines of many ranks into one if they are equal, or differ only in numbers. No I/O, no clock.

A source is a rank, or a node that has merged its ranks' lines. A set of ranks is an integer with one bit per rank,
which is small even for thousands of ranks.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right, insort
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain, compress, count, groupby
from operator import attrgetter, eq, ne

# A number, or a terminal's escape sequence, for example a colour. A sign belongs to a number unless a letter, digit or
# point precedes it. The expression begins with a set of characters because that is fast.
TOKEN = re.compile(r"([-+0-9\033](?:(?:(?<=[0-9])|(?<=[-+])(?<![\w.].)(?=[0-9]))[0-9]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
                   r"|(?<=\033)\[[0-9;:?]*[A-Za-z]))")
ESCAPE = "\033"  # begins an escape sequence
MASK = "\ud800"  # replaces a number; decoded output never contains it, not even as an escaped byte
MAX_LISTED_VALUES = 3  # of a number; if there are more, the smallest and the largest are shown
MAX_COLUMNS = 16  # ranks whose numbers are all kept; of more ranks, only the smallest and the largest numbers

MAX_CANDIDATES = 16  # pending lines to compare for the most equal integers
MAX_MOVABLE_LINES = 64  # lines printed by one source only that may still move before a shared line
MAX_WINDOWS = 5  # the longest wait, for a line that ranks join one after the other
MAX_LINES_AHEAD = 10_000  # of a source, from the oldest pending line on
PATIENT_LINES = 1_000  # with more pending lines, a rank that was silent for a window is not waited for
MAX_MASKS = 1_000  # in the table of usual numbers of equal integers
MAX_PENDING_CHARACTERS = 16 * 2**20

get_position = attrgetter("position")


class MergedLines:
    """Consecutive lines that `ranks` have printed on a stream, 1 or 2, in the wording of one of these ranks.

    If numbers differ, `others` has those of other ranks: for each rank a list of all numbers in the lines.
    """

    __slots__ = ("_masked", "lines", "others", "ranks", "stream")

    def __init__(self, ranks: int, stream: int, lines: list[str], others: Sequence[list[str]] = ()) -> None:
        self.ranks, self.stream, self.lines, self.others = ranks, stream, lines, others
        self._masked: tuple[list[str], list[str]] | None = None

    def __str__(self) -> str:
        """Return the text to show."""
        text = "\n".join(self.lines)
        if not self.others:
            return text
        own = self.numbers
        numbers = own.copy()
        for index in {index for column in self.others for index in compress(count(), map(ne, own, column))}:
            numbers[index] = format_values({own[index], *(column[index] for column in self.others)})
        if ESCAPE in text:
            rest = iter(numbers)
            return TOKEN.sub(lambda token: token[0] if token[0].startswith(ESCAPE) else next(rest), text)
        parts = [""] * (2 * len(numbers) + 1)
        parts[::2], parts[1::2] = "\n".join(self.masks).split(MASK), numbers
        return "".join(parts)

    @property
    def masks(self) -> list[str]:
        """The lines without escape sequences, with each number replaced by MASK."""
        return self.mask()[0]

    @property
    def numbers(self) -> list[str]:
        """The numbers of all lines."""
        return self.mask()[1]

    def mask(self) -> tuple[list[str], list[str]]:
        """Return `masks` and `numbers`."""
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

    def split_off(self, size: int) -> MergedLines:
        """Remove the first `size` lines and return them."""
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
        """Add the ranks of lines that differ at most in numbers."""
        self.ranks |= other.ranks
        if other.others or (self.lines != other.lines and self.numbers != other.numbers):
            self.others = [*self.others, other.numbers, *other.others]
            if len(self.others) > MAX_COLUMNS:
                self.others = limit_values(self.others)


def limit_values(columns: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return columns with at most MAX_LISTED_VALUES + 1 values of each number, including the smallest and largest."""
    if len(columns) <= MAX_LISTED_VALUES + 1:
        return list(map(list, columns))
    rows = []
    for values in zip(*columns, strict=True):
        low_to_high = sorted({*values}, key=number_key)
        rows.append([*low_to_high[:MAX_LISTED_VALUES], low_to_high[-1]])
    longest = max(map(len, rows))
    return [[row[min(index, len(row) - 1)] for row in rows] for index in range(longest)]


def format_values(numbers: Iterable[str]) -> str:
    """Return different numbers as users see them: {7,8}, or 7…90."""
    low_to_high = sorted(numbers, key=number_key)
    return ("{" + ",".join(low_to_high) + "}" if len(low_to_high) <= MAX_LISTED_VALUES else
            f"{low_to_high[0]}…{low_to_high[-1]}")


def number_key(number: str) -> tuple[float, str]:
    """Return the sort key of a number."""
    return float(number), number


def format_rank_bits(ranks: int) -> str:
    """Return ranks, the bits of an integer, as in 0-3,8."""
    digits = f"{ranks:b}"[::-1]
    return ",".join(f"{row.start()}" if row.end() - row.start() == 1 else f"{row.start()}-{row.end() - 1}"
                    for row in re.finditer("1+", digits))


class Cursor:
    """The position of a source: `anchor` is its last shared line, `own` are its lines after that.

    `ranks` are those whose lines the source has sent; `last_s` is when it sent the latest.
    """

    __slots__ = ("anchor", "last_s", "own", "ranks")

    def __init__(self, anchor: PendingLines) -> None:
        self.anchor, self.own = anchor, list[PendingLines]()
        self.ranks, self.last_s = 0, 0.0

    def advance(self, line: PendingLines) -> None:
        """Move the anchor to one of the source's own lines; this line and those before it become fixed."""
        size = self.own.index(line) + 1
        self.anchor = line
        for fixed in self.own[:size]:
            fixed.owner = None
        del self.own[:size]


class PendingLines(MergedLines):
    """Lines that wait for more ranks, in a linked list ordered by `position`.

    While only one source has printed them and they may still move, `owner` is the source's cursor. A position is the
    number of lines that arrived before the first of these lines. Moving lines adds a component to their position.
    """

    __slots__ = ("after", "before", "began_s", "is_indexed", "joined_s", "owner", "position")

    position: tuple[int, ...]

    def __init__(self, lines: MergedLines, owner: Cursor | None, now_s: float) -> None:
        super().__init__(lines.ranks, lines.stream, lines.lines, lines.others)
        self._masked, self.owner = lines._masked, owner
        self.began_s = self.joined_s = now_s
        self.is_indexed = False
        self.before = self.after = self

    def link(self, before: PendingLines) -> None:
        """Insert this after `before`."""
        self.before, self.after = before, before.after
        before.after = self.after.before = self

    def unlink(self) -> None:
        """Remove this from the list."""
        self.before.after, self.after.before = self.after, self.before
        self.before = self.after = self

    @property
    def is_linked(self) -> bool:
        """Whether this is in the list."""
        return self.after is not self

    def split(self, size: int) -> PendingLines:
        """Split off the first `size` lines as an element of their own, linked before this one, and return it."""
        if size == len(self.lines):
            return self
        first = PendingLines(self.split_off(size), self.owner, self.began_s)
        first.joined_s, first.position = self.joined_s, self.position
        self.position = (*self.position[:-1], self.position[-1] + size)
        first.link(self.before)
        if self.owner is not None:
            self.owner.own.insert(self.owner.own.index(self), first)
        return first


class LineMerger:
    """Keeps lines until all expected ranks have printed them, or the missing ranks are given up.

    They are given up after `window_s` in which no rank has joined the line, and with `hurries` also if very many lines
    are pending. The lines of a source stay in order. If it `keeps_numbers`, only equal lines are merged.
    """

    def __init__(self, expected: int, window_s: float, hurries: bool = False, keeps_numbers: bool = False) -> None:
        self._expected, self._window_s, self._keeps_numbers = expected, window_s, keeps_numbers
        self._max_pending = MAX_LINES_AHEAD // 2 if hurries else math.inf
        self._ends = PendingLines(MergedLines(0, 0, []), None, 0.0)  # before the first line, and after the last one
        self._ends.position, self._ends.is_indexed = (-1,), True
        self._number = self._done = 0  # lines that were added, and that were removed
        self._size = 0  # characters of pending lines
        self._moved = 0  # lines that have been moved
        self._began_s = math.inf
        self._by_mask: dict[tuple[int, str], list[PendingLines]] = {}  # single lines, by stream and mask
        self._frontrunner: Cursor | None = None  # the only source of all lines after its anchor
        self._through: list[MergedLines] = []  # lines that wait for no rank
        self._usual_equal: dict[str, int] = {}  # by mask, how many integers were equal when lines were merged
        self._cursors: dict[Hashable, Cursor] = {}
        self._awaited: Cursor | None = None  # the source for which the first line waits or has waited

    def add(self, source: Hashable, lines: MergedLines, now_s: float) -> None:
        """Add the next lines of a source; the merger takes ownership of them."""
        if not self._pending_count and not self._expected & ~lines.ranks:
            self._through.append(lines)
            return
        if self._keeps_numbers:
            lines._masked = lines.lines.copy(), []
        cursor = self._cursor(source, lines.ranks, now_s)
        if len(self._usual_equal) > MAX_MASKS:
            self._usual_equal.clear()
        while lines.lines:
            following = cursor.anchor.after if cursor.anchor.is_linked else self._ends.after
            if size := 0 if cursor.own else self._count_alike(following, lines):
                self._merge(cursor, following.split(size), lines.split_off(size), now_s)
            elif self._is_frontrunner(cursor):
                self._append(cursor, lines, now_s)
                return
            else:
                line = lines.split_off(1)
                if match := self._find_match(cursor, line):
                    self._merge(cursor, match, line, now_s)
                else:
                    self._append(cursor, line, now_s)

    def remove_ranks(self, ranks: int) -> None:
        """Expect no more lines of these ranks."""
        self._expected &= ~ranks

    def pop_ready(self, now_s: float, is_due: bool = False) -> list[MergedLines]:
        """Return the lines that wait for no rank any more, in order.

        With `is_due` all sources have been read, and lines that have waited for a window are returned as well.
        """
        ready, self._through = self._through, []
        while self._pending_count and self._is_ready(self._ends.after, now_s, is_due):
            ready.append(self._pop())
        return ready

    def next_due_s(self) -> float | None:
        """Return when the first pending line is due, None if no line is pending."""
        return self._due_s(self._ends.after) if self._pending_count else None

    def pop_all(self) -> list[MergedLines]:
        """Return all lines, ready or not."""
        lines, self._through = self._through, []
        while self._pending_count:
            lines.append(self._pop())
        return lines

    def is_ahead(self, source: Hashable) -> bool:
        """Return whether a source is so far ahead of others that reading it should pause."""
        if not self._pending_count or source not in self._cursors:
            return False
        cursor = self._cursors[source]
        last = cursor.own[-1] if cursor.own else cursor.anchor
        return last.position[0] + len(last.lines) - self._done > MAX_LINES_AHEAD

    @property
    def _pending_count(self) -> int:
        return self._number - self._done

    def _cursor(self, source: Hashable, ranks: int, now_s: float) -> Cursor:
        if source not in self._cursors:
            self._cursors[source] = Cursor(self._ends)
            self._began_s = min(self._began_s, now_s)
        cursor = self._cursors[source]
        cursor.last_s, cursor.ranks = now_s, cursor.ranks | ranks
        return cursor

    def _count_alike(self, pending: PendingLines, lines: MergedLines) -> int:
        """Return how many first lines are alike in both, except for numbers.

        As many integers as usual must be equal, by default all, so that step 7 does not match step 5.
        """
        if pending is self._ends or pending.stream != lines.stream:
            return 0
        size = min(len(pending.lines), len(lines.lines))
        if pending.lines[:size] == lines.lines[:size]:
            return size
        masks, numbers = pending.masks, pending.numbers
        size = next(compress(count(), map(ne, masks, lines.masks)), size)
        differing = (index for index in compress(count(), map(ne, numbers, lines.numbers))
                     if numbers[index].isdecimal())
        first = next(differing, None)
        if first is None:
            return size
        ends = list(accumulate(mask.count(MASK) for mask in masks[:size]))
        for row, group in groupby(chain([first], differing), key=partial(bisect_right, ends)):
            if row == size:
                break
            integers = sum(map(str.isdecimal, numbers[ends[row - 1] if row else 0:ends[row]]))
            if integers - len(list(group)) < self._usual_equal.get(masks[row], integers):
                return row
        return size

    def _find_match(self, cursor: Cursor, line: MergedLines) -> PendingLines | None:
        """Return the pending line with the most equal integers that a source may join, the first of several.

        Prevents matching a sparse logger's step 7 with others' step 5.
        """
        self._index()
        mask, lines = line.masks[0], self._by_mask.get((line.stream, line.masks[0]), [])
        start = bisect_right(lines, cursor.anchor.position, key=get_position)
        integers = [number if number.isdecimal() else None for number in line.numbers]
        usual = self._usual_equal.get(mask)
        best, most, enough = None, -1, len(integers) - integers.count(None) if usual is None else usual
        for candidate in lines[start:start + MAX_CANDIDATES]:
            equal = sum(map(eq, candidate.numbers, integers))
            if equal > most and can_join(cursor, candidate, line.ranks):
                best, most = candidate, equal
                if most >= enough:
                    break
        if usual is not None and most < usual:
            self._usual_equal[mask] = usual - 1
            return None
        if best is not None:
            self._usual_equal[mask] = most
        return best

    def _index(self) -> None:
        """Add the newest lines to the index of masks, each as an element of its own."""
        block = self._ends.before
        while not block.is_indexed:
            block = block.before
        while (block := block.after) is not self._ends:
            block.mask()  # all lines at once
            for _ in range(len(block.lines)):
                line = block.split(1)
                line.is_indexed = True
                self._by_mask.setdefault((line.stream, line.masks[0]), []).append(line)

    def _is_frontrunner(self, cursor: Cursor) -> bool:
        """Return whether no other source has printed any line after this source's anchor."""
        return cursor is self._frontrunner or not self._pending_count or (
            not cursor.own and self._ends.before is cursor.anchor)

    def _append(self, cursor: Cursor, lines: MergedLines, now_s: float) -> None:
        self._frontrunner = cursor if self._is_frontrunner(cursor) else None
        block = PendingLines(lines, cursor, now_s)
        block.position = (self._number,)
        block.link(self._ends.before)
        self._number += len(block.lines)
        self._size += sum(map(len, block.lines)) + len(block.lines)
        cursor.own.append(block)
        if len(cursor.own) > MAX_MOVABLE_LINES:
            cursor.advance(cursor.own[-MAX_MOVABLE_LINES - 1])

    def _merge(self, cursor: Cursor, pending: PendingLines, lines: MergedLines, now_s: float) -> None:
        """Merge lines of a source into pending lines; its own earlier lines move before these."""
        pending.merge(lines)
        pending.joined_s = now_s
        if pending.owner is cursor:
            return
        if pending.owner is not None:
            pending.owner.advance(pending)
        for own in cursor.own:
            if own.position > pending.position:
                alike = self._by_mask[own.stream, own.masks[0]]
                alike.remove(own)
                own.unlink()
                own.link(pending.before)
                own.position = (*pending.position[:-1], pending.position[-1] - 1, self._moved)
                self._moved += 1
                insort(alike, own, key=get_position)
            own.owner = None
        cursor.anchor, cursor.own = pending, []

    def _pop(self) -> MergedLines:
        block = self._ends.after
        if block.owner is not None:
            block.owner.advance(block)
        block.unlink()
        self._ends.position = block.position  # all others are after it
        self._done += len(block.lines)
        self._size -= sum(map(len, block.lines)) + len(block.lines)
        if block.is_indexed:
            key = block.stream, block.masks[0]
            self._by_mask[key].remove(block)
            if not self._by_mask[key]:
                del self._by_mask[key]
        return block.split_off(len(block.lines))  # the empty block, still referenced by cursors, is small

    def _is_ready(self, block: PendingLines, now_s: float, is_due: bool) -> bool:
        missing = self._expected & ~block.ranks
        if not missing or (is_due and now_s >= self._due_s(block)):
            return True
        if self._size > MAX_PENDING_CHARACTERS or self._pending_count > self._max_pending:
            return True
        if self._pending_count > PATIENT_LINES and not missing & self._active_ranks(now_s):
            return True
        return self._have_passed(block, missing)

    def _have_passed(self, block: PendingLines, missing: int) -> bool:
        """Return whether all ranks missing from a line have printed a later line."""
        awaited = self._awaited
        if awaited is not None and awaited.ranks & missing and awaited.anchor.position <= block.position:
            return False
        for cursor in self._cursors.values():
            if cursor.ranks & missing:
                if cursor.anchor.position <= block.position:
                    self._awaited = cursor
                    return False
                missing &= ~cursor.ranks
        return not missing

    def _due_s(self, block: PendingLines) -> float:
        return min(block.joined_s + self._window_s, block.began_s + MAX_WINDOWS * self._window_s)

    def _active_ranks(self, now_s: float) -> int:
        """Return the ranks of sources that have sent lines in the last window; during the first window, all ranks."""
        ranks = -1 if now_s - self._began_s < self._window_s else 0
        for cursor in self._cursors.values():
            if now_s - cursor.last_s < self._window_s:
                ranks |= cursor.ranks
        return ranks


def can_join(cursor: Cursor, pending: PendingLines, ranks: int) -> bool:
    """Return whether ranks of a source may join a pending line: none has printed it yet, or a later line."""
    if pending.ranks & ranks:
        return False
    return pending.owner is not cursor or not any(
        own.ranks & ranks for own in cursor.own[cursor.own.index(pending):])
