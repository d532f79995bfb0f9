"""A snapshot of a job: a sample of each rank, the ranks at one location as a group; as JSON, a table, a drawing."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..base.text import find_runs, fold_hosts, format_ranges
from ..failure.stack import Frame

MAX_RANKS_WIDTH = 30  # characters
MAX_GROUPS = 200  # and findings, in JSON; a job with more gives no clear finding
NO_HOST_CHARACTER = re.compile(r"[^\w.:-]")
ROW_HEIGHT, GAP, LETTER_WIDTH = 40, 6, 7.2
PLAIN, OUTLIER, FILL, PAPER = "#333", "#c00", "#eef3f8", "white"


class Activity(enum.Enum):
    """What a rank does, as seen from outside. `--json` has the names."""

    LOST = "unreachable: the sentinel does not answer"
    GONE = "gone: its process has exited"
    STOPPED = "stopped by SIGSTOP or a debugger"
    KERNEL = "in uninterruptible sleep, usually I/O"
    SILENT = "silent: no stack received; try again"
    ENDED = "at the end of the script"
    COLLECTIVE = "waiting"
    BUSY = "busy"
    LOADER = "waiting for a DataLoader worker"
    ELSEWHERE = "sleeping"

    @property
    def is_held(self) -> bool:
        """Whether something outside the script prevents the rank from running."""
        return self in (Activity.LOST, Activity.GONE, Activity.STOPPED, Activity.KERNEL)

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks."""
        return self in (Activity.COLLECTIVE, Activity.ENDED)


class ChildProcess(NamedTuple):
    """A process forked by a rank, such as a DataLoader worker. Fields as in RankSample.

    `program` is the name of its program, empty if that is the rank's.
    """

    pid: int
    frames: tuple[Frame, ...] = ()
    state: str = ""
    wchan: str = ""
    program: str = ""
    native: str = ""


class CollectiveSeq(NamedTuple):
    """Torch's sequence number of a process group in a rank, with the group's ranks and name.

    NCCL counts only collectives; gloo also counts sends and receives.
    """

    number: int
    ranks: str
    name: str


class RankSample(NamedTuple):
    """The state of a rank, sampled by its sentinel."""

    rank: int
    host: str
    frames: tuple[Frame, ...] = ()  # the main thread's stack, outermost first; empty if none was received
    state: str = ""  # the letter in /proc/PID/stat; empty for a process that is gone
    wchan: str = ""  # the kernel function in which the main thread sleeps
    cores: float = 0.0  # share of a core that the main thread used or waited for, while it was sampled
    busy_s: float = 0.0  # CPU time of the rank and its descendants since they started; without the rank's if it `spins`
    moved_bytes: int = 0  # bytes they read, wrote, sent and received, except to the job's store and to the sentinel
    has_answered: bool = True  # whether the sentinel answered
    has_ended: bool = False  # whether the script has reached its end
    children: tuple[ChildProcess, ...] = ()
    steps: int = 0  # calls of mpiddp.should_stop()
    step_age_s: float = 0.0  # since the last one
    sequences: tuple[CollectiveSeq, ...] = ()
    spins: bool = False  # whether it busy-waits for its GPU
    faults: int = 0  # minor page faults of the rank and its descendants
    unseen: str = ""  # why the kernel does not show some of these figures; empty if it shows all
    native: str = ""  # why there are no frames while native code holds the GIL


class Location(NamedTuple):
    """Where ranks are: `line` is their stack in one line, `collective` the collective they wait in, or empty."""

    activity: Activity
    line: str
    collective: str = ""


class RankGroup(NamedTuple):
    """Ranks at one location; `sequence` is their common sequence number if they have one process group, else 0."""

    location: Location
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    is_outlier: bool = False
    sequence: int = 0


class Snapshot(NamedTuple):
    """Where the ranks of a job are: groups (outliers first, then small ones), and findings in sentences.

    `step` is the ranks' step in words; empty if the script counts none.
    """

    groups: tuple[RankGroup, ...]
    findings: tuple[str, ...]
    step: str = ""

    @property
    def outlier_group(self) -> RankGroup | None:
        """The first group of outliers, if there is one."""
        return self.groups[0] if self.groups and self.groups[0].is_outlier else None


def as_json(snapshot: Snapshot, threads: Mapping[int, str] = {}) -> str:
    """Return a snapshot as JSON, with the threads of ranks, by rank, as py-spy prints them.

    It has `step` in words, `findings`, `threads` by rank, and `groups`. A group has `at`, `place`, `collective`,
    `sequence` (null if unknown), `hosts`, `odd` (true for outliers) and `ranks`: first and last rank of each range.
    """
    groups = [{"at": activity.name.lower(), "place": line, "collective": collective, "ranks": find_runs(group.ranks),
               "hosts": group.hosts, "odd": group.is_outlier, "sequence": group.sequence or None}
              for group in snapshot.groups[:MAX_GROUPS] for activity, line, collective in [group.location]]
    return json.dumps({"step": snapshot.step, "findings": snapshot.findings[:MAX_GROUPS], "groups": groups,
                       "threads": {str(rank): text for rank, text in threads.items()}})


def from_json(text: str, world_size: int) -> Snapshot:
    """Return the snapshot of a job with `world_size` ranks from the output of as_json().

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError for anything else, before it allocates more
    than `text` and the job need.
    """
    fields = json.loads(text)
    groups, left = [], world_size
    for group in fields["groups"]:
        rows = [(parse_count(first), parse_count(last)) for first, last in group["ranks"]]
        left -= sum(last - first + 1 for first, last in rows)
        if left < 0 or not all(0 <= first <= last < world_size for first, last in rows):
            raise ValueError("ranks outside the job")
        ranks = tuple(rank for first, last in rows for rank in range(first, last + 1))
        location = Location(Activity[parse_text(group["at"]).upper()], parse_text(group["place"]),
                            parse_text(group["collective"]))
        groups.append(RankGroup(location, ranks, tuple(map(parse_host, group["hosts"])), group["odd"] is True,
                                parse_count(group["sequence"] or 0)))
    return Snapshot(tuple(groups), tuple(map(parse_text, fields["findings"])), parse_text(fields["step"]))


def parse_count(value: object) -> int:
    """Return a count or an index; raise TypeError or ValueError for anything else."""
    if type(value) is not int:
        raise TypeError(f"not an integer: {value!r}")
    if not 0 <= value < 2**63:
        raise ValueError(f"out of range: {value}")
    return value


def parse_text(value: object) -> str:
    """Return a text; raise TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"not a string: {value!r}")
    return value


def parse_host(value: object) -> str:
    """Return a hostname without characters that would expand it, as in n[0-99999999]."""
    return NO_HOST_CHARACTER.sub("_", parse_text(value))


def format_table(snapshot: Snapshot) -> list[str]:
    """Return a table with a line for each group, outliers first, followed by the findings."""
    table = [format_row(group) for group in snapshot.groups]
    widths = [max((len(cells[column]) for cells in table), default=0) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[3]])
             for cells in table]
    return [f"  {make_printable(line).rstrip()}" for line in (*lines, *snapshot.findings)]


def format_threads(threads: Mapping[int, str]) -> list[str]:
    """Return the threads of ranks, by rank, as lines."""
    return [make_printable(line) for rank, text in sorted(threads.items())
            for line in (f"rank {rank}:", *(f"  {line}" for line in text.rstrip("\n").split("\n")))]


def has_lock_wait(snapshot: Snapshot) -> bool:
    """Return whether a rank, or a child of a rank, waits for a lock outside of collectives."""
    return any(group.location.activity is Activity.ELSEWHERE and "futex" in group.location.line
               for group in snapshot.groups)


def format_row(group: RankGroup) -> tuple[str, str, str, str]:
    """Return a group's ranks, hosts, state and location."""
    count = len(group.ranks)
    names = format_ranges(group.ranks)
    if len(names) > MAX_RANKS_WIDTH:
        names = f"{names[:MAX_RANKS_WIDTH - 1]}…"
    ranks = f"{count:,} rank{'s' * (count != 1)}  {names}"
    activity, line, _ = group.location
    if group.sequence:
        line = f"{line} (sequence {group.sequence:,})"
    state = activity.value if activity in (Activity.COLLECTIVE, Activity.BUSY, Activity.ELSEWHERE) else ""
    if not state:
        line = f"{line}  ({activity.value})" if line else activity.value
    return ranks, fold_hosts(group.hosts), "outlier" if group.is_outlier else state, line


def make_printable(text: str) -> str:
    """Return a text in which `?` replaces characters that control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


class Box(NamedTuple):
    """A call made by the ranks of consecutive rows."""

    column: int
    first: int
    last: int
    text: str


def draw_svg(snapshot: Snapshot, title: str) -> str:
    """Return the snapshot as a tree of calls, outliers in red; raise ImportError if drawsvg is not installed."""
    import drawsvg

    groups = sorted(snapshot.groups, key=call_path)
    boxes = list(build_tree([call_path(group) for group in groups]))
    columns = range(max((box.column for box in boxes), default=-1) + 1)
    widths = [LETTER_WIDTH * max(len(box.text) for box in boxes if box.column == column) + 3 * GAP
              for column in columns]
    lefts = [GAP, *(GAP + sum(widths[:column + 1]) for column in columns)]
    below = 2 * ROW_HEIGHT + len(groups) * ROW_HEIGHT
    width = max([lefts[-1], *(LETTER_WIDTH * len(line) for line in (title, *snapshot.findings))]) + 2 * GAP
    drawing = drawsvg.Drawing(width, below + 20 * len(snapshot.findings), font_family="monospace")
    drawing.append(drawsvg.Rectangle(0, 0, drawing.width, drawing.height, fill=PAPER))
    drawing.append(drawsvg.Text(make_printable(title), 14, GAP, 24, fill=PLAIN))
    for column, first, last, text in boxes:
        top, is_outlier = ROW_HEIGHT * (first + 1), any(group.is_outlier for group in groups[first:last + 1])
        color = OUTLIER if is_outlier else PLAIN
        drawing.append(drawsvg.Rectangle(lefts[column], top, widths[column] - GAP,
                                         ROW_HEIGHT * (last - first + 1) - GAP, fill=FILL, stroke=color))
        drawing.append(drawsvg.Text(make_printable(text), 12, lefts[column] + GAP, top + 22, fill=color))
    for number, finding in enumerate(snapshot.findings):
        drawing.append(drawsvg.Text(make_printable(finding), 12, GAP, below + 20 * number, fill=PLAIN))
    return str(drawing.as_svg())


def call_path(group: RankGroup) -> tuple[str, ...]:
    """Return the calls of a group's ranks, the outermost first, and then ranks, hosts and state."""
    ranks, hosts, state, line = format_row(group)
    return (*filter(None, line.replace("; ", " → ").split(" → ")), f"{ranks} on {hosts}: {state}")


def build_tree(paths: Sequence[tuple[str, ...]], column: int = 0, first_row: int = 0) -> Iterator[Box]:
    """Yield the boxes of sorted paths, equal calls joined; the first path is in row `first_row`."""
    start = 0
    while start < len(paths):
        end = start + 1
        if column < len(paths[start]):
            while end < len(paths) and paths[end][column:column + 1] == paths[start][column:column + 1]:
                end += 1
            yield Box(column, first_row + start, first_row + end - 1, paths[start][column])
            yield from build_tree(paths[start:end], column + 1, first_row + start)
        start = end
