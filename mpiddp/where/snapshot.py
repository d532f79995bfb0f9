"""What is seen of a job's ranks: of each one, and of those at one place together."""

from __future__ import annotations

import enum
from typing import NamedTuple

from ..failure.stack import Frame


class At(enum.Enum):
    """What a rank is at, as far as can be seen from outside."""

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


HELD = (At.LOST, At.GONE, At.STOPPED, At.KERNEL)
WAITING = (At.COLLECTIVE, At.ENDED)


class Worker(NamedTuple):
    """A process that a rank has forked: a DataLoader's worker, or another one. Fields as in Rank.

    `program` is the name of what it runs, empty if it is what its rank runs.
    """

    pid: int
    frames: tuple[Frame, ...] = ()
    state: str = ""
    kernel: str = ""
    program: str = ""
    native: str = ""


class Entered(NamedTuple):
    """How far a rank is in a process group: torch's sequence number there, and the group's ranks and name.

    gloo counts what the rank has sent and received to another one, too; NCCL counts collectives alone.
    """

    number: int
    ranks: str
    name: str


class Rank(NamedTuple):
    """A rank as its sentinel has seen it.

    `frames` is the stack of its main thread, outermost first, empty where it did not answer. `state` is the letter of
    /proc/PID/stat, empty for a process that is gone, `kernel` the kernel's function that it sleeps in. `cores` is how
    much of a processor its main thread used, or waited for, while it was looked at. `busy_s` is what it and its
    descendants have used since their start, `moved_bytes` what they have read and written, received and sent by TCP,
    but for what they told the sentinel and what goes over the job's store, `faults` their minor page faults. `unseen`
    says which of that cannot be seen, empty for none. Where native code holds the interpreter and there are no frames,
    `native` says why. `heard` tells whether the sentinel has answered, `ended` that the
    script has come to its end. It has made `steps`, the last one `step_age_s` ago. `spins` tells that it uses a
    processor while it waits for its GPU; `busy_s` is without its own then.
    """

    rank: int
    host: str
    frames: tuple[Frame, ...] = ()
    state: str = ""
    kernel: str = ""
    cores: float = 0.0
    busy_s: float = 0.0
    moved_bytes: int = 0
    heard: bool = True
    ended: bool = False
    workers: tuple[Worker, ...] = ()
    steps: int = 0
    step_age_s: float = 0.0
    entered: tuple[Entered, ...] = ()
    spins: bool = False
    faults: int = 0
    unseen: str = ""
    native: str = ""


class Place(NamedTuple):
    """Where ranks are: the name of the collective that they wait in, empty for none, and their line in words."""

    at: At
    words: str
    collective: str = ""


class Group(NamedTuple):
    """Ranks at one place, on hosts; `sequence` is that of all of them in their only process group, 0 for none."""

    place: Place
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    odd: bool = False
    sequence: int = 0


class Picture(NamedTuple):
    """Where the ranks of a job are: groups, the odd ones first, then the small ones; and sentences about them.

    `step` tells in words at which step they are, empty where they count none.
    """

    groups: tuple[Group, ...]
    findings: tuple[str, ...]
    step: str = ""

    @property
    def odd(self) -> Group | None:
        """The first group that is odd, if there is one."""
        return self.groups[0] if self.groups and self.groups[0].odd else None
