"""A snapshot of where ranks are, as JSON, as a table, and as a picture."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..base.text import find_runs, fold_hosts, format_ranges
from .snapshot import At, Group, Picture, Place

WIDEST_RANKS = 30  # characters
MOST = 200  # groups, and findings, that are told; a job has few, or nothing can be said of it
NOT_OF_HOSTS = re.compile(r"[^\w.:-]")
NOTHING: Mapping[int, str] = MappingProxyType({})
SHORT = ("waiting", "busy", "standing")  # what fits into a column


def as_json(picture: Picture, inspected: Mapping[int, str] = NOTHING) -> str:
    """Return a picture as JSON, and the threads of ranks that were inspected, as py-spy prints them.

    It has `step` in words, `findings`, `threads` by rank, and `groups`, each with `at`, `place`, `collective`,
    `sequence` (null if it is not known), `hosts`, `odd` and `ranks`: pairs of the first and the last of ranks in a row.
    """
    groups = [{"at": at.name.lower(), "place": words, "collective": collective, "ranks": find_runs(group.ranks),
               "hosts": group.hosts, "odd": group.odd, "sequence": group.sequence or None}
              for group in picture.groups[:MOST] for at, words, collective in [group.place]]
    return json.dumps({"step": picture.step, "findings": picture.findings[:MOST], "groups": groups,
                       "threads": {str(rank): text for rank, text in inspected.items()}})


def from_json(text: str, most_ranks: int) -> Picture:
    """Return the picture that as_json() wrote of a job of so many ranks.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError for anything else, before it makes anything
    that is larger than `text` and the job.
    """
    found = json.loads(text)
    groups, left = [], most_ranks
    for one in found["groups"]:
        rows = [(number(first), number(last)) for first, last in one["ranks"]]
        left -= sum(last - first + 1 for first, last in rows)
        if left < 0 or not all(0 <= first <= last < most_ranks for first, last in rows):
            raise ValueError("ranks that the job does not have")
        ranks = tuple(rank for first, last in rows for rank in range(first, last + 1))
        place = Place(At[string(one["at"]).upper()], string(one["place"]), string(one["collective"]))
        groups.append(Group(place, ranks, tuple(map(host, one["hosts"])), one["odd"] is True,
                            number(one["sequence"] or 0)))
    return Picture(tuple(groups), tuple(map(string, found["findings"])), string(found["step"]))


def number(value: object) -> int:
    """Return an integer that is a count or an index; raise TypeError or ValueError for anything else."""
    if type(value) is not int:
        raise TypeError(f"{value!r} in the place of a number")
    if not 0 <= value < 2**63:
        raise ValueError("a number that is too large, or negative")
    return value


def string(value: object) -> str:
    """Return a text; raise TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} in the place of a text")
    return value


def host(value: object) -> str:
    """Return a hostname without what makes it stand for many, as n[0-99999999] does."""
    return NOT_OF_HOSTS.sub("_", string(value))


def lines(picture: Picture) -> list[str]:
    """Return a table with a line for each group, the odd ones first, and what follows from it."""
    table = [row(group) for group in picture.groups]
    widths = [max((len(cells[at]) for cells in table), default=0) for at in range(3)]
    found = ["  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[3]])
             for cells in table]
    return [f"  {printable(line).rstrip()}" for line in (*found, *picture.findings)]


def threads(inspected: Mapping[int, str]) -> list[str]:
    """Return the threads of ranks that were inspected, in lines."""
    return [printable(line) for rank, text in sorted(inspected.items())
            for line in (f"rank {rank}:", *(f"  {one}" for one in text.rstrip("\n").split("\n")))]


def waits_for_lock(picture: Picture) -> bool:
    """Tell whether a rank stands in the script's own code, or a child of one, waiting for a lock."""
    return any(group.place.at is At.ELSEWHERE and "futex" in group.place.words for group in picture.groups)


def row(group: Group) -> tuple[str, str, str, str]:
    """Return a group's ranks, hosts, state and place."""
    count = len(group.ranks)
    names = format_ranges(group.ranks)
    if len(names) > WIDEST_RANKS:
        names = f"{names[:WIDEST_RANKS - 1]}…"
    who = f"{count:,} rank{'s' * (count != 1)}  {names}"
    at, place, _ = group.place
    if group.sequence:
        place = f"{place} (sequence {group.sequence:,})"
    state = at.value if at.value in SHORT else ""
    if not state:
        place = f"{place}  ({at.value})" if place else at.value
    return who, fold_hosts(group.hosts), "odd" if group.odd else state, place


def printable(text: str) -> str:
    """Return a text without what a terminal would act on."""
    return "".join(one if one.isprintable() else "?" for one in text)


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
