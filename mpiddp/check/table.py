"""The table of a check: alike nodes in one row, odd ones first, the all-reduce, and what was found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from ..base.text import fold_hosts, format_ranges
from .stats.expected import expected_bandwidth, reduced
from .stats.outliers import best, median
from .stats.schema import (
    LINK_METRICS,
    RANK_METRICS,
    RATES,
    SIZES,
    Finding,
    Link,
    Measurements,
    Nodes,
    Passes,
    counted,
    in_words,
)

TALLEST, WIDEST = 39, 120  # lines, columns; a line comes before
MOST_ODD, MOST_KINDS, MOST_NOTES, MOST_SIZES = 10, 4, 4, 8
RANKS_WIDTH, LEAST_HOSTS = 11, 12
MOST_NOTE_LINES = 7
OF_ONE = ("rank", "link")  # subjects whose figure is lost in their node's median
TIMES = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))

# Over the column, its head, the metrics of which the least is shown, and others that mark it.
HEADS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("matrix", "product", ("matrix",), ()),
    ("memory", "host", ("memory",), ()),
    ("", "device", ("device-memory",), ()),
    ("copies", "slower", ("to-device", "from-device"), ()),
    ("/dev/shm", "write", ("shm-write",), ()),  # noqa: S108 — a head, no path
    ("", "free", ("shm-free",), ("shm-size",)),
    ("/tmp", "write", ("tmp-write",), ()),  # noqa: S108 — a head, no path
    ("", "free", ("tmp-free",), ()),
)
EXCLUDE = "--exclude={}"  # as mpiddp.supervise takes it, and Slurm


class Column(NamedTuple):
    """A column of numbers: what stands over it, its head, its unit, and the values that each node has.

    `more` tells whether more is better. `marked` are the nodes that are odd in it, each with whether its worst value is
    shown in the place of the median.
    """

    top: str
    head: str
    unit: str
    more: bool
    values: dict[int, list[float]]
    marked: dict[int, bool]


class Row(NamedTuple):
    """A row: its nodes, and whether they are odd."""

    nodes: list[int]
    odd: bool


def lines(
    measured: Measurements, findings: Sequence[Finding], notes: Sequence[str], exclude: str = EXCLUDE
) -> list[str]:
    """Return the table, the all-reduce where one was measured, the findings, the notes, and whom to leave out.

    `exclude` is the option that leaves hosts out of a job, with {} for their names.

    There are TALLEST lines of WIDEST characters at most, whatever the number of nodes; what has no place is counted.
    """
    nodes = Nodes(measured.ranks)
    head = [title(measured, nodes), "", *table(measured, findings, nodes), ""]
    curve = [*all_reduce(measured), ""] if measured.allreduce else []
    told = [line for note in bounded(notes, MOST_NOTES, "note") for line in wrap(note, WIDEST, subsequent_indent="  ")]
    left_out = leave_out(findings, exclude, len(nodes.ranks))
    room = TALLEST - len(head) - len(curve) - len(told[:MOST_NOTE_LINES]) - len(left_out)
    found = bounded([one.words for one in findings], room, "finding") or ["nothing odd"]
    return [cut(line.rstrip()) for line in (*head, *curve, *found, *told[:MOST_NOTE_LINES], *left_out)]


def title(measured: Measurements, nodes: Nodes) -> str:
    """Return how many nodes and ranks there are, and of which kinds, by letters if there are several."""
    letters = kinds(measured)
    named = [f"{letter} is {kind}" if len(letters) > 1 else kind for kind, letter in letters.items()]
    count = f"{counted(len(nodes.ranks), 'node')}, {counted(len(measured.ranks), 'rank')}"
    return f"{count}: {', '.join(named)}" if any(named) else count


def kinds(measured: Measurements) -> dict[str, str]:
    """Return the kinds of the ranks in their order, each with a letter; those after the 25th share the last."""
    found = dict.fromkeys(who.kind for who in measured.ranks)
    return {kind: chr(ord("A") + min(at, 25)) for at, kind in enumerate(found)}


def table(measured: Measurements, findings: Sequence[Finding], nodes: Nodes) -> list[str]:
    """Return three lines of head, a line for each odd node and each kind of alike ones, and what has no line."""
    shown, rest = rows(findings, nodes)
    columns = columns_of(measured, findings)
    right = [numbers(column, [row.nodes for row in shown]) for column in columns]
    room = WIDEST - sum(len(cells[0]) + 1 for cells in right)
    left = names(measured, nodes, shown, {node for column in columns for node in column.marked}, room)
    top = " " * sum(len(cells[0]) + 1 for cells in left) + over(columns, right)
    return [top, *(" ".join(cells) for cells in zip(*left, *right, strict=True)), *rest]


def rows(findings: Sequence[Finding], nodes: Nodes) -> tuple[list[Row], list[str]]:
    """Return the rows, odd nodes first, in the order of the findings, and lines of what has none.

    Nodes that a switch alone makes odd share a row, and so do those that are in no finding, if they have as many ranks
    of the same kinds.
    """
    about: dict[int, list[int]] = {}
    for at, one in enumerate(findings):
        for node in one.nodes:
            about.setdefault(node, []).append(at)
    odd: dict[tuple[int, ...], list[int]] = {}
    for node, found in about.items():
        alone = any(findings[at].subject != "switch" for at in found)
        odd.setdefault((-1, node) if alone else tuple(found), []).append(node)
    alike: dict[tuple[str, ...], list[int]] = {}
    for node, kind in nodes.kind.items():
        if node not in about:
            alike.setdefault(kind, []).append(node)
    first, usual = list(odd.values()), sorted(alike.values(), key=len, reverse=True)
    hidden = sum(map(len, first[MOST_ODD:])), sum(map(len, usual[MOST_KINDS:]))
    rest = [f"and {counted(hidden[0], 'odd node')} more"] if hidden[0] else []
    rest += [f"and {counted(hidden[1], 'node')} of other kinds"] if hidden[1] else []
    return [*(Row(some, True) for some in first[:MOST_ODD]), *(Row(some, False) for some in usual[:MOST_KINDS])], rest


def columns_of(measured: Measurements, findings: Sequence[Finding]) -> list[Column]:
    """Return the columns of what was measured."""
    return [column for column in (*of_ranks(measured, findings), *of_links(measured, findings)) if column.values]


def of_ranks(measured: Measurements, findings: Sequence[Finding]) -> Iterable[Column]:
    """Return the columns of what ranks measure themselves."""
    for top, head, shown, others in HEADS:
        values: dict[int, list[float]] = {}
        for rank, who in enumerate(measured.ranks):
            some = [best(RANK_METRICS[name], measured.own[name][rank]) for name in shown
                    if measured.own.get(name, {}).get(rank)]
            if some:
                values.setdefault(who.node, []).append(min(some))
        marked = marks((one, one.nodes) for one in findings if one.metric in (*shown, *others))
        yield Column(top, head, RANK_METRICS[shown[0]].unit, True, values, marked)


def of_links(measured: Measurements, findings: Sequence[Finding]) -> Iterable[Column]:
    """Return the columns of the links between nodes; if there are none, that of those inside of nodes."""
    words, links = LINK_METRICS["large"].words, measured.links.get("large", {})
    between = [one for one in findings if one.links]
    for top, head, end in ((words, "sends", 0), ("", "receives", 1)):
        marked = marks((one, {link[end] for link in one.links}.intersection(one.nodes)) for one in between
                       if one.metric != "latency")
        yield Column(top, head, "B/s", True, at_end("large", links, end), marked)
    slow = marks((one, one.nodes) for one in between if one.metric == "latency")
    yield Column("", "latency", "s", False, at_end("latency", measured.links.get("latency", {}), 0), slow)
    if not links:
        within: dict[int, list[float]] = {}
        for (one, _), passes in measured.inside.get("large", {}).items():
            within.setdefault(measured.ranks[one].node, []).append(max(passes))
        inside = marks((one, one.nodes) for one in findings if one.metric in LINK_METRICS and not one.links)
        yield Column("inside", words, "B/s", True, within, inside)


def at_end(name: str, links: Mapping[Link, Passes], end: int) -> dict[int, list[float]]:
    """Return the best passes of the links at each node, which is their first (0) or second (1) end."""
    found: dict[int, list[float]] = {}
    for link, passes in links.items():
        found.setdefault(link[end], []).append(best(LINK_METRICS[name], passes))
    return found


def marks(odd: Iterable[tuple[Finding, Iterable[int]]]) -> dict[int, bool]:
    """Return nodes that are odd in a column, each with whether it is so by one of its ranks or links only."""
    found: dict[int, bool] = {}
    for one, nodes in odd:
        for node in nodes:
            found[node] = found.get(node, True) and one.subject in OF_ONE
    return found


def names(
    measured: Measurements, nodes: Nodes, shown: Sequence[Row], marked: Collection[int], room: int
) -> list[list[str]]:
    """Return the columns of hosts, ranks and kinds, which share `room`; a host that no cell marks is marked itself."""
    letters = kinds(measured)
    hosts, which, of = ["", "hosts"], ["", "ranks"], ["", "kind"]
    for row in shown:
        ranks = [rank for node in row.nodes for rank in nodes.ranks[node]]
        numbered = format_ranges(ranks)
        which.append(numbered if len(numbered) <= RANKS_WIDTH else counted(len(ranks), "rank"))
        of.append(cut("+".join(sorted({letters[measured.ranks[rank].kind] for rank in ranks})), 4))
        lonely = row.odd and not any(node in marked for node in row.nodes)
        hosts.append(fold_hosts(nodes.host[node] for node in row.nodes) + "*" * lonely)
    columns = [hosts, which, *([of] if len(letters) > 1 else [])]
    left = room - sum(max(map(len, column)) + 2 for column in columns[1:]) - 2
    columns[0] = [*hosts[:2], *(fitting(one, row, max(left, LEAST_HOSTS))
                                for one, row in zip(hosts[2:], shown, strict=True))]
    return [[one.ljust(max(map(len, column)) + 1) for one in (column[1], column[0], *column[2:])] for column in columns]


def fitting(hosts: str, row: Row, most: int) -> str:
    """Return a row's hosts in `most` characters: alike ones counted, of an odd one the end, which has its number."""
    if len(hosts) <= most:
        return hosts
    return "…" + hosts[1 - most:] if row.odd else counted(len(row.nodes), "other")


def numbers(column: Column, groups: Sequence[Sequence[int]]) -> list[str]:
    """Return a column: its head, its unit, and for each group of nodes the median, or the worst of an odd one."""
    worst = min if column.more else max
    found: list[float | None] = []
    for nodes in groups:
        values = [value for node in nodes for value in column.values.get(node, ())]
        pick = worst if any(column.marked.get(node) for node in nodes) else median
        found.append(pick(values) if values else None)
    factor, unit = scale([value for value in found if value is not None], column.unit)
    texts = ["-" if value is None else significant(value / factor) for value in found]
    behind = max((len(text.partition(".")[2]) for text in texts), default=0)
    spaces = [" " * (behind - len(text.partition(".")[2]) + (behind > 0 and "." not in text)) for text in texts]
    cells = [text + ("*" if any(node in column.marked for node in nodes) else " ") + space
             for text, space, nodes in zip(texts, spaces, groups, strict=True)]
    width = max(map(len, (column.head + " ", unit + " ", *cells)))
    return [one.rjust(width) for one in (column.head + " ", unit + " ", *cells)]


def scale(values: Sequence[float], unit: str) -> tuple[float, str]:
    """Return what to divide values by, and the unit that they have then: the median has three digits before the point.

    At most; bytes have steps of 1024, all else of 1000.
    """
    middle = abs(median(values)) if values else 0.0
    if unit == "s":
        return next(((factor, word) for factor, word in TIMES if middle < 999.5 * factor), TIMES[-1])
    step, words = (1024.0, SIZES) if unit == "B" else (1000.0, tuple(prefix + unit for prefix in RATES))
    at = next((at for at in range(len(words)) if middle < 999.5 * step**at), len(words) - 1)
    return step**at, words[at]


def significant(value: float) -> str:
    """Return a number with three significant digits: 0.0123, 1.20, 13.2, 312, 1,840."""
    rounded = float(f"{value:.3g}")
    size = abs(rounded)
    if size >= 1:
        return f"{rounded:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return f"{rounded:.3f}" if size >= 0.01 or not size else f"{rounded:.2g}"


def over(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> str:
    """Return the line over the heads: what stands over a column reaches over the next ones that have nothing there."""
    line = ""
    end = 0
    for column, some, after in zip(columns, cells, [*columns[1:], None], strict=False):
        end += len(some[0]) + 1
        free = after is not None and not after.top
        begin = end - 2 - (len(column.head) if free else max(len(column.head), len(column.top)))
        line = line.ljust(begin) + column.top if column.top else line
    return line


def all_reduce(measured: Measurements) -> list[str]:
    """Return the all-reduce by size: its time, its bus bandwidth, and what the links let one expect of a large one."""
    found = reduced(measured)
    picked = sorted({round(at * (len(found) - 1) / (MOST_SIZES - 1)) for at in range(MOST_SIZES)})
    some = [found[at] for at in picked]
    expected = expected_bandwidth(measured)
    factor, unit = scale([max(one.bus for one in some)], "B/s")
    per, time = scale([max(one.seconds for one in some)], "s")
    table = [["all-reduce", *(in_words(one.size, "B").replace(".0 ", " ") for one in some), "expected"],
             [f"time ({time})", *(significant(one.seconds / per) for one in some), ""],
             [f"bus bandwidth ({unit})", *(significant(one.bus / factor) for one in some),
              "-" if expected is None else significant(expected / factor)]]
    first = max(len(cells[0]) for cells in table)
    return ["  ".join([cells[0].ljust(first), *(cell.rjust(8) for cell in cells[1:])]) for cells in table]


def leave_out(findings: Sequence[Finding], exclude: str, nodes: int) -> list[str]:
    """Return the line with the option that leaves hosts out; none if no host is to be left out, or all `nodes` were."""
    from ClusterShell.NodeSet import NodeSet  # heavy, and needed only here

    hosts = NodeSet.fromlist(sorted({host for one in findings for host in one.hosts}))
    line = f"leave out: {exclude.format(hosts)}"
    if len(line) > WIDEST:
        line = f"leave out: {counted(len(hosts), 'host')}, too many for a line; --suspects FILE lists them"
    return [line] if 0 < len(hosts) < nodes else []


def bounded(texts: Sequence[str], most: int, one: str) -> list[str]:
    """Return `most` texts at most; where there are more, the last one says how many have no place."""
    shown = texts if len(texts) <= most else texts[:most - 1]
    return [*shown, *([f"and {counted(len(texts) - len(shown), one)} more"] if len(shown) < len(texts) else [])]


def cut(text: str, most: int = WIDEST) -> str:
    """Return a text without its end if it is longer than `most` characters."""
    return text if len(text) <= most else text[:most - 1] + "…"
