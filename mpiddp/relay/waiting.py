"""Lines that wait for more ranks to say them, and what each source has said last."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from .said import NUMBER, Said, Shape, Spread, only, shape_of

GAP = 2**20  # between the places of two lines
OWN = 64  # the last lines that a source alone has said, which may still change places with those of others


class Waiting:
    """Lines that wait for more ranks to say them: one, or a block of several, as long as all say it alike.

    They are linked, each to those `before` and `after`, in the order of their `place`. The last line came as the
    `number`th, from `source`; it is `shared` once another source has said it, too. A line `is_found` by its text and
    its shape, where the Fold looks.
    """

    __slots__ = ("_shape", "after", "before", "began_s", "is_found", "joined_s", "number", "place", "ranks", "shared",
                 "source", "spread", "stream", "text")

    place: int
    number: int

    def __init__(self, said: Said, source: Source | None, now_s: float) -> None:
        self.stream, self.text, self.source, self.ranks = said.stream, said.text, source, said.ranks
        self.spread: Sequence[Spread | None] = said.spread
        self.began_s = self.joined_s = now_s
        self.shared = self.is_found = False
        self._shape: Shape | None = None
        self.before = self.after = self

    def link(self, before: Waiting) -> None:
        """Stand after `before`."""
        self.before, self.after = before, before.after
        before.after = self.after.before = self

    def unlink(self) -> None:
        """Stand nowhere."""
        self.before.after, self.after.before = self.after, self.before
        self.before = self.after = self

    @property
    def is_linked(self) -> bool:
        """Tell whether it still waits."""
        return self.after is not self

    @property
    def shape(self) -> Shape:
        """The text without its numbers."""
        if self._shape is None:
            self._shape = shape_of(self.text)
        return self._shape

    def cut(self, size: int) -> Waiting:
        """Cut a block in two, after so many characters, and return the first part, which stands before this one."""
        first, self.text, self._shape = self.text[:size], self.text[size + 1:], None
        spread: Sequence[Spread | None] = ()
        if self.spread:
            count = len(NUMBER.findall(first))
            spread, self.spread = self.spread[:count], self.spread[count:]
        return self._put_before([Said(self.ranks, self.stream, first, tuple(spread))], self.text.count("\n") + 1)[0]

    def lines(self) -> list[Waiting]:
        """Cut a block in lines, and return them; this is the last one."""
        if "\n" not in self.text:
            return [self]
        *lines, last = Said(self.ranks, self.stream, self.text, tuple(self.spread)).lines()
        self.text, self.spread, self._shape = last.text, last.spread, None
        return [*self._put_before(lines, len(lines)), self]

    def _put_before(self, parts: Sequence[Said], lines: int) -> list[Waiting]:
        """Return the first parts of this block, as new ones before it; `lines` are those from the second on."""
        found = []
        for at, part in enumerate(parts):
            one = Waiting(part, self.source, self.began_s)
            one.joined_s, one.shared = self.joined_s, self.shared
            one.number, one.place = self.number - lines + at, self.place - (lines - at) * GAP
            one.link(self.before)
            found.append(one)
        if self.source is not None and found and self in self.source.own:
            where = self.source.own.index(self)
            self.source.own[where:where] = found
        return found

    def has(self, whole: Sequence[str | None]) -> int:
        """Return how many of these numbers this line has in the same place; None is for one that does not count."""
        return sum(map(eq, self.shape.numbers, whole))

    def widen(self, theirs: Sequence[Spread | None], ours: Sequence[str], numbers: Sequence[str]) -> None:
        """Let more ranks have said it with `numbers` of their own, or what these spread to, in the place of `ours`."""
        spread = list(self.spread) or [None] * len(ours)
        for at, (own, number) in enumerate(zip(ours, numbers, strict=True)):
            other = theirs[at] if theirs else None
            if other is not None or own != number:
                before = spread[at]
                if before is None or other is not None or number not in before.some:
                    spread[at] = (before or only(own)).joined(other or only(number))
        self.spread = spread if any(spread) else ()


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
