"""A snapshot of a job: a sample of each rank, the ranks at one location as a group; as JSON and as a table."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..base.text import find_runs, fold_hosts, format_ranges
from ..failure.stack import Frame

MAX_RANKS_WIDTH = 30  # characters
MAX_GROUPS = 200  # and findings, in JSON; a job with more gives no clear finding
NO_HOST_CHARACTER = re.compile(r"[^\w.:-]")


class Activity(enum.Enum):
    """What a rank does, as seen from outside. `--json` has the names."""

    LOST = "unreachable: the agent does not answer"
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
    """The state of a rank, sampled by its agent."""

    rank: int
    host: str
    frames: tuple[Frame, ...] = ()  # the main thread's stack, outermost first; empty if none was received
    state: str = ""  # the letter in /proc/PID/stat; empty for a process that is gone
    wchan: str = ""  # the kernel function in which the main thread sleeps
    cores: float = 0.0  # share of a core that the main thread used or waited for, while it was sampled
    busy_s: float = 0.0  # CPU time of the rank and its descendants since they started; without the rank's if it `spins`
    moved_bytes: int = 0  # that they read and wrote, and at least received on sockets, except from the agent
    has_answered: bool = True  # whether the agent answered
    has_ended: bool = False  # whether the script has reached its end
    children: tuple[ChildProcess, ...] = ()
    steps: int = 0  # calls of mpiddp.should_stop()
    step_age_s: float = 0.0  # since the last one
    sequences: tuple[CollectiveSeq, ...] = ()
    spins: bool = False  # whether it busy-waits for its GPU
    faults: int = 0  # minor page faults of the rank and its descendants
    unseen: str = ""  # why the kernel does not show some of these figures; empty if it shows all
    native: str = ""  # why there are no frames while native code holds the GIL
    waits_in: str = ""  # the process group in whose collective the main thread is; empty if unknown
    unacked_bytes: int = 0  # that they have sent by TCP, and the receivers have not acknowledged


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
