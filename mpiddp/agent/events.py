"""The events and actions of the agents' logic: `watcher.py` and `coordinator.py` do no I/O."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.ranks import RankIdentity
from ..failure.root_cause import JobActivity, Report, RootCause
from ..ipc.channel import Text, Unreadable
from ..output.protocol import RelaySocket
from ..where.protocol import QuerySocket, SampleRequest, StackPipe, ThreadsRequest
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
    protocol.ServeProbes | protocol.StartCoordinator | protocol.RegisterRank | StackPipe | QuerySocket | RelaySocket
)

WARMUP_DELAY_S = 1.0  # from a rank's registration until its agent loads what a snapshot needs: not during starts

# Events


class FromRank(Record):
    """The rank has sent a message."""

    message: protocol.RankToAgent | Text | Unreadable


class FromCoordinator(Record):
    """The coordinator has sent a message."""

    message: protocol.CoordinatorToAgent | Text | Unreadable


class RankGone(Record):
    """The rank's process has ended with this wait status (man 2 wait), None for an unknown one.

    `out_of_memory`: the kernel killed a process of its cgroup for lack of memory.
    """

    status: int | None
    out_of_memory: bool = False


class Rank0Lost(Record):
    """Rank 0 and the coordinator have ended (`closed`), or their node is unreachable."""

    closed: bool


class NoCoordinator(Record):
    """The agent has no coordinator; `error` is why it could not be reached, empty if the job has none."""

    error: str = ""


class CoordinatorLost(Record):
    """The connection to the coordinator is closed; rank 0 may still live, without its agent."""


class StepDaemonGone(Record):
    """The rank's slurmstepd has ended."""


class Observed(Record):
    """Forwards a local observation to the coordinator."""

    message: protocol.Observation


class Due(Record):
    """A timer is due."""

    timer: str


class PeerGreeted(Record):
    """An authenticated connection has sent its Hello."""

    link: int
    hello: protocol.Hello


class FromPeer(Record):
    """An agent has sent a message."""

    link: int
    message: protocol.AgentToCoordinator | Text | Unreadable


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


class EndRequested(Record):
    """The job has to end, for the reason in `report`: no rank moves (--stall-abort), or a signal asks for it."""

    report: Report


class WaitForFinishedRank(Record):
    """Ranks wait for one that has finished its script, as in `report`; None if no rank is seen to do so."""

    report: Report | None


class OwnRankEnded(Record):
    """Rank 0 has left the job `in_order`; or its process has ended, and its agent ends."""

    in_order: bool


WatcherEvent = (
    FromRank | FromCoordinator | RankGone | Rank0Lost | NoCoordinator | CoordinatorLost | StepDaemonGone | Observed
    | Due
)
CoordinatorEvent = (
    PeerGreeted | FromPeer | PeerLost | OwnRankJoined | OwnRankEnded | SnapshotTaken | EndRequested
    | WaitForFinishedRank | Due
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


class PrintReason(Record):
    """Print why the job failed, `after_s` after its start; `member` is None if only the verdict is known."""

    verdict: RootCause
    member: RankIdentity | None
    after_s: float
    error_file: str


# Actions of a watcher


class WriteRecord(Record):
    """Write a record of why the job failed to a file."""

    error_file: str
    record: str


class ToRank(Record):
    """Send a message to the rank."""

    message: protocol.AgentToRank


class ToCoordinator(Record):
    """Send a message to the coordinator; `CoordinatorLost` follows if it cannot be sent."""

    message: protocol.AgentToCoordinator


class CarryOut(Record):
    """Carry out what the rank requests: listen, connect, or take the descriptor that came with the message."""

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


class WatchProcess(Record):
    """Post `PeerProcessEnded` as `Observed` when process `pid`, which is `rank`, ends."""

    rank: int
    pid: int


class RecordChild(Record):
    """Record a process that the rank has started."""

    pid: int


class SendCrashStack(Record):
    """Send the relay the stack of the rank's crash for the log; empty if it has not crashed."""

    text: str


class WatcherCommand(enum.Enum):
    """An action of a watcher that has no fields."""

    RECORD_DESCENDANTS = "record the rank's descendants, while it still lives as their parent"
    SIGNAL_END = "make the rank read the `EndRank` that it was sent, even if it is stopped"
    REQUEST_FLUSH = "make a thread of the rank flush the script's open files: the launcher may kill it at any moment"
    REQUEST_TERMINATION = "send the rank SIGTERM if it handles that; otherwise SIGTERM would kill it"
    TERMINATE = "send the rank SIGTERM"
    KILL = "send the rank SIGKILL"
    LEAVE_JOB = "report to the others that the rank leaves in order, and end this process"
    END_OTHERS = "make all other agents end their ranks, if this process is the coordinator"
    CANCEL_STEP = "cancel the Slurm step of the job's ranks, if there is one"
    CLEAN_UP = "end the rank's descendants, then this process"


# Actions of the coordinator


class CoordinatorCommand(enum.Enum):
    """An action of the coordinator that has no fields."""

    TAKE_SNAPSHOT = "take a snapshot of where the ranks are, and post `SnapshotTaken`"
    CHECK_WAIT_FOR_FINISHED = "check whether ranks wait for one that has finished, and post `WaitForFinishedRank`"
    CANCEL_STEP = "cancel the Slurm step of the job's ranks, if there is one"


class ToPeer(Record):
    """Send a message over a connection."""

    link: int
    message: protocol.CoordinatorToAgent


class CloseConnection(Record):
    """Close a connection."""

    link: int


RankAction = RecordChild | SendCrashStack | WatcherCommand
WatcherAction = (
    SetTimer | CancelTimer | PrintLine | PrintReason | WriteRecord | ToRank | ToCoordinator | CarryOut | ObserveRank
    | ProbeHosts | WatchProcess | RankAction
)
CoordinatorAction = SetTimer | PrintLine | PrintReason | ToPeer | CloseConnection | CoordinatorCommand
