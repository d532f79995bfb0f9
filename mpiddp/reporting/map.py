"""The map of a job: which rank sits where, as lines for a person, as records for tools, and as a picture."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..base.text import columns, folded, ranges
from ..discovery.gpus import Gpu
from ..planning.job import Placement

HEADER = ("host", "ranks", "device", "cores", "numa", "threads", "interface")
WIDTHS = (20, 11, 22, 13, 4, 7, 9)  # the most characters of each column, 100 in all
BRANDS = ("AMD", "Data", "GeForce", "Graphics", "Instinct", "Intel(R)", "Max", "NVIDIA", "Quadro", "RTX", "Tesla")
MAX_ROWS = 10  # at most; nodes of further kinds are only counted


def format_map(seats: Sequence[Placement]) -> list[str]:
    """Return the map as a table; `seats` are in rank order.

    If the job has a single node and few ranks, each rank has a line. Otherwise nodes that look alike share
    a line. The commonest kind comes first, so that the others stand out.
    """
    nodes = group_by_node(seats)
    if len(nodes) == 1 and len(seats) <= MAX_ROWS:
        rows = [format_row([[seat]]) for seat in seats]
    else:
        groups = group_alike_nodes(nodes.values())
        rows = [format_row(group) for group in groups[:MAX_ROWS]]
        if rest := groups[MAX_ROWS:]:
            rows.append((f"and {sum(map(len, rest)):,} more", "", "", "", "", "", ""))
    return columns([HEADER, *rows], WIDTHS)


def group_by_node(seats: Iterable[Placement]) -> dict[int, list[Placement]]:
    """Return the seats of each node."""
    nodes: dict[int, list[Placement]] = {}
    for seat in seats:
        nodes.setdefault(seat.node, []).append(seat)
    return nodes


def group_alike_nodes(nodes: Iterable[list[Placement]]) -> list[list[list[Placement]]]:
    """Return groups of nodes that look alike, the largest first."""
    found: dict[tuple[object, ...], list[list[Placement]]] = {}
    for node in nodes:
        look = tuple((one.device, shorten_model(one.gpu), one.cpus, one.numa, one.threads, one.interface)
                     for one in node)
        found.setdefault(look, []).append(node)
    return sorted(found.values(), key=len, reverse=True)


def fold_node_names(nodes: Sequence[Sequence[Placement]]) -> str:
    """Return the names of nodes, folded if there are several."""
    return folded(node[0].host for node in nodes) if len(nodes) > 1 else nodes[0][0].host


def format_row(nodes: Sequence[Sequence[Placement]]) -> tuple[str, ...]:
    """Return the cells for nodes that look alike."""
    first = nodes[0]
    ranks = ranges(seat.rank for node in nodes for seat in node)
    sizes = sorted({len(seat.cpus) for seat in first})
    cores = format_cpus(first[0].cpus) if len(first) == 1 else f"{'-'.join(map(str, find_bounds(sizes)))} each"
    threads = "-".join(map(str, find_bounds({seat.threads for seat in first})))
    return (
        fold_node_names(nodes), ranks if len(ranks) <= WIDTHS[1] else f"{len(first)} each",
        describe_devices(first, by_uuid=len(nodes) == 1), cores,
        ranges(number for seat in first for number in seat.numa), threads,
        ",".join(dict.fromkeys(seat.interface or "-" for seat in first)),
    )


def describe_devices(seats: Sequence[Placement], by_uuid: bool) -> str:
    """Return the devices of a node's ranks and their models; `by_uuid` adds the beginning of a single GPU's UUID."""
    words = [fold_devices([seat.device for seat in seats]), *dict.fromkeys(shorten_model(seat.gpu) for seat in seats)]
    if by_uuid and len(seats) == 1 and seats[0].gpu:
        words.append(seats[0].gpu.uuid.removeprefix("GPU-").removeprefix("MIG-")[:8])
    return " ".join(filter(None, words))


def shorten_model(gpu: Gpu | None) -> str:
    """Return a GPU's model in a word: H100, or 1g.5gb for a MIG instance."""
    if gpu is None:
        return ""
    words = [word for word in gpu.name.split() if word not in BRANDS]
    return next(iter(words[-1:] if gpu.is_slice else words), "").partition("-")[0]


def fold_devices(names: Sequence[str]) -> str:
    """Return devices such as cuda:0, cuda:1 as cuda:0-1."""
    kinds = dict.fromkeys(name.partition(":")[0] for name in names)
    return ",".join(
        f"{kind}:{ranges(int(index) for index in found)}" if (found := [
            name.partition(":")[2] for name in names if name.startswith(f"{kind}:")]) else kind
        for kind in kinds)


def format_cpus(cpus: Collection[int]) -> str:
    """Return the CPUs of a rank as ranges; a single one is called by its name, since 0 alone would look like none."""
    return f"core {ranges(cpus)}" if len(cpus) == 1 else ranges(cpus)


def find_bounds(numbers: Collection[int]) -> list[int]:
    """Return the smallest and the largest of some numbers, or one number if the two are equal."""
    return sorted({min(numbers), max(numbers)})


def list_records(seats: Sequence[Placement]) -> list[dict[str, object]]:
    """Return the map as plain records, in rank order."""
    return [{"rank": one.rank, "host": one.host, "node": one.node, "device": one.device,
             "gpu": one.gpu._asdict() if one.gpu else None, "cpus": sorted(one.cpus),
             "numa": list(one.numa), "threads": one.threads, "interface": one.interface,
             "pid": one.pid} for one in seats]


CELL_W, CELL_H, GAP, CELLS_ACROSS = 170, 74, 8, 4
LINE_H, HEAD_H = 15, 24
PLAIN_COLOR, OUTLIER_COLOR, FILL_COLOR, PAPER_COLOR = "#333", "#c00", "#eef3f8", "white"


def draw_svg(seats: Sequence[Placement]) -> str:
    """Return the picture; what differs from the commonest kind of node is red.

    Raises ImportError if drawsvg is not installed.
    """
    import drawsvg

    groups = group_alike_nodes(group_by_node(seats).values())
    usual = groups[0][0]
    width = GAP + CELLS_ACROSS * (CELL_W + GAP)
    heights = [HEAD_H + -(-len(group[0]) // CELLS_ACROSS) * (CELL_H + GAP) for group in groups]
    picture = drawsvg.Drawing(width + 2 * GAP, sum(heights) + GAP * (len(groups) + 1), font_family="sans-serif")
    picture.append(drawsvg.Rectangle(0, 0, picture.width, picture.height, fill=PAPER_COLOR))
    top = GAP
    for group, height in zip(groups, heights, strict=True):
        odd = group is not groups[0]
        picture.append(drawsvg.Rectangle(GAP, top, width, height, fill="none", stroke=OUTLIER_COLOR if odd
                                         else PLAIN_COLOR))
        title = fold_node_names(group) + (f" ({len(group):,} nodes)" if len(group) > 1 else "")
        picture.append(drawsvg.Text(title, 14, 2 * GAP, top + 17, fill=OUTLIER_COLOR if odd else PLAIN_COLOR))
        for local, seat in enumerate(group[0]):
            left, down = GAP + GAP + local % CELLS_ACROSS * (CELL_W + GAP), top + HEAD_H + local // CELLS_ACROSS * (CELL_H + GAP)
            picture.append(drawsvg.Rectangle(left, down, CELL_W, CELL_H, fill=FILL_COLOR, stroke=PLAIN_COLOR))
            peer = usual[local] if local < len(usual) else None
            name = f"local rank {local}" if len(group) > 1 else f"rank {seat.rank}"
            for line, (text, alike) in enumerate(list_cell_lines(name, seat, peer)):
                color = PLAIN_COLOR if alike else OUTLIER_COLOR
                picture.append(drawsvg.Text(text, 12, left + 6, down + 16 + line * LINE_H, fill=color))
        top += height + GAP
    return str(picture.as_svg())


def list_cell_lines(name: str, seat: Placement, peer: Placement | None) -> list[tuple[str, bool]]:
    """Return the lines of a rank's cell, and for each line whether it is the same for `peer`.

    `peer` sits in the same place on a node of the commonest kind. It is None if that node has fewer ranks:
    then no line is the same.
    """
    numa = f"NUMA {ranges(seat.numa)}, {seat.threads} thread{'s' * (seat.threads != 1)}"
    device = f"{seat.device} {shorten_model(seat.gpu)}".strip()
    return [
        (name, peer is not None),
        (f"{device}, {seat.interface or 'any interface'}", peer is not None and
         (seat.device, shorten_model(seat.gpu), seat.interface) == (peer.device, shorten_model(peer.gpu),
                                                                    peer.interface)),
        (f"CPUs {ranges(seat.cpus)}", peer is not None and seat.cpus == peer.cpus),
        (numa, peer is not None and (seat.numa, seat.threads) == (peer.numa, peer.threads)),
    ]
