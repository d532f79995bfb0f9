"""The start line and the map of a job, which shows where each rank runs: a table, records for tools, a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence

from ..base.config import LaunchConfig
from ..base.files import write_file, write_json
from ..base.ranks import JobEnv
from ..base.stderr import print_answer, write_line
from ..base.text import fold_hosts, format_address, format_columns, format_ranges
from ..base.version import __version__
from ..discovery.gpus import Gpu
from ..discovery.schedulers import find_job
from ..planning.job import Placement
from ..systems.statuses import EXIT_USAGE

HEADER = ("host", "ranks", "device", "cores", "numa", "threads", "interface")
WIDTHS = (20, 11, 22, 13, 4, 7, 9)  # the most characters of each column, 100 in all
BRANDS = ("AMD", "Data", "GeForce", "Graphics", "Instinct", "Intel(R)", "Max", "NVIDIA", "Quadro", "RTX", "Tesla")
MAX_ROWS = 10  # nodes of further kinds are only counted


def print_start(
    env: JobEnv, run_id: str, placements: Sequence[Placement], config: LaunchConfig, log_folder: str,
    show_text: Callable[[str], object],
) -> None:
    """Print the start line and the map unless `quiet` is set, and write the map to `map_file` if it is set.

    `run_id` is shown if no scheduler has given the job a number. `log_folder` is empty if there are no logs.
    `show_text` prints on the terminal.
    """
    nodes = "1 node" if env.num_nodes == 1 else f"{env.num_nodes} nodes"
    ranks = "1 rank" if env.world_size == 1 else f"{env.world_size} ranks"
    if not config.quiet:
        start = (f"mpiddp {__version__}: {ranks} on {nodes}, {env.backend} on {env.device.type}, "
                 f"tcp://{format_address(env.master_addr, env.master_port)}")
        if not find_job(os.environ)[0]:
            start += f", job {run_id}"  # by this name `mpiddp.where` finds it
        logs = [f"  logs in {log_folder}"] if log_folder else []
        show_text("\n".join([start, *format_map(placements), *logs]))
    write_map(placements, config.map_file)


def print_explanation(describe: Callable[[], str], env: JobEnv, rank: int) -> int:
    """Print on one rank its software and the sources of its variables, and return the exit status."""
    if rank >= env.world_size:
        if env.rank == 0:
            write_line(f"mpiddp: --explain {rank}: the job has ranks 0 to {env.world_size - 1}")
        return EXIT_USAGE
    return print_answer(describe()) if env.rank == rank else 0


def write_map(placements: Sequence[Placement], file: str) -> None:
    """Write the map to a file, as records or as a picture, by the file's suffix; nothing if the name is empty."""
    if file.endswith(".json"):
        write_json(file, list_records(placements))
    elif file:
        try:
            write_file(file, draw_svg(placements))
        except ImportError as error:
            write_line(f"mpiddp: cannot draw {file}: {error} (pip install drawsvg)")


def list_records(placements: Sequence[Placement]) -> list[dict[str, object]]:
    """Return the map as plain records, in rank order."""
    return [{"rank": rank.rank, "host": rank.host, "node": rank.node, "device": rank.device,
             "gpu": rank.gpu._asdict() if rank.gpu else None, "cpus": sorted(rank.cpus), "numa": list(rank.numa),
             "threads": rank.threads, "interface": rank.interface, "pid": rank.pid} for rank in placements]


def format_map(placements: Sequence[Placement]) -> list[str]:
    """Return the map as a table; `placements` are in rank order.

    If the job has a single node and few ranks, each rank has a line. Otherwise nodes that look alike share a line. The
    commonest kind comes first, so that the others stand out.
    """
    nodes = group_by_node(placements)
    if len(nodes) == 1 and len(placements) <= MAX_ROWS:
        rows = [format_row([[rank]]) for rank in placements]
    else:
        groups = group_alike_nodes(nodes.values())
        rows = [format_row(group) for group in groups[:MAX_ROWS]]
        if rest := groups[MAX_ROWS:]:
            rows.append((f"and {sum(map(len, rest)):,} more", "", "", "", "", "", ""))
    return format_columns([HEADER, *rows], WIDTHS)


def group_by_node(placements: Iterable[Placement]) -> dict[int, list[Placement]]:
    """Return the placements on each node."""
    nodes: dict[int, list[Placement]] = {}
    for rank in placements:
        nodes.setdefault(rank.node, []).append(rank)
    return nodes


def group_alike_nodes(nodes: Iterable[list[Placement]]) -> list[list[list[Placement]]]:
    """Return groups of nodes that look alike, the largest first."""
    groups: dict[tuple[object, ...], list[list[Placement]]] = {}
    for node in nodes:
        kind = tuple((rank.device, shorten_model(rank.gpu), rank.cpus, rank.numa, rank.threads, rank.interface)
                     for rank in node)
        groups.setdefault(kind, []).append(node)
    return sorted(groups.values(), key=len, reverse=True)


def format_row(nodes: Sequence[Sequence[Placement]]) -> tuple[str, ...]:
    """Return the cells for nodes that look alike."""
    first = nodes[0]
    ranks = format_ranges(rank.rank for node in nodes for rank in node)
    cores = f"{'core ' * (len(first[0].cpus) == 1)}{format_ranges(first[0].cpus)}"  # 0 alone would look like none
    return (
        fold_node_names(nodes), ranks if len(ranks) <= WIDTHS[1] else f"{len(first)} each",
        describe_devices(first, with_uuid=len(nodes) == 1),
        cores if len(first) == 1 else f"{format_bounds({len(rank.cpus) for rank in first})} each",
        format_ranges(number for rank in first for number in rank.numa),
        format_bounds({rank.threads for rank in first}),
        ",".join(dict.fromkeys(rank.interface or "-" for rank in first)),
    )


def fold_node_names(nodes: Sequence[Sequence[Placement]]) -> str:
    """Return the names of nodes, folded if there are several."""
    return fold_hosts(node[0].host for node in nodes) if len(nodes) > 1 else nodes[0][0].host


def describe_devices(node: Sequence[Placement], with_uuid: bool) -> str:
    """Return the devices of a node's ranks and their models; `with_uuid` adds the beginning of a single GPU's UUID."""
    words = [fold_devices([rank.device for rank in node]), *dict.fromkeys(shorten_model(rank.gpu) for rank in node)]
    if with_uuid and len(node) == 1 and node[0].gpu:
        words.append(node[0].gpu.uuid.removeprefix("GPU-").removeprefix("MIG-")[:8])
    return " ".join(filter(None, words))


def shorten_model(gpu: Gpu | None) -> str:
    """Return a GPU's model in a word: H100, or 1g.5gb for a MIG instance."""
    if gpu is None:
        return ""
    words = [word for word in gpu.name.split() if word not in BRANDS]
    return next(iter(words[-1:] if gpu.is_slice else words), "").partition("-")[0]


def fold_devices(names: Sequence[str]) -> str:
    """Return devices such as cuda:0, cuda:1 as cuda:0-1."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        kind, _, number = name.partition(":")
        numbers.setdefault(kind, []).extend([int(number)] if number else [])
    return ",".join(f"{kind}:{format_ranges(indices)}" if indices else kind for kind, indices in numbers.items())


def format_bounds(numbers: Collection[int]) -> str:
    """Return the smallest and the largest number, or one number if they are equal."""
    return "-".join(map(str, sorted({min(numbers), max(numbers)})))


CELL_W, CELL_H, GAP, CELLS_ACROSS = 170, 74, 8, 4
LINE_H, HEAD_H = 15, 24
PLAIN_COLOR, OUTLIER_COLOR, FILL_COLOR, PAPER_COLOR = "#333", "#c00", "#eef3f8", "white"


def draw_svg(placements: Sequence[Placement]) -> str:
    """Return the picture; what differs from the commonest kind of node is red.

    Raises ImportError if drawsvg is not installed.
    """
    import drawsvg

    groups = group_alike_nodes(group_by_node(placements).values())
    usual = groups[0][0]
    width = GAP + CELLS_ACROSS * (CELL_W + GAP)
    heights = [HEAD_H + -(-len(group[0]) // CELLS_ACROSS) * (CELL_H + GAP) for group in groups]
    picture = drawsvg.Drawing(width + 2 * GAP, sum(heights) + GAP * (len(groups) + 1), font_family="sans-serif")
    picture.append(drawsvg.Rectangle(0, 0, picture.width, picture.height, fill=PAPER_COLOR))
    top = GAP
    for group, height in zip(groups, heights, strict=True):
        color = PLAIN_COLOR if group is groups[0] else OUTLIER_COLOR
        picture.append(drawsvg.Rectangle(GAP, top, width, height, fill="none", stroke=color))
        title = fold_node_names(group) + (f" ({len(group):,} nodes)" if len(group) > 1 else "")
        picture.append(drawsvg.Text(title, 14, 2 * GAP, top + 17, fill=color))
        for local, rank in enumerate(group[0]):
            row, column = divmod(local, CELLS_ACROSS)
            left, down = 2 * GAP + column * (CELL_W + GAP), top + HEAD_H + row * (CELL_H + GAP)
            picture.append(drawsvg.Rectangle(left, down, CELL_W, CELL_H, fill=FILL_COLOR, stroke=PLAIN_COLOR))
            peer = usual[local] if local < len(usual) else None
            name = f"local rank {local}" if len(group) > 1 else f"rank {rank.rank}"
            for line, (text, is_usual) in enumerate(list_cell_lines(name, rank, peer)):
                color = PLAIN_COLOR if is_usual else OUTLIER_COLOR
                picture.append(drawsvg.Text(text, 12, left + 6, down + 16 + line * LINE_H, fill=color))
        top += height + GAP
    return str(picture.as_svg())


def list_cell_lines(name: str, rank: Placement, peer: Placement | None) -> list[tuple[str, bool]]:
    """Return the lines of a rank's cell, and for each line whether `peer` has the same.

    `peer` has the same local rank on a node of the commonest kind, None if that node has fewer ranks.
    """
    def format_lines(rank: Placement) -> list[str]:
        return [f"{f'{rank.device} {shorten_model(rank.gpu)}'.strip()}, {rank.interface or 'any interface'}",
                f"CPUs {format_ranges(rank.cpus)}",
                f"NUMA {format_ranges(rank.numa)}, {rank.threads} thread{'s' * (rank.threads != 1)}"]

    lines = format_lines(rank)
    peer_lines = format_lines(peer) if peer else [""] * len(lines)
    return [(name, peer is not None),
            *((line, line == peer_line) for line, peer_line in zip(lines, peer_lines, strict=True))]
