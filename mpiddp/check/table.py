"""The printed result of a check: a table with outliers first and similar nodes in one row; findings; notes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

from ..base.text import fold_hosts, format_ranges
from .stats.findings import allreduce_results
from .stats.link_findings import Role, expected_bandwidth
from .stats.outliers import best, median
from .stats.schema import (
    BANDWIDTH,
    LATENCY,
    LINK_METRICS,
    RANK_METRICS,
    CheckFinding,
    Link,
    Measurements,
    Nodes,
    Passes,
    Subject,
    group_pairs,
)
from .stats.text import count_text, format_size, limit_lines, multiples, three_digits

MAX_LINES, MAX_WIDTH = 39, 120  # with the line of versions above, this fits a terminal of 40 lines
MAX_OUTLIER_ROWS, MAX_KIND_ROWS, MAX_NOTES, MAX_NOTE_LINES, MAX_SIZES = 10, 4, 4, 7, 8
MAX_RANKS_WIDTH, MIN_HOSTS_WIDTH, MAX_KINDS_WIDTH = 11, 12, 4
TIME_UNITS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
EXCLUDE = "--exclude={}"  # as mpiddp.supervise takes it, and Slurm

# Group, head, metrics (the lowest is shown), other metrics with findings that mark the column.
RANK_COLUMNS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("matrix", "product", ("matrix",), ()),
    ("memory", "host", ("memory",), ()),
    ("", "device", ("device-memory",), ()),
    ("copies", "slower", ("to-device", "from-device"), ()),
    ("/dev/shm", "write", ("shm-write",), ()),  # noqa: S108 (no path)
    ("", "free", ("shm-free",), ("shm-size",)),
    ("/tmp", "write", ("tmp-write",), ()),  # noqa: S108 (no path)
    ("", "free", ("tmp-free",), ()),
)


class Column(NamedTuple):
    """A column of numbers, with the values of each node; the name of its `group` is printed above it.

    `marked` are the nodes with a finding here; True if it is about a single rank or link: the node's worst value, which
    belongs to it, is then shown instead of the median.
    """

    group: str
    head: str
    unit: str
    higher_is_better: bool
    values: dict[int, list[float]]
    marked: dict[int, bool]


Row = tuple[list[int], bool]  # similar nodes, and whether they have findings


def render(
    measured: Measurements, findings: Sequence[CheckFinding], notes: Sequence[str], exclude: str = EXCLUDE
) -> list[str]:
    """Return the lines of a check: the table, the all-reduce, the findings, the notes, and the hosts to exclude.

    `exclude` is the scheduler's option, with {} for the hosts. There are at most MAX_LINES lines of MAX_WIDTH
    characters, for any number of nodes; omitted items are counted.
    """
    nodes = Nodes(measured.ranks)
    top = [_title(measured, nodes), "", *_node_table(measured, findings, nodes), ""]
    curve = [*_allreduce_table(measured), ""] if measured.allreduce else []
    note_lines = [line for note in limit_lines(notes, MAX_NOTES, "note")
                  for line in wrap(note, MAX_WIDTH, subsequent_indent="  ")][:MAX_NOTE_LINES]
    last = _exclude_line(findings, exclude, len(nodes.ranks))
    room = MAX_LINES - len(top) - len(curve) - len(note_lines) - len(last)
    texts = limit_lines([finding.text for finding in findings], room, "finding") or ["no findings"]
    return [cut(line.rstrip()) for line in (*top, *curve, *texts, *note_lines, *last)]


def _title(measured: Measurements, nodes: Nodes) -> str:
    letters = _kind_letters(measured)
    kinds = [f"{letter} is {kind}" if len(letters) > 1 else kind for kind, letter in letters.items()]
    count = f"{count_text(len(nodes.ranks), 'node')}, {count_text(len(measured.ranks), 'rank')}"
    return f"{count}: {', '.join(kinds)}" if any(kinds) else count


def _kind_letters(measured: Measurements) -> dict[str, str]:
    """Return a letter for each kind of ranks; all kinds after the 25th share the last."""
    kinds = dict.fromkeys(info.kind for info in measured.ranks)
    return {kind: chr(ord("A") + min(number, 25)) for number, kind in enumerate(kinds)}


def _node_table(measured: Measurements, findings: Sequence[CheckFinding], nodes: Nodes) -> list[str]:
    """Return three head lines, the rows, and lines that count the nodes without a row."""
    rows, hidden = _make_rows(findings, nodes)
    columns = [column for column in (*_rank_columns(measured, findings), *_link_columns(measured, findings))
               if column.values]
    right = [_number_cells(column, rows) for column in columns]
    room = MAX_WIDTH - sum(len(cells[0]) + 1 for cells in right)
    left = _name_cells(measured, nodes, rows, {node for column in columns for node in column.marked}, room)
    groups = " " * sum(len(cells[0]) + 1 for cells in left) + _group_line(columns, [len(cells[0]) for cells in right])
    return [groups, *(" ".join(cells) for cells in zip(*left, *right, strict=True)), *hidden]


def _make_rows(findings: Sequence[CheckFinding], nodes: Nodes) -> tuple[list[Row], list[str]]:
    """Return the rows, nodes with findings first, in the order of the findings, and lines that count hidden nodes.

    Nodes that only have findings of a switch share a row, and so do nodes without findings that have the same number of
    ranks of the same kinds.
    """
    findings_of = group_pairs((node, number) for number, finding in enumerate(findings) for node in finding.nodes)

    def shared_key(node: int) -> tuple[int, ...]:
        has_own = any(findings[number].subject != Subject.SWITCH for number in findings_of[node])
        return (-1, node) if has_own else tuple(findings_of[node])

    first = [*group_pairs((shared_key(node), node) for node in findings_of).values()]
    alike = group_pairs((kinds, node) for node, kinds in nodes.kinds.items() if node not in findings_of)
    others = sorted(alike.values(), key=len, reverse=True)
    hidden = []
    if count := sum(map(len, first[MAX_OUTLIER_ROWS:])):
        hidden.append(f"and {count_text(count, 'more node')} with findings")
    if count := sum(map(len, others[MAX_KIND_ROWS:])):
        hidden.append(f"and {count_text(count, 'node')} of other kinds")
    return [*((members, True) for members in first[:MAX_OUTLIER_ROWS]),
            *((members, False) for members in others[:MAX_KIND_ROWS])], hidden


def _rank_columns(measured: Measurements, findings: Sequence[CheckFinding]) -> Iterator[Column]:
    """Yield the columns of RANK_METRICS."""
    for group, head, metrics, others in RANK_COLUMNS:
        lowest = ((info.node, min((best(RANK_METRICS[name], measured.by_rank[name][rank]) for name in metrics
                                   if measured.by_rank.get(name, {}).get(rank)), default=None))
                  for rank, info in enumerate(measured.ranks))
        values = group_pairs((node, value) for node, value in lowest if value is not None)
        marked = marked_nodes((finding, finding.nodes) for finding in findings if finding.metric in (*metrics, *others))
        yield Column(group, head, RANK_METRICS[metrics[0]].unit, True, values, marked)


def _link_columns(measured: Measurements, findings: Sequence[CheckFinding]) -> Iterator[Column]:
    """Yield the columns of the links between nodes; without such links, the column of the links inside nodes."""
    label, links = LINK_METRICS[BANDWIDTH].label, measured.links.get(BANDWIDTH, {})
    between = [finding for finding in findings if finding.links]
    for group, role in ((label, Role.SENDS), ("", Role.RECEIVES)):
        marked = marked_nodes((finding, {link[role] for link in finding.links}.intersection(finding.nodes))
                              for finding in between if finding.metric != LATENCY)
        yield Column(group, role.name.lower(), "B/s", True, bests_by_node(BANDWIDTH, links, role), marked)
    marked = marked_nodes((finding, finding.nodes) for finding in between if finding.metric == LATENCY)
    yield Column("", "latency", "s", False, bests_by_node(LATENCY, measured.links.get(LATENCY, {}), Role.SENDS), marked)
    if not links:
        inside = group_pairs((measured.ranks[rank].node, max(passes))
                             for (rank, _), passes in measured.inside_links.get(BANDWIDTH, {}).items())
        marked = marked_nodes((finding, finding.nodes) for finding in findings
                              if finding.metric in LINK_METRICS and not finding.links)
        yield Column("inside", label, "B/s", True, inside, marked)


def bests_by_node(name: str, links: Mapping[Link, Passes], role: Role) -> dict[int, list[float]]:
    """Return the best passes of the links of each node in a role."""
    return group_pairs((link[role], best(LINK_METRICS[name], passes)) for link, passes in links.items())


def marked_nodes(affected: Iterable[tuple[CheckFinding, Iterable[int]]]) -> dict[int, bool]:
    """Return the nodes of findings; True if all findings of a node are about a single rank or link."""
    marked: dict[int, bool] = {}
    for finding, nodes in affected:
        for node in nodes:
            marked[node] = marked.get(node, True) and finding.subject in (Subject.RANK, Subject.LINK)
    return marked


def _name_cells(
    measured: Measurements, nodes: Nodes, rows: Sequence[Row], marked: Collection[int], room: int
) -> list[list[str]]:
    """Return the columns of hosts, ranks and kinds in `room` characters; a * marks hosts without a marked number."""
    letters = _kind_letters(measured)
    hosts, rank_cells, kind_cells = ["", "hosts"], ["", "ranks"], ["", "kind"]
    for members, has_findings in rows:
        ranks = [rank for node in members for rank in nodes.ranks[node]]
        numbers = format_ranges(ranks)
        rank_cells.append(numbers if len(numbers) <= MAX_RANKS_WIDTH else count_text(len(ranks), "rank"))
        kind_cells.append(cut("+".join(sorted({letters[measured.ranks[rank].kind] for rank in ranks})),
                              MAX_KINDS_WIDTH))
        is_unmarked = has_findings and not any(node in marked for node in members)
        hosts.append(fold_hosts(nodes.host[node] for node in members) + "*" * is_unmarked)
    columns = [hosts, rank_cells, *([kind_cells] if len(letters) > 1 else [])]
    width = max(MIN_HOSTS_WIDTH, room - 2 - sum(max(map(len, column)) + 2 for column in columns[1:]))
    for number, (members, has_findings) in enumerate(rows, 2):
        if len(hosts[number]) > width:  # the end of an outlier's name is shown: it has the number
            hosts[number] = "…" + hosts[number][1 - width:] if has_findings else count_text(len(members), "other")
    widths = [max(map(len, column)) + 1 for column in columns]
    return [[cell.ljust(width) for cell in (column[1], column[0], *column[2:])]
            for column, width in zip(columns, widths, strict=True)]


def _number_cells(column: Column, rows: Sequence[Row]) -> list[str]:
    """Return a column: its head, its unit, and for each row the median, or the worst value for a single outlier."""
    worst = min if column.higher_is_better else max
    values: list[float | None] = []
    for members, _ in rows:
        of_row = [value for node in members for value in column.values.get(node, ())]
        pick = worst if any(column.marked.get(node) for node in members) else median
        values.append(pick(of_row) if of_row else None)
    factor, unit = scale([value for value in values if value is not None], column.unit)
    texts = ["-" if value is None else three_digits(value / factor) for value in values]
    digits = max((len(text.partition(".")[2]) for text in texts), default=0)
    cells = [f"{column.head} ", f"{unit} "]
    for text, (members, _) in zip(texts, rows, strict=True):
        spaces = digits - len(text.partition(".")[2]) + (digits > 0 and "." not in text)  # align the points
        cells.append(text + ("*" if any(node in column.marked for node in members) else " ") + " " * spaces)
    return [cell.rjust(max(map(len, cells))) for cell in cells]


def _group_line(columns: Sequence[Column], widths: Sequence[int]) -> str:
    # a group's name extends over the following columns without a group
    line, end = "", 0
    for number, (column, width) in enumerate(zip(columns, widths, strict=True), 1):
        end += width + 1
        has_room = number < len(columns) and not columns[number].group
        start = end - 2 - (len(column.head) if has_room else max(len(column.head), len(column.group)))
        line = line.ljust(start) + column.group if column.group else line
    return line


def scale(values: Sequence[float], unit: str) -> tuple[float, str]:
    """Return a divisor for values and the resulting unit: the median then has at most three digits before the point."""
    middle = abs(median(values)) if values else 0.0
    if unit == "s":
        return next((scaled for scaled in TIME_UNITS if middle < 999.5 * scaled[0]), TIME_UNITS[-1])
    step, names = multiples(unit)
    power = next((power for power in range(len(names)) if middle < 999.5 * step**power), len(names) - 1)
    return step**power, names[power]


def _allreduce_table(measured: Measurements) -> list[str]:
    """Return the all-reduce by size: its time, its bus bandwidth, and the bus bandwidth that the links allow."""
    results = allreduce_results(measured)
    picked = sorted({round(number * (len(results) - 1) / (MAX_SIZES - 1)) for number in range(MAX_SIZES)})
    results = [results[number] for number in picked]
    expected = expected_bandwidth(measured)
    factor, unit = scale([max(result.bus_bandwidth for result in results)], "B/s")
    time_factor, time_unit = scale([max(result.time_s for result in results)], "s")
    table = [["all-reduce", *(format_size(result.size) for result in results), "expected"],
             [f"time ({time_unit})", *(three_digits(result.time_s / time_factor) for result in results), ""],
             [f"bus bandwidth ({unit})", *(three_digits(result.bus_bandwidth / factor) for result in results),
              "-" if expected is None else three_digits(expected / factor)]]
    width = max(len(row[0]) for row in table)
    return ["  ".join([row[0].ljust(width), *(cell.rjust(8) for cell in row[1:])]) for row in table]


def _exclude_line(findings: Sequence[CheckFinding], exclude: str, nodes: int) -> list[str]:
    """Return the line with the option that excludes hosts; nothing if there are none, or if no node would remain."""
    from ClusterShell.NodeSet import NodeSet  # heavy, and needed only here

    hosts = NodeSet.fromlist(sorted({host for finding in findings for host in finding.hosts}))
    line = f"exclude: {exclude.format(hosts)}"
    if len(line) > MAX_WIDTH:
        line = f"exclude: {count_text(len(hosts), 'host')}, too many for a line; --suspects FILE lists them"
    return [line] if 0 < len(hosts) < nodes else []


def cut(text: str, limit: int = MAX_WIDTH) -> str:
    """Return a text, cut if it is longer than `limit` characters."""
    return text if len(text) <= limit else text[:limit - 1] + "…"
