"""The picture of a check: a map of the bandwidth between nodes, the all-reduce by size, the first findings."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from ..base.files import open_for_writing
from .stats.findings import allreduce_results
from .stats.link_findings import Role, expected_bandwidth
from .stats.outliers import median
from .stats.schema import BANDWIDTH, LATENCY, LINK_METRICS, Finding, Measurements, Nodes
from .stats.text import count_text, format_size, limit_lines, three_digits
from .table import bests_by_node, cut, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

    Area = tuple[float, float, float, float]  # left, bottom, width, height, in inches

OUTLIER, CURVE_COLOR, NOT_MET, DIAGONAL, TEXT = "#d62728", "#1f5fa8", "#dddddd", "white", "#333333"
WIDTH, HEIGHT, DPI = 13.0, 7.6, 110  # inches; dots per inch of pixel graphics
SIDE, SIDE_POINTS = 5.4, 5.4 * 72  # of the map, in inches and in points
MAP: Area = (1.25, 1.15, SIDE, SIDE)
SENDS: Area = (1.25 + SIDE + 0.08, 1.15, 0.22, SIDE)
RECEIVES: Area = (1.25, 1.15 + SIDE + 0.08, SIDE, 0.22)
COLOR_BAR: Area = (1.25 + SIDE + 0.85, 1.15, 0.16, SIDE)
CURVE: Area = (9.0, 3.6, 3.7, 3.17)
FINDINGS: Area = (8.55, 0.3, 4.3, 2.6)
ALL_NAMED_MAX = 64  # nodes; with more, only outliers, the first and the last have names at the map
MAX_NAME = 14  # characters; the end is shown, because it has the number
NUMBERED_MAX = 10  # nodes; with more, the cells have no numbers
DENSE = 0.5  # share of measured links; below it, cells are enlarged
FONT_SIZE, MIN_CELL = 9.0, 3.2  # points
LINE_HEIGHT = 1.16  # times the font size


class Grid(NamedTuple):
    """The nodes' names, the bandwidth of the links by the nodes' positions, and the outliers of both."""

    names: list[str]
    links: dict[tuple[int, int], float]
    outliers: set[int]
    outlier_links: set[tuple[int, int]]


def write_picture(path: str, measured: Measurements, findings: Sequence[Finding], title: str) -> None:
    """Write the picture: as PNG or PDF by the suffix, else as SVG.

    Raises ImportError if matplotlib is not installed, OSError if the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    suffix = path.rpartition(".")[2].lower()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": FONT_SIZE, "font.family": "sans-serif"}):
        picture = Figure(figsize=(WIDTH, HEIGHT))
        picture.text(0.25 / WIDTH, 1 - 0.3 / HEIGHT, cut(title, 110), fontsize=13, va="center")
        _draw_map(picture, _make_grid(measured, findings))
        _draw_allreduce(_add_axes(picture, CURVE), measured)
        _draw_findings(_add_axes(picture, FINDINGS), findings)
        with open(open_for_writing(path), "wb") as file:
            picture.savefig(file, format=suffix if suffix in ("png", "pdf") else "svg", dpi=DPI)


def _add_axes(picture: Figure, area: Area) -> Axes:
    left, bottom, width, height = area
    return picture.add_axes((left / WIDTH, bottom / HEIGHT, width / WIDTH, height / HEIGHT))


def _make_grid(measured: Measurements, findings: Sequence[Finding]) -> Grid:
    """Return the grid of the nodes, or of the ranks of a single node."""
    nodes = Nodes(measured.ranks)
    if len(nodes.ranks) == 1:
        inside = {link: max(passes) for link, passes in measured.inside_links.get(BANDWIDTH, {}).items()}
        return Grid([f"rank {rank}" for rank in range(len(measured.ranks))], inside, set(), set())
    position = {node: number for number, node in enumerate(nodes.ranks)}
    links = {(position[sender], position[receiver]): max(passes)
             for (sender, receiver), passes in measured.links.get(BANDWIDTH, {}).items()}
    outlier_links = {(position[sender], position[receiver]) for finding in findings if finding.metric != LATENCY
                     for sender, receiver in finding.links}
    return Grid([nodes.name(node) for node in nodes.ranks], links,
                {position[node] for finding in findings for node in finding.nodes}, outlier_links)


def _draw_map(picture: Figure, grid: Grid) -> None:
    """Draw a row for each sender, a column for each receiver, and strips with their medians."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axes = _add_axes(picture, MAP)
    if not grid.links:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no links between ranks were measured", ha="center", transform=axes.transAxes)
        return
    factor, unit = scale(list(grid.links.values()), "B/s")
    grid = grid._replace(links={link: value / factor for link, value in grid.links.items()})
    shade, colors = Normalize(0, max(grid.links.values())), matplotlib.colormaps["viridis"]
    _draw_cells(axes, grid, shade, colors)
    _draw_strip(_add_axes(picture, SENDS), grid, Role.SENDS, shade, colors)
    picture.text((sum(SENDS[::2]) + 0.06) / WIDTH, (SENDS[1] + SIDE / 2) / HEIGHT, "sends", rotation=90, va="center")
    _draw_strip(_add_axes(picture, RECEIVES), grid, Role.RECEIVES, shade, colors)
    picture.text((RECEIVES[0] + SIDE / 2) / WIDTH, (sum(RECEIVES[1::2]) + 0.05) / HEIGHT, "receives", ha="center",
                 va="bottom")
    _draw_names(axes, grid)
    bar = _add_axes(picture, COLOR_BAR)
    picture.colorbar(ScalarMappable(shade, colors), cax=bar)
    bar.set_title(unit, fontsize=FONT_SIZE)
    has_gaps = len(grid.links) < len(grid.names) * (len(grid.names) - 1)
    legend = f"{LINK_METRICS[BANDWIDTH].label} from each row to each column; strips: medians; red: outliers"
    picture.text(MAP[0] / WIDTH, 0.12 / HEIGHT, legend + "; grey: not measured" * has_gaps, fontsize=8, color=TEXT)


def _draw_cells(axes: Axes, grid: Grid, shade: Normalize, colors: Colormap) -> None:
    """Draw a cell for each link, with an outline for outliers."""
    import numpy as np
    from matplotlib.collections import PatchCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    count = len(grid.names)
    point = count / SIDE_POINTS  # in cells
    is_dense = len(grid.links) >= DENSE * count * (count - 1)
    image = np.full((count, count, 4), to_rgba(NOT_MET))
    image[np.arange(count), np.arange(count)] = to_rgba(DIAGONAL)
    if is_dense:
        for link, value in grid.links.items():
            image[link] = colors(shade(value))
    axes.imshow(image, interpolation="nearest", aspect="auto")
    size = 1.0 if is_dense else max(1.0, MIN_CELL * point)
    for are_outliers in (False, True):
        links = [link for link in grid.links if (link in grid.outlier_links) is are_outliers]
        side = size * (1.0 if is_dense or not are_outliers else 1.6)
        boxes = [Rectangle((column - side / 2, row - side / 2), side, side) for row, column in links]
        if are_outliers or not is_dense:
            axes.add_collection(PatchCollection(
                boxes, facecolors="none" if is_dense else [colors(shade(grid.links[link])) for link in links],
                edgecolors=OUTLIER if are_outliers else "none",
                linewidths=min(1.8, max(0.5, 0.12 / point)) if are_outliers else 0,
                rasterized=count > ALL_NAMED_MAX, clip_on=not are_outliers), autolim=False)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5))
    for (row, column), value in grid.links.items() if count <= NUMBERED_MAX else ():
        is_dark = sum(colors(shade(value))[:3]) < 1.5
        axes.text(column, row, three_digits(value), ha="center", va="center", color="white" if is_dark else "black")


def _draw_strip(axes: Axes, grid: Grid, role: Role, shade: Normalize, colors: Colormap) -> None:
    import numpy as np
    from matplotlib.colors import to_rgba

    values = bests_by_node(BANDWIDTH, {link: [value] for link, value in grid.links.items()}, role)
    image = np.array([colors(shade(median(values[node]))) if node in values else to_rgba(NOT_MET)
                      for node in range(len(grid.names))])
    axes.imshow(image[:, None] if role == Role.SENDS else image[None], interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_names(axes: Axes, grid: Grid) -> None:
    """Write names beside rows and under columns, outliers in red; of many nodes only the first, the last and outliers.

    A name that would overlap the previous one is omitted; the findings have it.
    """
    count = len(grid.names)
    is_small = count <= ALL_NAMED_MAX
    size = min(FONT_SIZE, SIDE_POINTS / count / LINE_HEIGHT) if is_small else FONT_SIZE
    min_gap = 0.0 if is_small else size * LINE_HEIGHT * count / SIDE_POINTS  # in nodes
    named: list[int] = []
    for node in range(count) if is_small else sorted({*grid.outliers, 0, count - 1}):
        if not named or node - named[-1] >= min_gap:
            named.append(node)
    names = [grid.names[node] for node in named]
    names = [name if len(name) <= MAX_NAME else "…" + name[1 - MAX_NAME:] for name in names]
    axes.set_xticks(named, names, fontsize=size, rotation=90)
    axes.set_yticks(named, names, fontsize=size)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for node, label in zip(named, labels, strict=True):
            is_outlier = node in grid.outliers
            label.set(color=OUTLIER if is_outlier else TEXT, fontweight="bold" if is_outlier else "normal")


def _draw_allreduce(axes: Axes, measured: Measurements) -> None:
    """Draw the bus bandwidth of the all-reduce by its size, and the bus bandwidth that the links allow."""
    results = allreduce_results(measured)
    if not results:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no all-reduce was measured", ha="center", transform=axes.transAxes)
        return
    expected = expected_bandwidth(measured)
    factor, unit = scale([max(result.bus_bandwidth for result in results)], "B/s")
    sizes = [result.size for result in results]
    axes.plot(sizes, [result.bus_bandwidth / factor for result in results], "o-", color=CURVE_COLOR, label="measured")
    if expected is not None:
        axes.axhline(expected / factor, color=TEXT, linestyle="--", linewidth=1,
                     label=f"expected: {three_digits(expected / factor)} {unit}")
    axes.set_xscale("log", base=2)
    ticks = sizes[::-(-len(sizes) // 5)]
    axes.set_xticks(ticks, [format_size(size) for size in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"bus bandwidth ({unit})")
    axes.set_title(f"All-reduce over {count_text(len(measured.ranks), 'rank')}", fontsize=11)
    axes.grid(color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")


def _draw_findings(axes: Axes, findings: Sequence[Finding]) -> None:
    axes.set_axis_off()
    lines = [line for text in limit_lines([finding.text for finding in findings], 6, "finding")
             for line in wrap(text, 66, subsequent_indent="    ")][:11] or ["no findings"]
    axes.text(0, 1, "\n".join(lines), va="top", linespacing=1.5, color=OUTLIER if findings else TEXT)
