"""A snapshot of a job: one sample per rank, and the ranks at the same location as a group."""

from __future__ import annotations

import enum
from typing import NamedTuple

from ..failure.stack import Frame


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
