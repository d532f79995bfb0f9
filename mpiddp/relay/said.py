"""A line that several ranks have said, with numbers of their own.

Ranks are the bits of a number, so that thousands take little room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

NUMBER = re.compile(r"((?:(?<![\w.])[-+])?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
SOME = 3  # values of a number that are listed; of more, the smallest and the largest are shown


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
    """A line that `ranks` have said on a stream, 1 or 2: `text`, with `spread` in the place of its numbers, if any.

    Without that it may be several lines, with newlines between.
    """

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


def split(text: str) -> tuple[str, list[str]]:
    """Return what stands between the numbers of a line, in one text that is never empty, and the numbers."""
    parts = NUMBER.split(text)
    return "\n".join([*parts[::2], ""]), parts[1::2]


def common(one: str, other: str) -> int:
    """Return how many characters of whole lines two texts begin with alike, without the last end; -1 for none."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # the first `low` are alike
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    if all(text[low:low + 1] in ("\n", "") for text in (one, other)):
        return low
    return one.rfind("\n", 0, low)
