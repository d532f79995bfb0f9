"""Lines that wait for more ranks to say them, and what each source has said last."""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from .said import Said, Spread

OWN = 64  # the last lines that a source alone has said, which may still change places with those of others


class Waiting:
    """A line that waits for more ranks to say it: its `shape` is what stands between its `numbers`.

    Lines are linked, each to the one `before` and `after`, in the order of their `place`. The line came as the
    `number`th, from `source`; it is `shared` once another source has said it, too.
    """

    __slots__ = ("after", "before", "began_s", "joined_s", "number", "numbers", "place", "ranks", "said", "shape",
                 "shared", "source", "spread", "text")

    place: int
    number: int
    shape: str
    numbers: list[str]

    def __init__(self, said: Said, source: Source | None, now_s: float) -> None:
        self.said, self.text, self.source, self.ranks = said, said.text, source, said.ranks
        self.spread: Sequence[Spread] = said.spread
        self.began_s = self.joined_s = now_s
        self.shared = False
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

    def has(self, whole: Sequence[str | None]) -> int:
        """Return how many of these numbers this line has in the same place; None is for one that does not count."""
        return sum(map(eq, self.numbers, whole))

    def widen(self, said: Said, numbers: Sequence[str]) -> None:
        """Let more ranks have said it with numbers of their own."""
        spread = list(self.spread) or [Spread(one, one, (one,)) for one in self.numbers]
        for at, number in enumerate(numbers):
            if said.spread:
                spread[at] = spread[at].joined(said.spread[at])
            elif number not in spread[at].some:
                spread[at] = spread[at].joined(Spread(number, number, (number,)))
        self.spread = spread


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
