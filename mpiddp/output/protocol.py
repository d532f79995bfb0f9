"""Messages of a rank and its agent to the rank's output relay, and the relay's answers."""

from __future__ import annotations

from typing import NamedTuple

from ..base.ranks import LogPlan


class AggregationConfig(NamedTuple):
    """Merge the output of `rank` with that of other ranks: send it to the relay that listens on `address` and `port`.

    With port 0 this relay shows it. If this relay `gathers`, the message carries a descriptor on which it accepts the
    relays of the `expected` ranks, the bits of a hexadecimal number; they include this rank. Relays authenticate with
    the `token`. A line waits `window_s` for other ranks. A rank that prints faster than its output can be shown is
    blocked; if `drops`, its lines are dropped instead.
    """

    rank: int
    expected: str
    address: str
    port: int
    token: str
    window_s: float
    drops: bool
    gathers: bool


class ForwardConfig(NamedTuple):
    """Forward the output of the rank called `who`, with `prefix` before each line, and write a `log`.

    It goes to the terminal if it is `shown`, unchanged unless there is a `folding`.
    """

    log: LogPlan
    prefix: str
    who: str
    shown: bool = True
    folding: AggregationConfig | None = None


class RelaySocket(NamedTuple):
    """Carries the relay's end of the socket over which it and the rank's agent exchange messages."""


class Flush(NamedTuple):
    """Show all output that the ranks have written so far, then answer `Flushed`."""


class Flushed(NamedTuple):
    """The answer to `Flush`."""


class QueryLoss(NamedTuple):
    """Ask which part of the log is lost so far."""


class LossReply(NamedTuple):
    """The answer to `QueryLoss`: the position of the first byte that the log has lost, -1 for none."""

    first_byte: int


class RankEnds(NamedTuple):
    """The rank exits by itself and closes this connection."""


class Forwarded(NamedTuple):
    """All output is forwarded; `lost` says whether stdout lost some of it."""

    lost: bool


class CrashStack(NamedTuple):
    """The rank has exited; `text` is the stack that faulthandler printed, empty unless it crashed."""

    text: str


RankToRelay = ForwardConfig | RelaySocket | Flush | QueryLoss | RankEnds
RelayToRank = Flushed | LossReply | Forwarded
AgentToRelay = Flush | CrashStack
RelayToAgent = Flushed
