"""The messages of a rank and its sentinel to the relay of the rank's output, and the relay's answers."""

from __future__ import annotations

from typing import NamedTuple

from ..failure.rank import LogPlan


class AggregationConfig(NamedTuple):
    """Merge the output of `rank` with that of other ranks: send it to the relay that listens on `address` and `port`.

    With port 0 this relay shows it. If it `gathers`, a descriptor that comes with this listens for the relays of other
    ranks: of those that are `expected`, the bits of a hexadecimal number, this rank's among them. Relays authenticate
    by the `token`. Lines are held back for `window_s`. A rank that prints more than can be shown is blocked; if
    `drops`, lines are dropped.
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
    """Forward the output of the rank called `who`, each line after `prefix`, empty for none, and write a `log`.

    The terminal gets it if it is `shown`: as it is, unless there is a `folding`.
    """

    log: LogPlan
    prefix: str
    who: str
    shown: bool = True
    folding: AggregationConfig | None = None


class RelaySocket(NamedTuple):
    """Carries one end of a socket between the rank's sentinel and the relay, by which they exchange messages."""


class Flush(NamedTuple):
    """Show what all ranks have written so far, then answer `Flushed`."""


class Flushed(NamedTuple):
    """The answer to `Flush`."""


class QueryLoss(NamedTuple):
    """Ask what the log has lost so far."""


class LossReply(NamedTuple):
    """The answer to `QueryLoss`: the first byte that the log has lost, -1 for none."""

    first_byte: int


class RankEnds(NamedTuple):
    """The rank ends by itself, and closes this connection. If it is `in_order`, its log is complete."""

    in_order: bool


class Forwarded(NamedTuple):
    """All of the output is forwarded; `lost` tells that stdout did not take all of it."""

    lost: bool


class CrashStack(NamedTuple):
    """The rank is gone; `text` is the stack that faulthandler printed, empty unless it has crashed."""

    text: str


RankToRelay = ForwardConfig | RelaySocket | Flush | QueryLoss | RankEnds
RelayToRank = Flushed | LossReply | Forwarded
SentinelToRelay = Flush | CrashStack
RelayToSentinel = Flushed
