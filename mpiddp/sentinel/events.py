"""What the logic of the sentinels is told, and what it wants done: `watcher.py` and `coordinator.py` do no I/O.

An event says what happened, an action what to do about it. `process.py` turns the one into the other for real;
so does a simulation, with a clock, a network and processes that are none.
"""

from __future__ import annotations

from typing import NamedTuple

from ..plan.member import Member
from ..plan.verdict import Verdict
from .messages import Coordinate, Hello, Join, Message, Sent

# Events


class FromRank(NamedTuple):
    """The rank says something."""

    message: Message


class FromCoordinator(NamedTuple):
    """The coordinator says something."""

    message: Message


class RankGone(NamedTuple):
    """The rank's process has ended with this wait status (man 2 wait), None for an unknown one.

    `out_of_memory` tells that the kernel ended a process of its cgroup for lack of memory.
    """

    status: int | None
    out_of_memory: bool = False


class CoordinatorGone(NamedTuple):
    """The connection to the coordinator is `closed`, or leads nowhere any more."""

    closed: bool


class NoCoordinator(NamedTuple):
    """There is no coordinator for this sentinel; `error` says why it could not be reached, empty if there is none."""

    error: str = ""


class RankInterrupted(NamedTuple):
    """The rank got a SIGINT."""


class NeighbourGone(NamedTuple):
    """The process of a rank of this node has ended."""

    rank: int


class Due(NamedTuple):
    """The time of a timer has come."""

    timer: str


class Greeted(NamedTuple):
    """One that has shown the token says over a new connection whose sentinel it is."""

    link: int
    hello: Hello


class FromPeer(NamedTuple):
    """A sentinel says something over its connection."""

    link: int
    message: Message


class PeerLost(NamedTuple):
    """A connection is closed; or it leads nowhere any more, for the reason in `error`."""

    link: int
    error: str = ""


class OwnRank(NamedTuple):
    """Rank 0 joins the job; its own sentinel talks over `link`."""

    link: int
    member: Member


class OwnRankLeft(NamedTuple):
    """Rank 0 leaves the job in order."""


class OwnRankGone(NamedTuple):
    """Rank 0 is gone, and its sentinel ends."""


WatcherEvent = (
    FromRank | FromCoordinator | RankGone | CoordinatorGone | NoCoordinator | RankInterrupted | NeighbourGone | Due
)
CoordinatorEvent = Greeted | FromPeer | PeerLost | OwnRank | OwnRankLeft | OwnRankGone | Due

# Actions of both


class SetTimer(NamedTuple):
    """Let `Due` come once, `after_s` from now; a timer of the same name is replaced."""

    name: str
    after_s: float


class DropTimer(NamedTuple):
    """Let it not come."""

    name: str


class Say(NamedTuple):
    """Print a line."""

    text: str


class TellReason(NamedTuple):
    """Print why the job failed: a rank did, `after_s` after its start; `who` is None if only the verdict is known."""

    verdict: Verdict
    who: Member | None
    after_s: float
    error_file: str


class CancelStep(NamedTuple):
    """Cancel the Slurm step of the job's ranks, if there is one."""


# Actions of a watcher


class ToRank(NamedTuple):
    """Send a message to the rank."""

    message: Sent


class ToCoordinator(NamedTuple):
    """Send a message to the coordinator; `CoordinatorGone` follows if it cannot be sent."""

    message: Sent


class BeCoordinator(NamedTuple):
    """Coordinate the job's sentinels in this process, and send the rank the `Port`."""

    request: Coordinate


class MeetCoordinator(NamedTuple):
    """Connect to the coordinator, in this process or in another."""

    request: Join


class TellCondition(NamedTuple):
    """Send the coordinator the rank's `Condition`."""


class AskHosts(NamedTuple):
    """Ask the job's hosts for an answer, for `timeout_s` at most, and print a line with those that are silent."""

    line: str
    timeout_s: float


class WatchNeighbour(NamedTuple):
    """Let `NeighbourGone` come when process `pid`, which is `rank`, ends."""

    rank: int
    pid: int


class NoteChild(NamedTuple):
    """Remember a process that the rank has forked."""

    pid: int


class NoteDescendants(NamedTuple):
    """Remember the processes that the rank has started, while it is there to be their parent."""


class Alert(NamedTuple):
    """Let the rank read the `End` that it was sent, also if it is stopped."""


class AskToEnd(NamedTuple):
    """Send the rank SIGTERM if it handles that; any other would be cut off."""


class Terminate(NamedTuple):
    """Send the rank SIGTERM."""


class Kill(NamedTuple):
    """Send the rank SIGKILL."""


class LeaveInOrder(NamedTuple):
    """Tell the others that the rank leaves in order, and end this process."""


class LetAllEnd(NamedTuple):
    """Let all others end their ranks, if this process is the coordinator."""


class CleanUp(NamedTuple):
    """End what the rank has left behind, and this process."""


# Actions of the coordinator


class ToPeer(NamedTuple):
    """Send a message over a connection."""

    link: int
    message: Sent


class Drop(NamedTuple):
    """Close a connection."""

    link: int


WatcherAction = (
    SetTimer | DropTimer | Say | TellReason | CancelStep | ToRank | ToCoordinator | BeCoordinator | MeetCoordinator
    | TellCondition | AskHosts | WatchNeighbour | NoteChild | NoteDescendants | Alert | AskToEnd | Terminate | Kill
    | LeaveInOrder | LetAllEnd | CleanUp
)
CoordinatorAction = SetTimer | DropTimer | TellReason | CancelStep | ToPeer | Drop
