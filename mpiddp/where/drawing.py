"""A picture of where ranks are: the tree of their calls, from left to right, a row for each place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .seen import Group, Picture
from .table import printable, row

ROW_H, GAP, LETTER_W = 40, 6, 7.2
PLAIN, ODD, FILL, PAPER = "#333", "#c00", "#eef3f8", "white"


class Box(NamedTuple):
    """A call that the ranks of some rows in a row have made."""

    column: int
    first: int
    last: int
    words: str


def svg(picture: Picture, head: str) -> str:
    """Return the picture below a line; what is odd is red. Raises ImportError if drawsvg is not installed."""
    import drawsvg

    groups = sorted(picture.groups, key=path)
    boxes = list(tree([path(group) for group in groups]))
    columns = range(max((box.column for box in boxes), default=-1) + 1)
    wide = [LETTER_W * max(len(box.words) for box in boxes if box.column == column) + 3 * GAP for column in columns]
    lefts = [GAP, *(GAP + sum(wide[:column + 1]) for column in columns)]
    below = 2 * ROW_H + len(groups) * ROW_H
    width = max([lefts[-1], *(LETTER_W * len(line) for line in (head, *picture.findings))]) + 2 * GAP
    drawing = drawsvg.Drawing(width, below + 20 * len(picture.findings), font_family="monospace")
    drawing.append(drawsvg.Rectangle(0, 0, drawing.width, drawing.height, fill=PAPER))
    drawing.append(drawsvg.Text(printable(head), 14, GAP, 24, fill=PLAIN))
    for column, first, last, words in boxes:
        top, odd = ROW_H * (first + 1), any(group.odd for group in groups[first:last + 1])
        drawing.append(drawsvg.Rectangle(lefts[column], top, wide[column] - GAP, ROW_H * (last - first + 1) - GAP,
                                         fill=FILL, stroke=ODD if odd else PLAIN))
        drawing.append(drawsvg.Text(printable(words), 12, lefts[column] + GAP, top + 22, fill=ODD if odd else PLAIN))
    for number, finding in enumerate(picture.findings):
        drawing.append(drawsvg.Text(printable(finding), 12, GAP, below + 20 * number, fill=PLAIN))
    return str(drawing.as_svg())


def path(group: Group) -> tuple[str, ...]:
    """Return the calls of a group's ranks, the outermost first, and who they are."""
    who, hosts, state, place = row(group)
    return (*filter(None, place.replace("; ", " → ").split(" → ")), f"{who} on {hosts}: {state}")


def tree(paths: Sequence[tuple[str, ...]], column: int = 0, first: int = 0) -> Iterator[Box]:
    """Yield the boxes of paths that are sorted, those of one call joined; the first one is in row `first`."""
    at = 0
    while at < len(paths):
        end = at + 1
        if column < len(paths[at]):
            while end < len(paths) and paths[end][column:column + 1] == paths[at][column:column + 1]:
                end += 1
            yield Box(column, first + at, first + end - 1, paths[at][column])
            yield from tree(paths[at:end], column + 1, first + at)
        at = end
