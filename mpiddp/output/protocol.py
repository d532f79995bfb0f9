"""What a rank, its sentinel, and the relay of its output tell each other."""

from __future__ import annotations

from typing import NamedTuple

from ..failure.rank import LogPlan


class Folding(NamedTuple):
    """Fold the output of `rank` with that of others: hand it on to the relay that listens on `address` and `port`.

    With port 0 it is shown here. If it `gathers`, a descriptor that comes with it listens for the relays of other
    ranks: of those that are `expected`, the bits of a hexadecimal number, this one's among them. Relays show each other
    the `token`. Lines are held back for `window_s`. A rank that says more than can be shown waits; if `drops`, lines
    are dropped.
    """

    rank: int
    expected: str
    address: str
    port: int
    token: str
    window_s: float
    drops: bool
    gathers: bool


class Forward(NamedTuple):
    """Pass the output of the rank called `who` on, each line after `prefix`, empty for none, and to a `log`.

    The terminal gets it if it is `shown`: as it is, unless there is a `folding`.
    """

    log: LogPlan
    prefix: str
    who: str
    shown: bool = True
    folding: Folding | None = None


class SettleOutput(NamedTuple):
    """Show what all ranks have written before this, and say when that is done."""


class OutputSettled(NamedTuple):
    """The answer to `SettleOutput`."""


class AskLost(NamedTuple):
    """Tell what the log has lost so far."""


class Lost(NamedTuple):
    """The answer: the first byte that the log has lost, -1 for none."""

    at: int


class RankEnds(NamedTuple):
    """The rank ends by itself, and closes this connection. If it is `in_order`, its log is complete."""

    in_order: bool


class CrashStack(NamedTuple):
    """The rank is gone; `text` is the stack that faulthandler printed, empty unless it has crashed."""

    text: str


class Forwarded(NamedTuple):
    """All of the output is passed on; `lost` tells that stdout did not take all of it."""

    lost: bool


class Outflow(NamedTuple):
    """The relay of the rank's output takes `SettleOutput` and `CrashStack` on the socket whose end comes with this."""
