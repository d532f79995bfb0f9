"""The messages by which it is asked where the ranks of a job are."""

from __future__ import annotations

from typing import NamedTuple

CUT = "  ..."  # at the end of a stack of which the outermost calls are left out
FIRST = ("_run_module_as_main", "_bootstrap")  # the first calls of `python -m`, and of a thread
MODULE = "<module>"  # that of a script

# What a sentinel sends through the socket of `Answers`: tell where you are; flush all files; process %d may trace you.
WHERE, FLUSH, TRACER, TRACER_END = b"?", b"!", b"+", b";"

# A rank to its sentinel


class Stacks(NamedTuple):
    """`Calls` come from the pipe whose end comes with this; the rank's is `descriptor`."""

    descriptor: int


class Calls(NamedTuple):
    """The stack of a process's main thread, told by its interpreter: `text` is as faulthandler prints it."""

    pid: int
    text: str


class Answers(NamedTuple):
    """A thread of the rank does what is asked for through the socket whose other end comes with this."""


class Sight(NamedTuple):
    """What a sentinel sees its rank through; a descriptor is -1 where there is none.

    `Calls` come from `pipe`, into which the rank writes by its own `descriptor`; it answers through `socket`.
    """

    pipe: int = -1
    descriptor: int = -1
    socket: int = -1

    def with_end(self, told: Stacks | Answers, descriptor: int) -> Sight:
        """Return this with the `descriptor` that has come with what the rank told."""
        if isinstance(told, Stacks):
            return self._replace(pipe=descriptor, descriptor=told.descriptor)
        return self._replace(socket=descriptor)


class Progress(NamedTuple):
    """How far the rank is; it answers so when it is asked.

    It has made so many `steps`, the last one `step_age_s` ago. `entered` is JSON: of each process group how many
    collectives the rank has entered there, the group's ranks, and its name. `spins` tells that it computes on a GPU:
    while it waits for that, it uses a processor.
    """

    steps: int
    step_age_s: float
    entered: str
    spins: bool


# One who asks, and the coordinator


class Ask(NamedTuple):
    """Tell where the ranks are."""


class Shown(NamedTuple):
    """Where the ranks are: a picture of where/outliers.py, as where/rendering.py has it in JSON."""

    picture: str


class Inspect(NamedTuple):
    """Show all threads of a rank, and the frames of C code if `native`; `asker` is filled in by the coordinator.

    It passes this on to the rank's sentinel, and the answer back.
    """

    rank: int
    native: bool
    asker: int = -1


class Inspected(NamedTuple):
    """The answer to `Inspect`: what py-spy prints, or why there is nothing."""

    rank: int
    text: str
    asker: int = -1


# The coordinator, and a sentinel


class Where(NamedTuple):
    """Tell where the rank is."""

    number: int


class Whereabouts(NamedTuple):
    """The answer to the `Where` of this number.

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
