"""What a rank, its sentinel and the coordinator tell each other."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from ..base.config import BLOCKED_EXIT_TIMEOUT_S
from ..failure.rank import RankIdentity
from ..failure.root_cause import Report, RootCause
from ..output.protocol import (
    AskLost,
    CrashStack,
    Forward,
    Forwarded,
    Lost,
    Outflow,
    OutputSettled,
    RankEnds,
    SettleOutput,
)
from ..where.protocol import Answers, Ask, Calls, Inspect, Inspected, Progress, Shown, Stacks, Where, Whereabouts

END_SIGNAL = signal.SIGRTMAX  # tells a rank that its sentinel has sent it an `End`, or is gone
ASK_SIGNAL = signal.SIGRTMAX - 2  # lets a rank, or a process that it has forked, tell the sentinel its `Calls`
LAUNCHER_S = 2.0  # for the launcher to end a job that has lost a rank
LAST_S = 2.0  # for a rank whose grace is over to end by itself, or for the one that ends the job to do so
KILL_SIGNAL = signal.SIGRTMAX - 1  # ends a rank that is the first process of its container: no SIGKILL from inside does


class Watched(NamedTuple):
    """The rank that a sentinel watches, handed over when that is forked.

    `who` is what to call the rank. `first_on_node` lets its sentinel print what concerns the whole node. `step`
    is the Slurm step of the job's ranks, None where there is none; it is cancelled where nothing else ends them.
    `hosts` returns the hosts that are asked for an answer when the rank waits in MPI_Init, none on most ranks.
    `by_srun` tells that srun itself started the rank. `timeout_s` is how long its start may take. `step_daemon` is
    the process of Slurm that the rank descends from, 0 for none. Where no rank has moved for `stall_s`, the coordinator
    says so, and ends the job if `stall_abort`; 0 for never. It ends a job whose ranks wait for one that has come to its
    end when that has lasted for `exit_timeout_s`.
    """

    who: str
    first_on_node: bool
    step: str | None
    hosts: Callable[[], list[str]]
    by_srun: bool
    timeout_s: float
    step_daemon: int = 0
    stall_s: float = 0.0
    stall_abort: bool = False
    exit_timeout_s: float = BLOCKED_EXIT_TIMEOUT_S


# A rank to its sentinel


class Stage(NamedTuple):
    """A stage begins; the script has no name, and no deadline either."""

    name: str


class Answer(NamedTuple):
    """Answer with `token` whoever connects to any address of this node, until there is something to coordinate.

    Listen on `port`, 0 for a free one.
    """

    token: str
    port: int = 0


class Coordinate(NamedTuple):
    """Coordinate the job's sentinels, of so many ranks: listen on `address` for those that show `token`.

    The port is `port`, 0 for a free one.
    """

    address: str
    token: str
    ranks: int
    port: int = 0


class Join(NamedTuple):
    """Watch the rank as this member of the job, whose coordinator listens on `address` and `port`, 0 for no port."""

    member: RankIdentity
    address: str
    port: int
    token: str


class Forked(NamedTuple):
    """The script has started the process `pid`, by a fork or as a program."""

    pid: int


class Settled(NamedTuple):
    """The rank knows why it ends, and says so itself."""


# A rank to its sentinel, which passes it on to the coordinator


class Failed(NamedTuple):
    """A rank ends for a reason; `gone` tells that its process has ended already."""

    report: Report
    gone: bool = False


class Told(NamedTuple):
    """The reason for the job's end is printed, and the other ranks may be ended; or it is just being, if not `done`.

    `record` is what the rank's sentinel writes to --error-file, empty for nothing.
    """

    done: bool = True
    record: str = ""


class Through(NamedTuple):
    """The rank, which has failed, has nothing more to do."""


class ScriptEnded(NamedTuple):
    """The rank's script has come to its end.

    `exit` is the report on it, should other ranks still need this one, if it raised SystemExit and nobody knows the
    status.
    """

    exit: Report | None = None


class AskMissing(NamedTuple):
    """Tell which ranks' scripts have not come to their end."""


class Bye(NamedTuple):
    """The rank leaves the job in order."""


# A sentinel to its rank


class Reached(NamedTuple):
    """The connection to the coordinator comes with this: it stays open as long as the rank or its sentinel lives."""


class Port(NamedTuple):
    """The sentinel listens on this port, 0 if it cannot, as `asked` for; a coordinator's listener comes with this."""

    number: int
    asked: str


class End(NamedTuple):
    """End yourself, and the job with you, with this exit status. END_SIGNAL follows."""

    status: int


class Ruling(NamedTuple):
    """What a rank that failed has to do: print `verdict`, None where another rank failed first.

    `status` is the job's exit status. `abort` tells that the rank has to end the others. The coordinator
    sends it, and the sentinel passes it on.
    """

    verdict: RootCause | None
    status: int
    abort: bool


# A sentinel to the coordinator


class Hello(NamedTuple):
    """The sentinel of this rank is here; the rank is process `pid` on `host`, in the namespace of `RankIdentity`."""

    rank: int
    host: str
    pid: int
    namespace: str = ""


class Condition(NamedTuple):
    """The answer to `Look`: whether a signal or a debugger holds the rank's process."""

    stopped: bool


class Orphaned(NamedTuple):
    """The rank's step daemon is gone, by which Slurm starts and ends the ranks of a node."""


class Ended(NamedTuple):
    """The process of `rank`, a neighbour, has ended."""

    rank: int


class Interrupted(NamedTuple):
    """The rank got a SIGINT."""


# A rank whose sentinel was killed to the coordinator, besides what its sentinel would pass on


class Unwatched(NamedTuple):
    """The rank has no sentinel any more, and speaks for itself over the connection of that."""


# The coordinator to a sentinel


class Admitted(NamedTuple):
    """The coordinator knows the rank from now on: where the connection ends, the coordinator is gone."""


class Neighbour(NamedTuple):
    """Tell when process `pid` of this node ends, which is `rank`."""

    rank: int
    pid: int


class Look(NamedTuple):
    """Tell whether the rank's process is stopped."""


class Missing(NamedTuple):
    """The answer to `AskMissing`: the ranks, in words, which the sentinel passes on to its rank."""

    names: str


class JobEnds(NamedTuple):
    """The job ends with this exit status.

    `abort` tells that the rank has to end the others. `waits` tells that the rank failed too, and has its
    ruling already: it waits for this word to end itself.
    """

    status: int
    abort: bool
    waits: bool = False


class Over(NamedTuple):
    """The job is over, in order."""


Sent = (
    Stage | Answer | Coordinate | Join | Forked | Settled | Failed | Told | Through | ScriptEnded | AskMissing | Bye
    | Port | End | Reached | Ruling | Hello | Condition | Orphaned | Ended | Interrupted | Unwatched | Admitted
    | Neighbour | Look
    | Missing | JobEnds | Over | Forward | AskLost | Lost | Forwarded | SettleOutput | OutputSettled | Stacks | Progress
    | Where | Whereabouts | Ask | Shown | Inspect | Inspected | Answers | Calls | Outflow | RankEnds | CrashStack
)


class Text(NamedTuple):
    """A line that is no message: faulthandler writes some to the sentinel."""

    line: str


class Unreadable(NamedTuple):
    """A message whose fields are not what its name says."""

    error: str


Message = Sent | Text | Unreadable
