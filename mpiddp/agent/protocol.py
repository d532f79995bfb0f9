"""The messages of a rank, its agent and the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..base.config import BLOCKED_EXIT_TIMEOUT_S
from ..base.ranks import RankIdentity
from ..failure.root_cause import Report, RootCause
from ..output.protocol import OutputConfigured, OutputRequest
from ..where.protocol import (
    AskerToCoordinator,
    CoordinatorToAsker,
    Sample,
    SampleRequest,
    SnapshotRequest,
    ThreadsReply,
    ThreadsRequest,
)


class AgentConfig(NamedTuple):
    """What an agent knows of its rank and of the job before the fork.

    Printed lines call it `name`. The agent of the rank that is `first_on_node` prints what concerns the whole node.
    `step` is the Slurm step of the job's ranks, None if there is none; it is cancelled if nothing else ends them.
    `hosts` returns the hosts to probe while the rank waits in MPI_Init, none on most ranks. `by_srun`: srun itself
    started the rank. Its start may take `timeout_s`. `step_daemon` is the process id of the rank's slurmstepd, 0 for
    none. `launcher` is the name of another launcher, empty for none, and `launcher_pid` is that of the process by which
    it has started this one: its own, or a daemon's. The agent
    forwards signals to a rank that `has_own_group`: they do not reach it. It kills the rank
    `kill_delay_s` after a SIGTERM, shortly before the launcher kills the agent; 0 for never. If no rank has moved for
    `stall_s`, the coordinator prints that, and ends the job if `stall_abort`; 0 for never. It ends a job that has been
    in a deadlock for `blocked_timeout_s`, and after `exit_timeout_s` any job in which a rank has finished and others
    have not; 0 for never. `may_hang` says what may keep the rank in MPI_Init, empty if nothing is known. `script` is
    what the rank runs.
    """

    name: str
    first_on_node: bool
    step: str | None
    hosts: Callable[[], list[str]]
    by_srun: bool
    timeout_s: float
    step_daemon: int = 0
    launcher: str = ""
    launcher_pid: int = 0
    has_own_group: bool = False
    kill_delay_s: float = 0.0
    stall_s: float = 0.0
    stall_abort: bool = False
    blocked_timeout_s: float = BLOCKED_EXIT_TIMEOUT_S
    exit_timeout_s: float = 0.0
    may_hang: str = ""
    script: str = ""


# A rank to its agent


class Stage(NamedTuple):
    """A stage begins; the script has no name, and no deadline either."""

    name: str


class MpiSocket(NamedTuple):
    """Carries a duplicate of a socket by which MPI knows the rank.

    Slurm's PMIx cancels the step when it closes: so that happens when the agent ends.
    """


class ServeProbes(NamedTuple):
    """Send `token` to whoever connects to any address of this node, until `StartCoordinator`.

    Listen on `port`, 0 for a free one.
    """

    token: str
    port: int = 0


class StartCoordinator(NamedTuple):
    """Coordinate the job's agents, of so many ranks: listen on `address` for those that know `token`.

    The port is `port`, 0 for a free one.
    """

    address: str
    token: str
    ranks: int
    port: int = 0


class RegisterRank(NamedTuple):
    """The rank is this member of the job, whose coordinator listens on `address` and `port`."""

    member: RankIdentity
    address: str
    port: int
    token: str


class LocallyHandled(NamedTuple):
    """The rank knows why it ends, and prints the reason itself."""


class StackPrinted(NamedTuple):
    """The answer to `PrintStack`: the traceback that is printed."""

    stack: str


class ReadyToAbort(NamedTuple):
    """The rank, which has failed, has cleaned up; it can end the job by MPI_Abort, and waits for `Abort`."""


class Leave(NamedTuple):
    """The rank has left MPI and the job in order, and ends now with this status."""

    status: int


# A rank to its agent, which passes it on to the coordinator


class Failed(NamedTuple):
    """A rank ends for a reason."""

    report: Report


class ScriptEnded(NamedTuple):
    """The rank's script has finished; it has made `calls` of should_stop().

    `vanished`: its process has ended, or runs another program, and cannot leave MPI together with the others.
    """

    calls: int = 0
    vanished: bool = False


# An agent to its rank


class RegistrationDone(NamedTuple):
    """The coordinator has admitted the rank."""


class ListenPort(NamedTuple):
    """The answer to `ServeProbes` or `StartCoordinator`, as `request` names it: the port, 0 for a failure."""

    number: int
    request: str


class PrintStack(NamedTuple):
    """The rank, which has reported its failure, is the first to fail: print its traceback."""


# The coordinator to an agent, which passes it on to its rank


class JobEnds(NamedTuple):
    """The job ends with this exit status; so do all ranks. A rank that has failed gets it as the answer."""

    status: int


class AllFinished(NamedTuple):
    """All ranks' scripts have finished, so that the ranks can leave.

    `most_calls` is the largest number of their calls of should_stop(). `complete`: no rank has vanished.
    """

    most_calls: int
    complete: bool


# An agent to the coordinator


class Hello(NamedTuple):
    """The agent of this rank connects. `group` is the rank's process group, in the namespace of `RankIdentity`."""

    rank: int
    host: str
    group: int
    namespace: str = ""


class Signalled(NamedTuple):
    """The agent got a signal from outside, and has forwarded it to its rank, unless the sender has reached that."""

    number: int


class UnaskedStop(NamedTuple):
    """The rank got a stop signal, and its script has not called should_stop() yet."""

    number: int


class StoppedStatus(NamedTuple):
    """The answer to `QueryStopped`: whether a signal or a debugger holds the rank's process."""

    stopped: bool


class StepDaemonLost(NamedTuple):
    """The rank's slurmstepd, which starts and ends Slurm's ranks of a node, has ended."""


class ReasonPrinted(NamedTuple):
    """The answer to `PrintReason`."""


class RankEnded(NamedTuple):
    """The rank and all that it started have ended: the rank with this status.

    `can_abort`: the rank itself is still there, and waits for `Abort`. `log_lost` is the first byte that its log has
    lost, -1 for none, and `last_line` the last one in it.
    """

    status: int
    can_abort: bool = False
    log_lost: int = -1
    last_line: str = ""


# The coordinator to an agent


class Admitted(NamedTuple):
    """The coordinator has admitted the rank: if the connection closes from now on, the coordinator has ended."""


class Deputy(NamedTuple):
    """The agent reports the loss of the coordinator, which is on `host`; if that is empty, another agent does."""

    host: str


class QueryStopped(NamedTuple):
    """Ask whether the rank's process is stopped."""


class PrintReason(NamedTuple):
    """Print why the job ends: the rank is the first that failed."""

    root_cause: RootCause


class KillGroup(NamedTuple):
    """Kill a process group on this node: the agent of its rank was killed, and what the rank had started may live."""

    group: int


class JobOver(NamedTuple):
    """All ranks have ended: every agent exits with this status; if a rank `aborts`, not before the launcher ends it."""

    status: int
    aborts: bool = False


class Abort(NamedTuple):
    """All other ranks have ended: call MPI_Abort with this status. The agent passes this on to its rank."""

    status: int


RankToAgent = (
    Stage | MpiSocket | ServeProbes | StartCoordinator | RegisterRank | LocallyHandled | StackPrinted | ReadyToAbort
    | Leave | Failed | ScriptEnded | OutputRequest
)
AgentToRank = RegistrationDone | ListenPort | PrintStack | JobEnds | AllFinished | Abort | OutputConfigured
AgentToCoordinator = (
    Hello | Stage | Failed | ScriptEnded | Signalled | UnaskedStop | StoppedStatus | StepDaemonLost | ReasonPrinted
    | RankEnded | Sample | ThreadsReply | SnapshotRequest
)
CoordinatorToAgent = (
    Admitted | Deputy | QueryStopped | PrintReason | KillGroup | JobEnds | AllFinished | JobOver | Abort
    | SampleRequest | ThreadsRequest
)
CoordinatorReceives = AgentToCoordinator | AskerToCoordinator
CoordinatorSends = CoordinatorToAgent | CoordinatorToAsker
