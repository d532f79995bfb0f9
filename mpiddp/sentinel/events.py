"""The events and actions of the sentinels' logic: `watcher.py` and `coordinator.py` do no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from ..failure.rank import RankIdentity
from ..failure.root_cause import JobActivity, Report, RootCause
from ..output.protocol import Outflow
from ..where.protocol import Answers, Ask, Inspect, Inspected, Stacks, Where, Whereabouts
from .protocol import Answer, Coordinate, Ended, Hello, Interrupted, Join, Look, Message, Sent

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    def dataclass_transform(**_):
        """Mark nothing: this is for type checkers."""
        return lambda kind: kind

State = TypeVar("State", bound=enum.Enum)
Action = TypeVar("Action")


@dataclass_transform(eq_default=True)
class Record:
    """A value of named fields, as a dataclass is one; every sentinel makes these classes, so they must cost little."""

    _names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._names = cls.__match_args__ = tuple(cls.__annotations__)  # type: ignore[attr-defined,misc]

    def __init__(self, *values: Any, **named: Any) -> None:
        self.__dict__.update(zip(self._names, values, strict=False), **named)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._names)
        return f"{type(self).__name__}({fields})"


class Machine(Generic[State, Action]):
    """Logic without I/O and without a clock: it takes events and returns actions, which others carry out."""

    moves: ClassVar[Mapping[Any, Mapping[str, Any]]]  # from a state, by a word, to which

    def __init__(self, state: State, began_s: float) -> None:
        """Begin in a state, at `began_s` of any monotonic clock."""
        self.state = state
        self._now_s = began_s
        self._actions: list[Action] = []

    def taken(self) -> list[Action]:
        """Return the actions that are still to be carried out, once."""
        actions, self._actions = self._actions, []
        return actions

    def _do(self, *actions: Action) -> None:
        self._actions += actions

    def _move(self, by: str) -> bool:
        """Go on to the state to which something leads, and tell whether it leads to one."""
        to = self.moves[self.state].get(by)
        if to is not None:
            self.state = to
        return to is not None


READY_AFTER_S = 1.0  # a rank has joined, its sentinel loads what it needs to tell where that is: not during starts

# Events


class FromRank(Record):
    """The rank says something."""

    message: Message


class FromCoordinator(Record):
    """The coordinator says something."""

    message: Message


class RankGone(Record):
    """The rank's process has ended with this wait status (man 2 wait), None for an unknown one.

    `out_of_memory` tells that the kernel ended a process of its cgroup for lack of memory.
    """

    status: int | None
    out_of_memory: bool = False


class CoordinatorGone(Record):
    """Rank 0 and the coordinator are gone, or their node cannot be reached any more, if they are not `closed`."""

    closed: bool


class NoCoordinator(Record):
    """There is no coordinator for this sentinel; `error` says why it could not be reached, empty if there is none."""

    error: str = ""


class CoordinatorKilled(Record):
    """The connection to the coordinator is closed, and nobody rules any more; rank 0 may go on without its sentinel."""


class StepDaemonGone(Record):
    """The rank's slurmstepd has ended."""


class Noticed(Record):
    """Something that the coordinator is to know has happened at this node."""

    message: Interrupted | Ended | Whereabouts | Inspected | Ask


class Due(Record):
    """The time of a timer has come."""

    timer: str


class Greeted(Record):
    """One that has shown the token says over a new connection whose sentinel it is."""

    link: int
    hello: Hello


class FromPeer(Record):
    """A sentinel says something over its connection."""

    link: int
    message: Message


class PeerLost(Record):
    """A connection is closed; or it leads nowhere any more, for the reason in `error`."""

    link: int
    error: str = ""


class OwnRank(Record):
    """Rank 0 joins the job; its own sentinel talks over `link`."""

    link: int
    member: RankIdentity


class Found(Record):
    """It is known where the ranks are."""

    seen: JobActivity


class Stalled(Record):
    """No rank has moved for long, and that ends the job, for the reason in `report`."""

    report: Report


class Deserted(Record):
    """Ranks wait for one that has come to its end, as in `report`; None: no rank does, as far as can be seen."""

    report: Report | None


class OwnRankLeft(Record):
    """Rank 0 leaves the job in order."""


class OwnRankGone(Record):
    """Rank 0 is gone, and its sentinel ends."""


WatcherEvent = (
    FromRank | FromCoordinator | RankGone | CoordinatorGone | NoCoordinator | CoordinatorKilled
    | StepDaemonGone | Noticed | Due
)
CoordinatorEvent = (
    Greeted | FromPeer | PeerLost | OwnRank | Found | Stalled | Deserted | OwnRankLeft | OwnRankGone | Due
)

# Actions of both


class SetTimer(Record):
    """Let `Due` come once, `after_s` from now; a timer of the same name is replaced."""

    name: str
    after_s: float


class DropTimer(Record):
    """Let it not come."""

    name: str


class Say(Record):
    """Print a line."""

    text: str


class TellReason(Record):
    """Print why the job failed: a rank did, `after_s` after its start; `who` is None if only the verdict is known."""

    verdict: RootCause
    who: RankIdentity | None
    after_s: float
    error_file: str


class WriteRecord(Record):
    """Write a record of why the job failed to a file."""

    error_file: str
    record: str


class CancelStep(Record):
    """Cancel the Slurm step of the job's ranks, if there is one."""


# Actions of a watcher


class ToRank(Record):
    """Send a message to the rank."""

    message: Sent


class ToCoordinator(Record):
    """Send a message to the coordinator; `CoordinatorKilled` follows if it cannot be sent."""

    message: Sent


class AnswerTrials(Record):
    """Answer other nodes, which try this one's addresses, and send the rank the `Port`."""

    request: Answer


class BeCoordinator(Record):
    """Coordinate the job's sentinels in this process, and send the rank the `Port`."""

    request: Coordinate


class MeetCoordinator(Record):
    """Connect to the coordinator, in this process or in another."""

    request: Join


class LookAtRank(Record):
    """Send the coordinator the rank's `Condition`, its `Whereabouts` or what is `Inspected`.

    `ended` tells that its script has ended.
    """

    request: Look | Where | Inspect
    ended: bool


class AskHosts(Record):
    """Ask the job's hosts for an answer, for `timeout_s` at most, and print a line with those that are silent."""

    line: str
    timeout_s: float


class TakeWindow(Record):
    """Take what the rank is seen through, which comes with its message."""

    request: Stacks | Answers | Outflow


class WatchNeighbour(Record):
    """Let `Ended` be `Noticed` when process `pid`, which is `rank`, ends."""

    rank: int
    pid: int


class NoteChild(Record):
    """Remember a process that the rank has started."""

    pid: int


class NoteDescendants(Record):
    """Remember the processes that the rank has started, while it is there to be their parent."""


class LogStack(Record):
    """Let the log of the rank, which is gone, have the stack of its crash, if it has crashed; empty for none."""

    text: str


class Alert(Record):
    """Let the rank read the `End` that it was sent, also if it is stopped."""


class AskToFlush(Record):
    """Let a thread of the rank flush the files that the script has open: the launcher may kill it at any moment."""


class AskToEnd(Record):
    """Send the rank SIGTERM if it handles that; any other would be cut off."""


class Terminate(Record):
    """Send the rank SIGTERM."""


class Kill(Record):
    """Send the rank SIGKILL."""


class LeaveInOrder(Record):
    """Tell the others that the rank leaves in order, and end this process."""


class LetAllEnd(Record):
    """Let all others end their ranks, if this process is the coordinator."""


class CleanUp(Record):
    """End what the rank has left behind, and this process."""


# Actions of the coordinator


class ToPeer(Record):
    """Send a message over a connection."""

    link: int
    message: Sent


class Drop(Record):
    """Close a connection."""

    link: int


class Survey(Record):
    """Find out where the ranks are, and let `Found` come when that is known."""


class LookForDeserted(Record):
    """Find out whether ranks wait for one that has come to its end, and let `Deserted` come when that is known."""


WatcherAction = (
    SetTimer | DropTimer | Say | TellReason | WriteRecord | CancelStep | ToRank | ToCoordinator | AnswerTrials
    | BeCoordinator | MeetCoordinator | LookAtRank | TakeWindow | AskHosts | WatchNeighbour | NoteChild
    | NoteDescendants | LogStack | Alert | AskToFlush | AskToEnd | Terminate | Kill | LeaveInOrder | LetAllEnd | CleanUp
)
CoordinatorAction = SetTimer | Say | TellReason | CancelStep | ToPeer | Drop | Survey | LookForDeserted
