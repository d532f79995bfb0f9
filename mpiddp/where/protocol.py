"""The messages by which a user, the coordinator and an agent request stacks and progress."""

from __future__ import annotations

import signal
from typing import NamedTuple

ASK_SIGNAL = signal.SIGRTMAX - 2  # requests the `StackSample` of a rank, or of a process that it has forked

# Requests of an agent on the socket to a thread of its rank: send stack and progress; flush all files and end the rank.
WHERE, END = b"?", b"!"

# From a rank to its agent


class StackSample(NamedTuple):
    """The stack of a process's main thread, read by its own interpreter; `text` is in faulthandler's format."""

    pid: int
    text: str


class InspectFds(NamedTuple):
    """The descriptors by which an agent inspects its rank, each -1 if there is none.

    The rank writes a `StackSample` to `pipe` through its own `descriptor`, and answers requests on `socket`.
    """

    pipe: int = -1
    descriptor: int = -1
    socket: int = -1


class Progress(NamedTuple):
    """The rank's progress, in its answer to WHERE.

    It has made `steps`, the last one `step_age_s` ago. `entered` is JSON: for each process group the number of
    collectives that the rank has entered, the group's ranks, and its name. `spins`: the rank uses a GPU, and may
    busy-wait for it. `waits_in` is the name of the group in whose collective the main thread is, empty if unknown.
    """

    steps: int
    step_age_s: float
    entered: str
    spins: bool
    waits_in: str = ""


# Between a user's command and the coordinator


class SnapshotRequest(NamedTuple):
    """Request a snapshot. If an agent sends this, for its rank's SIGQUIT, the coordinator prints the snapshot."""


class SnapshotReply(NamedTuple):
    """The answer to `SnapshotRequest`, as JSON of where/snapshot.py."""

    snapshot: str


class ThreadsRequest(NamedTuple):
    """Request the stacks of all threads of a rank, with the frames of C code if `native`.

    The coordinator sets `asker`, forwards this to the rank's agent, and the reply to the asker.
    """

    rank: int
    native: bool
    asker: int = -1


class ThreadsReply(NamedTuple):
    """The answer to `ThreadsRequest`: the output of py-spy, or why there is none."""

    rank: int
    text: str
    asker: int = -1


# Between the coordinator and an agent


class SampleRequest(NamedTuple):
    """Request a sample of the rank; without `signals` only what its own thread and the kernel tell.

    To sample its children, and a rank whose thread does not answer, takes a signal or py-spy.
    """

    number: int
    signals: bool = True


class Sample(NamedTuple):
    """The answer to the `SampleRequest` with this number.

    `stack` is JSON of failure/stack.py, empty if there is none; `progress` is None if the rank has not sent it.
    `busy_s`, `moved_bytes`, `faults`, `unseen`, `native` and `unacked_bytes` are as in where/snapshot.py. `children` is
    JSON: for each process that the rank has forked its pid, its stack, its state, the kernel function in which it
    sleeps, the name of its program if that is not the rank's, and `native`.
    """

    number: int
    stack: str
    state: str
    kernel: str
    cores: float
    busy_s: float
    moved_bytes: int
    ended: bool
    children: str
    progress: Progress | None = None
    faults: int = 0
    unseen: str = ""
    native: str = ""
    unacked_bytes: int = 0


RankSample = StackSample | Progress
AskerToCoordinator = SnapshotRequest | ThreadsRequest
CoordinatorToAsker = SnapshotReply | ThreadsReply
