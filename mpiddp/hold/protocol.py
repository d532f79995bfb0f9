"""The messages of a hold: its server on rank 0, the template process of each rank, and a client that runs a script."""

from __future__ import annotations

from typing import NamedTuple

MAX_INPUT_BYTES = 2**21  # on stdin, that a rank has not read yet; more is lost


class Ready(NamedTuple):
    """The first message of a template: this rank's has imported everything, or cannot, for a reason."""

    rank: int
    error: str = ""


class StartRun(NamedTuple):
    """The first message of a client: run a script in this `folder`.

    `arguments` are those of `python -m mpiddp`, and `variables` are set before, both in JSON. `python` is the client's.
    If another script runs, this one is refused, unless it `waits`. With `has_input` the client sends what rank 0 reads
    from stdin, and for a prompt what all ranks read.
    """

    arguments: str
    variables: str
    folder: str
    python: str
    waits: bool
    has_input: bool
    is_prompt: bool


class Input(NamedTuple):
    """Give this on stdin; nothing ends it: of the client, and to the templates of the ranks that read it."""

    data: bytes


class Renew(NamedTuple):
    """Import everything again, as it is on disk: of a client, and to the templates."""


class EndHold(NamedTuple):
    """End the hold: of a client, and to the templates."""


class OpenPort(NamedTuple):
    """Listen for the next run's ranks, on rank 0's node."""


class PortOpened(NamedTuple):
    """The answer to `OpenPort`."""

    port: int


class Fork(NamedTuple):
    """Fork a rank of a run. The ranks meet at `port`, where they show that they know `token`."""

    run: StartRun
    port: int
    token: str


class Signal(NamedTuple):
    """Send a signal to the run: of the client, and to the templates."""

    number: int


class Output(NamedTuple):
    """The run has written to stdout, 1, or stderr, 2: from the templates, and to the client."""

    stream: int
    data: bytes


class RankOver(NamedTuple):
    """A rank of the run has ended with this status, and all that it has written is sent."""

    status: int


class RunOver(NamedTuple):
    """The run has ended with this status, or the templates are renewed."""

    status: int


class Refused(NamedTuple):
    """The hold does not do what the client asks for."""

    reason: str


ToTemplate = OpenPort | Fork | Input | Signal | Renew | EndHold
FromTemplate = Ready | PortOpened | Output | RankOver
FromClient = StartRun | Input | Signal | Renew | EndHold
ToClient = Output | RunOver | Refused
FromPeer = FromTemplate | FromClient
ToPeer = ToTemplate | ToClient
