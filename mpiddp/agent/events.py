"""The events and actions of the agents' logic: `watcher.py` and `coordinator.py` do no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.ranks import RankIdentity
from ..failure.root_cause import JobActivity, Report, RootCause
from ..ipc.channel import Unreadable
from ..output.index import RankEnd
from ..output.protocol import OutputRequest
from ..where.protocol import SampleRequest, ThreadsRequest
from . import protocol

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    def dataclass_transform(**_):
        """Mark nothing: this is for type checkers."""
        return lambda kind: kind


@dataclass_transform(eq_default=True)
class Record:
    """A small dataclass: every agent makes these classes as it starts, so they must cost little."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._names = cls.__match_args__ = (*cls._names, *cls.__annotations__)  # type: ignore[attr-defined,misc]

    def __init__(self, *values: Any, **named: Any) -> None:
        self.__dict__.update(zip(self._names, values, strict=False), **named)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({fields})"


RankRequest = (
    protocol.MpiSocket | protocol.ServeProbes | protocol.StartCoordinator | protocol.RegisterRank | OutputRequest
)

WARMUP_DELAY_S = 1.0  # from a rank's registration until its agent loads what a snapshot needs: not during starts

# Events of an agent


class FromRank(Record):
    """The rank has sent a message."""

    message: protocol.RankToAgent | Unreadable


class FromCoordinator(Record):
    """The coordinator has sent a message."""

    message: protocol.CoordinatorToAgent | Unreadable


class RankClosed(Record):
    """The rank's connection is closed, but its process lives: it runs another program, or has closed all files."""


class RankGone(Record):
    """The rank's process has ended with this wait status (man 2 wait).

    `out_of_memory`: the kernel killed a process of its cgroup for lack of memory. `stack` is what faulthandler wrote.
    """

    status: int
    out_of_memory: bool = False
    stack: str = ""


class DescendantsGone(Record):
    """What the rank had started has ended."""


class OutputFinished(Record):
    """All output of the rank is forwarded; whether its stdout has lost some of it, and the rest as in `RankEnded`."""

    is_lost: bool
    log_lost: int = -1
    last_line: str = ""


class Signalled(Record):
    """A signal from outside has come; `unasked`: it waits for the script's first should_stop()."""

    number: int
    unasked: bool = False


class CoordinatorLost(Record):
    """The coordinator cannot be reached, for the reason in `error`; or has ended: then that is empty."""

    error: str


class StepDaemonGone(Record):
    """The rank's slurmstepd has ended."""


class LauncherGone(Record):
    """The launcher, or what it had started this process by, has ended."""


class Printed(Record):
    """The report is printed."""


class Due(Record):
    """A timer is due."""

    timer: str


# Events of the coordinator


class PeerGreeted(Record):
    """An authenticated connection has sent its Hello."""

    link: int
    hello: protocol.Hello


class FromPeer(Record):
    """An agent has sent a message."""

    link: int
    message: protocol.AgentToCoordinator | Unreadable


class PeerLost(Record):
    """A connection is closed; or broken, for the reason in `error`."""

    link: int
    error: str = ""


class OwnRankJoined(Record):
    """Rank 0 joins the job; its own agent uses `link`."""

    link: int
    member: RankIdentity


class SnapshotTaken(Record):
    """A snapshot of where the ranks are."""

    snapshot: JobActivity


class StallChanged(Record):
    """No rank moves, or they do again, as `text` says; `cause`, empty for the latter, is for a report on `rank`."""

    text: str
    cause: str
    rank: int


class OwnRankIdle(Record):
    """Whether rank 0 has used next to no CPU time for some seconds: in a deadlock no rank does."""

    is_idle: bool


class DeadlockChecked(Record):
    """No rank can go on, as in `report`; None if that is not seen."""

    report: Report | None


class IndexCompleted(Record):
    """The index of the logs is complete, or could not be written: `error` is the line that says so, else empty."""

    error: str = ""


AgentEvent = (
    FromRank | FromCoordinator | RankClosed | RankGone | DescendantsGone | OutputFinished | Signalled | CoordinatorLost
    | StepDaemonGone | LauncherGone | Printed | Due
)
CoordinatorEvent = (
    PeerGreeted | FromPeer | PeerLost | OwnRankJoined | SnapshotTaken | StallChanged | OwnRankIdle
    | DeadlockChecked | IndexCompleted | Due
)

# Actions of both


class SetTimer(Record):
    """Post `Due` once, `after_s` from now; a timer of the same name is replaced."""

    name: str
    after_s: float


class CancelTimer(Record):
    """Cancel a timer."""

    name: str


class PrintLine(Record):
    """Print a line."""

    text: str


# Actions of an agent


class PrintReport(Record):
    """Print why the job ends, on behalf of `member`, and post `Printed`; `after_s` counts from its start.

    If this rank is the root cause, it has printed its traceback, `stack`, empty for none.
    """

    root_cause: RootCause
    member: RankIdentity
    after_s: float
    stack: str


class ToRank(Record):
    """Send a message to the rank."""

    message: protocol.AgentToRank


class ToCoordinator(Record):
    """Send a message to the coordinator; `CoordinatorLost` follows if it cannot be sent."""

    message: protocol.AgentToCoordinator


class CarryOut(Record):
    """Carry out what the rank requests: hold a socket, listen, connect, forward output."""

    request: RankRequest


class ObserveRank(Record):
    """Send the coordinator the rank's `StoppedStatus`, `Sample` or `ThreadsReply`.

    `ended`: its script has finished.
    """

    request: protocol.QueryStopped | SampleRequest | ThreadsRequest
    ended: bool


class ProbeHosts(Record):
    """Probe the job's hosts, for `timeout_s` at most, and append those that do not answer to a printed line."""

    line: str
    timeout_s: float


class SignalRank(Record):
    """Send the rank a signal."""

    number: int


class KillGroup(Record):
    """Kill a process group."""

    group: int


class Exit(Record):
    """End the agent with this status."""

    status: int


class AgentCommand(enum.Enum):
    """An action of an agent that has no fields."""

    REQUEST_END = "make a thread of the rank flush the script's open files and end the rank"
    END_RANK = "send the rank SIGTERM if its script handles that, else SIGKILL"
    END_DESCENDANTS = "end what the rank has started, and post `DescendantsGone`"
    FINISH_OUTPUT = "forward the rest of the rank's output, and post `OutputFinished`"
    CANCEL_STEP = "cancel the Slurm step of the job's ranks, if there is one"
    END_LAUNCHER = "end, as the last act, a launcher that does not end by itself because a node is lost"
    RECORD_SEGMENTS = "record the rank's shared memory of MPI"


# Actions of the coordinator


class CompleteIndex(Record):
    """Write how ranks have ended to the index of the logs, `path`, and post `IndexCompleted`; `first` failed first."""

    path: str
    ends: Mapping[int, RankEnd]
    first: int


class CoordinatorCommand(enum.Enum):
    """An action of the coordinator that has no fields."""

    TAKE_SNAPSHOT = "take a snapshot of where the ranks are, and post `SnapshotTaken`"
    CHECK_DEADLOCK = "check whether no rank can go on, and post `DeadlockChecked`"
    CANCEL_STEP = "cancel the Slurm step of the job's ranks, or, as the last act, end another launcher that waits on"
    NOTE_END_IN_ORDER = "tell mpiddp.supervise that the job ends in order"


class PrintOwnReport(Record):
    """Print why the job ends, if no agent of a rank can; `after_s` counts from its start."""

    root_cause: RootCause
    after_s: float
    error_file: str


class ToPeer(Record):
    """Send a message over a connection."""

    link: int
    message: protocol.CoordinatorToAgent


class ToPeers(Record):
    """Send a message over several connections."""

    links: list[int]
    message: protocol.CoordinatorToAgent


class CloseConnection(Record):
    """Close a connection."""

    link: int


AgentAction = (
    SetTimer | CancelTimer | PrintLine | PrintReport | ToRank | ToCoordinator | CarryOut | ObserveRank | ProbeHosts
    | SignalRank | KillGroup | Exit | AgentCommand
)
CoordinatorAction = (
    SetTimer | PrintLine | PrintOwnReport | ToPeer | ToPeers | CloseConnection | CompleteIndex | CoordinatorCommand
)
