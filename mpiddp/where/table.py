"""A picture of where ranks are, as JSON and as a table."""

from __future__ import annotations

import json

from ..plan.words import folded
from .merge import At, Group, Picture, ranges

WIDEST_RANKS = 30  # characters
ODD = "odd"


def as_json(picture: Picture) -> str:
    """Return a picture as JSON: `findings`, and `groups` with `at`, `place`, `ranks`, `hosts` and `odd`."""
    return json.dumps({"findings": picture.findings, "groups": [
        {**group._asdict(), "at": group.at.name.lower()} for group in picture.groups]})


def from_json(text: str) -> Picture:
    """Return the picture that as_json() wrote."""
    found = json.loads(text)
    groups = [Group(At[one["at"].upper()], one["place"], tuple(one["ranks"]), tuple(one["hosts"]), one["odd"])
              for one in found["groups"]]
    return Picture(tuple(groups), tuple(found["findings"]))


def lines(picture: Picture) -> list[str]:
    """Return a table with a line for each group, the odd ones first, and what follows from it."""
    rows = [row(group) for group in picture.groups]
    widths = [max((len(cells[at]) for cells in rows), default=0) for at in range(3)]
    table = ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[3]])
             for cells in rows]
    return [line.rstrip() for line in [*table, *(f"  {one}" for one in picture.findings)]]


def row(group: Group) -> tuple[str, str, str, str]:
    """Return a group's ranks, hosts, state and place."""
    count = len(group.ranks)
    names = ranges(group.ranks)
    if len(names) > WIDEST_RANKS:
        names = f"{names[:WIDEST_RANKS - 1]}…"
    who = f"{count:,} rank{'s' * (count != 1)}  {names}"
    state = ODD if group.odd else group.at.value if len(group.at.value) < 10 else ""
    place = group.place
    if group.at.value not in (state, "standing", "waiting", "computing"):
        place = f"{place}  ({group.at.value})" if place else group.at.value
    return who, folded(group.hosts), state, place
