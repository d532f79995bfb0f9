"""The messages that ask for stacks and progress: of a rank, of its sentinel, of the coordinator, and of a user."""

from __future__ import annotations

import signal
from typing import NamedTuple

ASK_SIGNAL = signal.SIGRTMAX - 2  # asks a rank, or a process that it has forked, for its `StackSample`

# What a sentinel sends through the socket of `QuerySocket`: send stack and progress; flush all files; process %d may
# trace you.
WHERE, FLUSH, TRACER, TRACER_END = b"?", b"!", b"+", b";"

# A rank to its sentinel


class StackPipe(NamedTuple):
    """Carries the reading end of the pipe into which the rank writes a `StackSample`, by its own `descriptor`."""

    descriptor: int


class QuerySocket(NamedTuple):
    """Carries the sentinel's end of the socket through which a thread of the rank is asked."""


class StackSample(NamedTuple):
    """The stack of a process's main thread, read by its own interpreter; `text` is as faulthandler prints it."""

    pid: int
    text: str


class InspectFds(NamedTuple):
    """The descriptors by which a sentinel inspects its rank, each -1 if there is none.

    A `StackSample` comes from `pipe`, into which the rank writes by its own `descriptor`; it answers through `socket`.
    """

    pipe: int = -1
    descriptor: int = -1
    socket: int = -1

    def with_end(self, message: StackPipe | QuerySocket, descriptor: int) -> InspectFds:
        """Return this with the `descriptor` that has come with the rank's message."""
        if isinstance(message, StackPipe):
            return self._replace(pipe=descriptor, descriptor=message.descriptor)
        return self._replace(socket=descriptor)


class Progress(NamedTuple):
    """How far the rank is, as it answers to WHERE.

    It has made so many `steps`, the last one `step_age_s` ago. `entered` is JSON: of each process group how many
    collectives the rank has entered there, the group's ranks, and its name. `spins` tells that it computes on a GPU:
    while it waits for that, it uses a processor.
    """

    steps: int
    step_age_s: float
    entered: str
    spins: bool


# A user's command, and the coordinator


class SnapshotRequest(NamedTuple):
    """Ask where the ranks are; a sentinel asks for its rank's SIGQUIT, and the coordinator prints the answer."""


class SnapshotReply(NamedTuple):
    """Where the ranks are: `snapshot` is the JSON of where/rendering.py."""

    snapshot: str


class ThreadsRequest(NamedTuple):
    """Ask for the stacks of all threads of a rank, with the frames of C code if `native`.

    The coordinator fills in the `asker`, sends this on to the rank's sentinel, and the answer back.
    """

    rank: int
    native: bool
    asker: int = -1


class ThreadsReply(NamedTuple):
    """The answer to `ThreadsRequest`: what py-spy prints, or why there is nothing."""

    rank: int
    text: str
    asker: int = -1


# The coordinator, and a sentinel


class SampleRequest(NamedTuple):
    """Ask where the rank is."""

    number: int


class Sample(NamedTuple):
    """The answer to the `SampleRequest` of this number.

    `stack` is one of failure/stack.py, empty if there is none; `progress` is None if the rank has not sent it.
    `busy_s`, `moved_bytes`, `faults`, `unseen` and `native` are as in where/snapshot.py. `children` is JSON: of each
    process that the rank has forked its number, its stack, its state, the kernel's function that it sleeps in, the name
    of the program if it is another one, and `native`.
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


RankSample = StackSample | Progress
AskerToCoordinator = SnapshotRequest | ThreadsRequest
CoordinatorToAsker = SnapshotReply | ThreadsReply
