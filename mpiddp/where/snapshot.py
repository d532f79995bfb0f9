"""A snapshot of a job: a sample of each rank, and the ranks at one location as a group."""

from __future__ import annotations

import enum
from typing import NamedTuple

from ..failure.stack import Frame


class Activity(enum.Enum):
    """What a rank does, as seen from outside. The names are part of `--json`."""

    LOST = "out of reach: the sentinel does not answer"
    GONE = "gone"
    STOPPED = "stopped, by SIGSTOP or a debugger"
    KERNEL = "held by the kernel"
    SILENT = "silent: no stack came, ask again"
    ENDED = "at the end of the script"
    COLLECTIVE = "waiting"
    BUSY = "busy"
    LOADER = "waiting for a worker of its DataLoader"
    ELSEWHERE = "standing"

    @property
    def is_held(self) -> bool:
        """Whether something outside the script keeps the rank from running."""
        return self in (Activity.LOST, Activity.GONE, Activity.STOPPED, Activity.KERNEL)

    @property
    def is_waiting(self) -> bool:
        """Whether the rank waits for other ranks."""
        return self in (Activity.COLLECTIVE, Activity.ENDED)


class ChildProcess(NamedTuple):
    """A process that a rank has forked, such as a DataLoader's worker. Fields as in RankSample.

    `program` is the name of what it runs, empty if that is what its rank runs.
    """

    pid: int
    frames: tuple[Frame, ...] = ()
    state: str = ""
    wchan: str = ""
    program: str = ""
    native: str = ""


class CollectiveSeq(NamedTuple):
    """Torch's sequence number of a process group in a rank, and the group's ranks and name.

    NCCL counts collectives only. gloo also counts sends and receives between two ranks.
    """

    number: int
    ranks: str
    name: str


class RankSample(NamedTuple):
    """The state of a rank, as its sentinel has sampled it."""

    rank: int
    host: str
    frames: tuple[Frame, ...] = ()  # the main thread's stack, outermost first; empty if none came
    state: str = ""  # the letter in /proc/PID/stat; empty for a process that is gone
    wchan: str = ""  # the kernel function in which the main thread sleeps
    cores: float = 0.0  # the share of a processor that the main thread used or waited for, while it was sampled
    busy_s: float = 0.0  # processor time of it and its descendants since their start; without its own if it `spins`
    moved_bytes: int = 0  # that they read, wrote, sent and received; without the job's store, and what the sentinel got
    has_answered: bool = True  # whether the sentinel has
    has_ended: bool = False  # whether the script has come to its end
    children: tuple[ChildProcess, ...] = ()
    steps: int = 0  # calls of mpiddp.should_stop()
    step_age_s: float = 0.0  # since the last one
    sequences: tuple[CollectiveSeq, ...] = ()
    spins: bool = False  # whether it uses a processor while it waits for its GPU
    faults: int = 0  # minor page faults of it and its descendants
    unseen: str = ""  # which of these figures the kernel does not show; empty for none
    native: str = ""  # why there are no frames while native code holds the interpreter


class Location(NamedTuple):
    """Where ranks are: `line` is their stack in one line, `collective` what they wait in, empty for none."""

    activity: Activity
    line: str
    collective: str = ""


class RankGroup(NamedTuple):
    """Ranks at one location; `sequence` is their common number if they have one process group, else 0."""

    location: Location
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    is_odd: bool = False
    sequence: int = 0


class Snapshot(NamedTuple):
    """Where the ranks of a job are: groups, odd ones first, then small ones; and sentences about them.

    `step` says at which steps the ranks are; empty if they count none.
    """

    groups: tuple[RankGroup, ...]
    findings: tuple[str, ...]
    step: str = ""

    @property
    def odd_group(self) -> RankGroup | None:
        """The first group that is odd, if there is one."""
        return self.groups[0] if self.groups and self.groups[0].is_odd else None
