"""The map of a job as a picture: a box for each kind of node, a cell for each of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.seat import Seat
from ..plan.words import ranges
from .map import by_node, hosts, kinds, model

CELL_W, CELL_H, GAP, ACROSS = 170, 74, 8, 4
LINE_H, HEAD_H = 15, 24
PLAIN, ODD, FILL, PAPER = "#333", "#c00", "#eef3f8", "white"


def svg(seats: Sequence[Seat]) -> str:
    """Return the picture; what differs from the commonest kind of node is red.

    Raises ImportError if drawsvg is not installed.
    """
    import drawsvg

    groups = kinds(by_node(seats).values())
    usual = groups[0][0]
    width = GAP + ACROSS * (CELL_W + GAP)
    heights = [HEAD_H + -(-len(group[0]) // ACROSS) * (CELL_H + GAP) for group in groups]
    picture = drawsvg.Drawing(width + 2 * GAP, sum(heights) + GAP * (len(groups) + 1), font_family="sans-serif")
    picture.append(drawsvg.Rectangle(0, 0, picture.width, picture.height, fill=PAPER))
    top = GAP
    for group, height in zip(groups, heights, strict=True):
        odd = group is not groups[0]
        picture.append(drawsvg.Rectangle(GAP, top, width, height, fill="none", stroke=ODD if odd else PLAIN))
        title = hosts(group) + (f" ({len(group):,} nodes)" if len(group) > 1 else "")
        picture.append(drawsvg.Text(title, 14, 2 * GAP, top + 17, fill=ODD if odd else PLAIN))
        for local, seat in enumerate(group[0]):
            left, down = GAP + GAP + local % ACROSS * (CELL_W + GAP), top + HEAD_H + local // ACROSS * (CELL_H + GAP)
            picture.append(drawsvg.Rectangle(left, down, CELL_W, CELL_H, fill=FILL, stroke=PLAIN))
            peer = usual[local] if local < len(usual) else None
            name = f"local rank {local}" if len(group) > 1 else f"rank {seat.rank}"
            for line, (text, alike) in enumerate(words(name, seat, peer)):
                color = PLAIN if alike else ODD
                picture.append(drawsvg.Text(text, 12, left + 6, down + 16 + line * LINE_H, fill=color))
        top += height + GAP
    return str(picture.as_svg())


def words(name: str, seat: Seat, peer: Seat | None) -> list[tuple[str, bool]]:
    """Return the lines of a rank's cell, and for each line whether it is the same for `peer`.

    `peer` sits in the same place on a node of the commonest kind. It is None if that node has fewer ranks:
    then no line is the same.
    """
    numa = f"NUMA {ranges(seat.numa)}, {seat.threads} thread{'s' * (seat.threads != 1)}"
    device = f"{seat.device} {model(seat.gpu)}".strip()
    return [
        (name, peer is not None),
        (f"{device}, {seat.interface or 'any interface'}", peer is not None and
         (seat.device, model(seat.gpu), seat.interface) == (peer.device, model(peer.gpu), peer.interface)),
        (f"CPUs {ranges(seat.cpus)}", peer is not None and seat.cpus == peer.cpus),
        (numa, peer is not None and (seat.numa, seat.threads) == (peer.numa, peer.threads)),
    ]
