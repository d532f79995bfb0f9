"""The messages of a rank, its agent and the coordinator."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from ..base.config import BLOCKED_EXIT_TIMEOUT_S
from ..base.ranks import RankIdentity
from ..failure.root_cause import Report, RootCause
from ..output.protocol import RelaySocket
from ..where.protocol import (
    AskerToCoordinator,
    CoordinatorToAsker,
    QuerySocket,
    Sample,
    SampleRequest,
    SnapshotRequest,
    StackPipe,
    ThreadsReply,
    ThreadsRequest,
)

KILL_SIGNAL = signal.SIGRTMAX - 1  # ends a rank that is the first process of its container, as no SIGKILL inside does
LAUNCHER_KILL_TIMEOUT_S = 2.0  # for the launcher to end a job that has lost a rank
FINAL_EXIT_TIMEOUT_S = 2.0  # after the grace: for a rank to exit by itself, or to end the job


class WatchedRank(NamedTuple):
    """The rank that an agent watches, handed over when that is forked.

    Printed lines call it `name`. The agent of the rank that is `first_on_node` prints what concerns the whole node.
    `step` is the Slurm step of the job's ranks, None if there is none; it is cancelled if nothing else ends them.
    `hosts` returns the hosts to probe while the rank waits in MPI_Init, none on most ranks. `by_srun`: srun itself
    started the rank. Its start may take `timeout_s`. `step_daemon` is the process id of the rank's slurmstepd, 0 for
    none. If no rank has moved for `stall_s`, the coordinator prints that, and ends the job if `stall_abort`; 0 for
    never. It ends a job in which ranks have waited `exit_timeout_s` for a rank that has finished its script.
    """

    name: str
    first_on_node: bool
    step: str | None
    hosts: Callable[[], list[str]]
    by_srun: bool
    timeout_s: float
    step_daemon: int = 0
    stall_s: float = 0.0
    stall_abort: bool = False
    exit_timeout_s: float = BLOCKED_EXIT_TIMEOUT_S


# A rank to its agent


class Stage(NamedTuple):
    """A stage begins; the script has no name, and no deadline either."""

    name: str


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
    """Watch the rank as this member of the job, whose coordinator listens on `address` and `port`, 0 for no port."""

    member: RankIdentity
    address: str
    port: int
    token: str


class ChildStarted(NamedTuple):
    """The script has started the process `pid`, by a fork or as a program."""

    pid: int


class LocallyHandled(NamedTuple):
    """The rank knows why it ends, and prints the reason itself."""


# A rank to its agent, which passes it on to the coordinator


class Failed(NamedTuple):
    """A rank ends for a reason; `gone`: its process has ended already."""

    report: Report
    gone: bool = False


class ReasonPrinted(NamedTuple):
    """The reason for the job's end is printed, so the other ranks may be ended; if not `done`, it is being printed.

    `record` is what the rank's agent writes to --error-file, empty for nothing.
    """

    done: bool = True
    record: str = ""


class CleanupDone(NamedTuple):
    """The rank, which has failed, has nothing more to do."""


class ScriptEnded(NamedTuple):
    """The rank's script has finished.

    `exit_report` is used if other ranks still needed this one and it raised SystemExit with an unknown status.
    """

    exit_report: Report | None = None


class QueryUnfinished(NamedTuple):
    """Ask which ranks' scripts have not finished."""


class Leave(NamedTuple):
    """The rank leaves the job in order."""


# An agent to its rank


class CoordinatorConnected(NamedTuple):
    """Carries a dup of the coordinator's connection, so that it survives the agent's death."""


class RegistrationDone(NamedTuple):
    """The coordinator has admitted the rank, or it cannot be reached."""


class ListenPort(NamedTuple):
    """The answer to `ServeProbes` or `StartCoordinator`, as `request` names it: the port, 0 for a failure.

    The coordinator's listener comes with this.
    """

    number: int
    request: str


class EndRank(NamedTuple):
    """End the rank, and the job with it, with this exit status. END_SIGNAL follows."""

    status: int


# The coordinator to an agent, which passes it on to its rank


class EndDecision(NamedTuple):
    """What a rank that failed has to do: print `verdict`, None if another rank failed first.

    `status` is the job's exit status. If `abort`, the rank has to end the others. An agent without a coordinator
    decides itself.
    """

    verdict: RootCause | None
    status: int
    abort: bool


class UnfinishedRanks(NamedTuple):
    """The answer to `QueryUnfinished`: the ranks, as text."""

    names: str


# An agent to the coordinator


class Hello(NamedTuple):
    """The agent of this rank connects; the rank is process `pid` on `host`, in the namespace of `RankIdentity`."""

    rank: int
    host: str
    pid: int
    namespace: str = ""


class StoppedStatus(NamedTuple):
    """The answer to `QueryStopped`: whether a signal or a debugger holds the rank's process."""

    stopped: bool


class StepDaemonLost(NamedTuple):
    """The rank's slurmstepd, which starts and ends Slurm's ranks of a node, has ended."""


class PeerProcessEnded(NamedTuple):
    """The process of `rank` on the same node has ended."""

    rank: int


class Interrupted(NamedTuple):
    """The rank got a SIGINT."""


class UnaskedStop(NamedTuple):
    """The rank got a stop signal, and its script has not called should_stop() yet."""

    number: int


class AgentLost(NamedTuple):
    """The rank's agent was killed, and the rank itself uses its connection from now on."""


# The coordinator to an agent


class Admitted(NamedTuple):
    """The coordinator has admitted the rank: if the connection closes from now on, the coordinator has ended."""


class WatchPeerProcess(NamedTuple):
    """Report when process `pid` of this node ends, which is `rank`."""

    rank: int
    pid: int


class QueryStopped(NamedTuple):
    """Ask whether the rank's process is stopped."""


class JobEnds(NamedTuple):
    """The job ends with this exit status.

    If `abort`, the rank has to end the others. `waits`: the rank failed too, has its `EndDecision` already, and waits
    for this message to end itself.
    """

    status: int
    abort: bool
    waits: bool = False


class JobFinished(NamedTuple):
    """The job is over, in order."""


RankToCoordinator = Failed | ReasonPrinted | CleanupDone | ScriptEnded | QueryUnfinished | Leave
RankToAgent = (
    Stage | ServeProbes | StartCoordinator | RegisterRank | ChildStarted | LocallyHandled | StackPipe | QuerySocket
    | RelaySocket | RankToCoordinator
)
AgentToRank = CoordinatorConnected | RegistrationDone | ListenPort | EndRank | EndDecision | UnfinishedRanks
Observation = PeerProcessEnded | Interrupted | UnaskedStop | Sample | ThreadsReply | SnapshotRequest
AgentToCoordinator = RankToCoordinator | Observation | Hello | Stage | StoppedStatus | StepDaemonLost | AgentLost
CoordinatorToAgent = (
    Admitted | EndDecision | UnfinishedRanks | WatchPeerProcess | QueryStopped | JobEnds | JobFinished | SampleRequest
    | ThreadsRequest
)
CoordinatorReceives = AgentToCoordinator | AskerToCoordinator
CoordinatorSends = CoordinatorToAgent | CoordinatorToAsker
