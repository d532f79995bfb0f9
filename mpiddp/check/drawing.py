"""The picture of a check: nodes by nodes with the bandwidth of each link as colour, and the all-reduce by size."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from ..base.files import open_for_writing
from .stats.expected import expected_bandwidth, reduced
from .stats.outliers import median
from .stats.schema import LINK_METRICS, Finding, Measurements, Nodes, counted, in_words
from .table import at_end, bounded, cut, scale, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

    Area = tuple[float, float, float, float]  # left, bottom, width, height, in inches

ODD, LINE, NEVER, EMPTY = "#d62728", "#1f5fa8", "#dddddd", "white"
WIDTH, HEIGHT, DPI = 13.0, 7.6, 110  # inches; dots per inch of what is drawn as pixels
SIDE = 5.4  # inches, of the map
MAP: Area = (1.25, 1.15, SIDE, SIDE)
SENDS: Area = (1.25 + SIDE + 0.08, 1.15, 0.22, SIDE)
RECEIVES: Area = (1.25, 1.15 + SIDE + 0.08, SIDE, 0.22)
BAR: Area = (1.25 + SIDE + 0.85, 1.15, 0.16, SIDE)
CURVE: Area = (9.0, 3.6, 3.7, 3.17)
TOLD: Area = (8.55, 0.3, 4.3, 2.6)
ALL_NAMED = 64  # so many nodes have all their names at the map; of more, the odd ones
LONGEST = 14  # characters of a name; its end has the number
WRITTEN = 10  # of so many nodes the cells have their numbers, too
DENSE = 0.5  # of the cells; where fewer have met, each is drawn larger than its cell
LETTER, DOT = 9.0, 3.2  # points: a name's height, the least side of a cell


class Grid(NamedTuple):
    """Who has met whom: names, the values of the links between them, the odd ones among both."""

    names: list[str]
    links: dict[tuple[int, int], float]
    odd: set[int]
    odd_links: set[tuple[int, int]]


def write(path: str, measured: Measurements, findings: Sequence[Finding], title: str) -> None:
    """Write the picture to a file: PNG or PDF where its suffix says so, else SVG.

    Raises ImportError if matplotlib is not installed, and OSError if the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    suffix = path.rpartition(".")[2].lower()
    form = suffix if suffix in ("png", "pdf") else "svg"
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": LETTER, "font.family": "sans-serif"}):
        picture = Figure(figsize=(WIDTH, HEIGHT))
        picture.text(0.25 / WIDTH, 1 - 0.3 / HEIGHT, cut(title, 110), fontsize=13, va="center")
        links(picture, grid(measured, findings), LINK_METRICS["large"].words)
        curve(axes_at(picture, CURVE), measured)
        tell(axes_at(picture, TOLD), findings)
        with open(open_for_writing(path), "wb") as file:
            picture.savefig(file, format=form, dpi=DPI)


def axes_at(picture: Figure, area: Area) -> Axes:
    """Return axes in a place of the picture."""
    left, bottom, width, height = area
    return picture.add_axes((left / WIDTH, bottom / HEIGHT, width / WIDTH, height / HEIGHT))


def grid(measured: Measurements, findings: Sequence[Finding]) -> Grid:
    """Return the nodes and the links between them; of a single node its ranks."""
    nodes = Nodes(measured.ranks)
    if len(nodes.ranks) == 1:
        inside = {link: max(passes) for link, passes in measured.inside.get("large", {}).items()}
        return Grid([f"rank {rank}" for rank in range(len(measured.ranks))], inside, set(), set())
    places = {node: at for at, node in enumerate(nodes.ranks)}
    seen = {(places[one], places[two]): max(passes)
            for (one, two), passes in measured.links.get("large", {}).items()}
    odd = {places[node] for one in findings for node in one.nodes}
    odd_links = {(places[one], places[two]) for found in findings if found.metric != "latency"
                for one, two in found.links}
    return Grid([nodes.name(node) for node in nodes.ranks], seen, odd, odd_links)


def links(picture: Figure, found: Grid, words: str) -> None:
    """Draw the map: a row for who sends, a column for who receives; the strips beside it have the median of each."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axes = axes_at(picture, MAP)
    if not found.links:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no links between ranks were measured", ha="center", transform=axes.transAxes)
        return
    factor, unit = scale(list(found.links.values()), "B/s")
    found = found._replace(links={link: value / factor for link, value in found.links.items()})
    shade, colours = Normalize(0, max(found.links.values())), matplotlib.colormaps["viridis"]
    cells(axes, found, shade, colours)
    for end, area, name in ((0, SENDS, "sends"), (1, RECEIVES, "receives")):
        strip(axes_at(picture, area), found, end, shade, colours)
        left, bottom, width, height = area
        if end:
            picture.text((left + width / 2) / WIDTH, (bottom + height + 0.05) / HEIGHT, name, ha="center", va="bottom")
        else:
            picture.text((left + width + 0.06) / WIDTH, (bottom + height / 2) / HEIGHT, name, rotation=90, va="center")
    label(axes, found)
    bar = axes_at(picture, BAR)
    picture.colorbar(ScalarMappable(shade, colours), cax=bar)
    bar.set_title(unit, fontsize=LETTER)
    many = len(found.links) < len(found.names) * (len(found.names) - 1)
    picture.text(MAP[0] / WIDTH, 0.12 / HEIGHT, f"{words} from each row to each column; strips: the median of each; "
                 f"red: odd{'; grey: have not met' if many else ''}", fontsize=8, color="#444")


def cells(axes: Axes, found: Grid, shade: Normalize, colours: Colormap) -> None:
    """Draw a cell for each link, that of an odd one outlined."""
    import numpy as np
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    count = len(found.names)
    point = count / (SIDE * 72)  # cells
    dense = len(found.links) >= DENSE * count * (count - 1)
    image = np.full((count, count, 4), rgba(NEVER))
    image[np.arange(count), np.arange(count)] = rgba(EMPTY)
    if dense:
        for link, value in found.links.items():
            image[link] = colours(shade(value))
    axes.imshow(image, interpolation="nearest", aspect="auto")
    side = 1.0 if dense else max(1.0, DOT * point)
    for odd in (False, True):
        some = [link for link in found.links if (link in found.odd_links) is odd and (odd or not dense)]
        wide = side * (1.0 if dense or not odd else 1.6)
        boxes = [Rectangle((two - wide / 2, one - wide / 2), wide, wide) for one, two in some]
        filled = [colours(shade(found.links[link])) for link in some]
        axes.add_collection(PatchCollection(
            boxes, facecolors="none" if dense else filled, edgecolors=ODD if odd else "none",
            linewidths=min(1.8, max(0.5, 0.12 / point)) if odd else 0, rasterized=count > ALL_NAMED, clip_on=not odd),
            autolim=False)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5))
    for (one, two), value in found.links.items() if count <= WRITTEN else ():
        dark = sum(colours(shade(value))[:3]) < 1.5
        axes.text(two, one, significant(value), ha="center", va="center", color="white" if dark else "black")


def rgba(colour: str) -> tuple[float, float, float, float]:
    """Return a colour as four numbers."""
    from matplotlib.colors import to_rgba

    return to_rgba(colour)


def strip(axes: Axes, found: Grid, end: int, shade: Normalize, colours: Colormap) -> None:
    """Draw the median of each node's links, of which it is that end."""
    import numpy as np

    medians = {node: median(values) for node, values in
               at_end("large", {link: [value] for link, value in found.links.items()}, end).items()}
    image = np.array([colours(shade(medians[node])) if node in medians else rgba(NEVER)
                      for node in range(len(found.names))])
    axes.imshow(image[:, None] if end == 0 else image[None], interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])


def label(axes: Axes, found: Grid) -> None:
    """Write names beside rows and under columns: of many nodes the first, the last and the odd ones; odd ones in red.

    Of odd neighbours whose names would overlap the first one has its name; the findings have all.
    """
    count = len(found.names)
    letter = min(LETTER, 0.86 * SIDE * 72 / count) if count <= ALL_NAMED else LETTER
    least = 0.0 if count <= ALL_NAMED else letter * 1.15 * count / (SIDE * 72)  # between two names, in nodes
    named: list[int] = []
    for node in range(count) if count <= ALL_NAMED else sorted({*found.odd, 0, count - 1}):
        if not named or node - named[-1] >= least:
            named.append(node)
    names = [name if len(name) <= LONGEST else "…" + name[1 - LONGEST:] for name in (found.names[at] for at in named)]
    axes.set_xticks(named, names, fontsize=letter, rotation=90)
    axes.set_yticks(named, names, fontsize=letter)
    for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
        for node, text in zip(named, ticks, strict=True):
            text.set(color=ODD if node in found.odd else "#333", fontweight="bold" if node in found.odd else "normal")


def curve(axes: Axes, measured: Measurements) -> None:
    """Draw the bus bandwidth of an all-reduce by its size, and what the links let one expect of a large one."""
    found = reduced(measured)
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no all-reduce was measured", ha="center", transform=axes.transAxes)
        return
    expected = expected_bandwidth(measured)
    factor, unit = scale([max(one.bus for one in found)], "B/s")
    sizes = [one.size for one in found]
    axes.plot(sizes, [one.bus / factor for one in found], "o-", color=LINE, label="measured")
    if expected is not None:
        axes.axhline(expected / factor, color="#444", linestyle="--", linewidth=1,
                     label=f"by the links: {significant(expected / factor)} {unit}")
    axes.set_xscale("log", base=2)
    ticks = sizes[::-(-len(sizes) // 5)]
    axes.set_xticks(ticks, [in_words(size, "B").replace(".0 ", " ") for size in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"bus bandwidth ({unit})")
    axes.set_title(f"All-reduce over {counted(len(measured.ranks), 'rank')}", fontsize=11)
    axes.grid(color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")


def tell(axes: Axes, findings: Sequence[Finding]) -> None:
    """Write the first findings."""
    axes.set_axis_off()
    lines = [line for words in bounded([one.words for one in findings], 6, "finding")
             for line in wrap(words, 66, subsequent_indent="    ")][:11] or ["nothing odd"]
    axes.text(0, 1, "\n".join(lines), va="top", linespacing=1.5, color=ODD if findings else "#333")
