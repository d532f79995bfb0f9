"""A line that several ranks have said, with numbers of their own.

Ranks are the bits of a number, so that thousands take little room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# A sign belongs to a number that follows no letter, digit or point. What begins with a set of characters is found soon.
NUMBER = re.compile(r"([-+\d](?:(?<=\d)|(?<![\w.].)(?=\d))\d*(?:\.\d+)?(?:[eE][-+]?\d+)?)")
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
    """What `ranks` have said on a stream, 1 or 2: a line, or several with newlines between.

    In the place of its numbers stands `spread`, if it is there, but for those that are None.
    """

    ranks: int
    stream: int
    text: str
    spread: tuple[Spread | None, ...] = ()

    def __str__(self) -> str:
        """Return the text as people see it."""
        if not self.spread:
            return self.text
        parts = NUMBER.split(self.text)
        numbers = zip(parts[1::2], self.spread, strict=True)
        parts[1::2] = [number if one is None else str(one) for number, one in numbers]
        return "".join(parts)

    def after(self, size: int) -> Said | None:
        """Return the lines after so many characters, of which it has no spread, None for none."""
        return self._replace(text=self.text[size + 1:]) if size < len(self.text) else None

    def parted(self, lines: int) -> tuple[Said, Said | None]:
        """Return the first lines, and the others, None for none."""
        text = begin_of(self.text, lines)
        if len(text) == len(self.text):
            return self, None
        count = len(NUMBER.findall(text)) if self.spread else 0
        return self._replace(text=text, spread=self.spread[:count]), self._replace(
            text=self.text[len(text) + 1:], spread=self.spread[count:])

    def lines(self) -> list[Said]:
        """Return each line."""
        texts = self.text.split("\n")
        if not self.spread:
            return [self._replace(text=text) for text in texts]
        found, at = [], 0
        for text in texts:
            end = at + len(NUMBER.findall(text))
            spread = self.spread[at:end]
            found.append(self._replace(text=text, spread=spread if any(spread) else ()))
            at = end
        return found


def only(number: str) -> Spread:
    """Return the number of one rank."""
    return Spread(number, number, (number,))


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


class Shape(NamedTuple):
    """A text with a NUL in the place of each of its `numbers`; plain if it has no others."""

    text: str
    numbers: list[str]
    is_plain: bool


def shape_of(text: str) -> Shape:
    """Return a text without its numbers, and these."""
    return Shape(NUMBER.sub("\0", text), NUMBER.findall(text), "\0" not in text)


def common(one: str, other: str) -> int:
    """Return how many characters of whole lines two texts begin with alike, without the last end; -1 for none."""
    if one == other:
        return len(one)
    low, high = 0, min(len(one), len(other))
    while low < high:  # the first `low` are alike
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    if all(text[low:low + 1] in ("\n", "") for text in (one, other)):
        return low
    return one.rfind("\n", 0, low)


def begin_of(text: str, lines: int) -> str:
    """Return the first lines of a text, or all if it has fewer."""
    if lines > 1:
        return "\n".join(text.split("\n", lines)[:lines])
    end = text.find("\n")
    return text if end < 0 else text[:end]


def alike(ours: Shape, text: str, usual: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return with how many lines a text begins like lines of ours, but for numbers, and its numbers.

    `usual` tells how many whole ones lines of a shape have in common; where it does not, all have to be. Lines that
    have fewer are not alike: step 7 is not step 5.
    """
    theirs = shape_of(begin_of(text, ours.text.count("\n") + 1))
    size = common(ours.text, theirs.text) if ours.is_plain and theirs.is_plain else -1
    if size < 0:
        return 0, []
    equal = [one == other and one.isdecimal() for one, other in zip(ours.numbers, theirs.numbers, strict=False)]
    at = 0
    for number, line in enumerate(ours.text[:size].split("\n")):
        end = at + line.count("\0")
        known = usual.get(line)
        if sum(equal[at:end]) < (sum(map(str.isdecimal, ours.numbers[at:end])) if known is None else known):
            return number, theirs.numbers
        at = end
    return number + 1, theirs.numbers
