"""Messages about output: of a rank to its agent, and of agents to one that folds the output of several ranks."""

from __future__ import annotations

from typing import NamedTuple

from ..base.ranks import LogPlan


class AggregationConfig(NamedTuple):
    """Merge the output of `rank` with that of other ranks: send it to the agent that listens on `address` and `port`.

    With port 0 this agent shows it. If this agent `gathers`, the message carries a descriptor on which it accepts the
    agents of the `expected` ranks, the bits of a hexadecimal number; they include this rank. Agents authenticate with
    the `token`. A line waits `window_s` for other ranks. A rank that prints faster than its output can be shown is
    blocked; if `drops`, its lines are dropped instead. Lines that differ in numbers are merged, unless the
    configuration `keeps_numbers`.
    """

    rank: int
    expected: str
    address: str
    port: int
    token: str
    window_s: float
    drops: bool
    gathers: bool
    keeps_numbers: bool = False


class ForwardConfig(NamedTuple):
    """Forward the output of the rank called `who`, with `prefix` before each line, and write a `log`.

    It goes to the terminal if it is `shown`, unchanged unless there is a `folding`.
    """

    log: LogPlan
    prefix: str
    who: str
    shown: bool = True
    folding: AggregationConfig | None = None


class OutputConfigured(NamedTuple):
    """The answer to `ForwardConfig`: what the rank writes from now on is forwarded so."""


class ShowText(NamedTuple):
    """Print a text of mpiddp's own on the terminal, after what the rank has written."""

    text: str


OutputRequest = ForwardConfig | ShowText


# A source of output, which is a rank or a node's aggregator, to its aggregator


class Flush(NamedTuple):
    """Show all output that the ranks have written so far, then answer `Flushed`."""


class Flushed(NamedTuple):
    """The answer to `Flush`."""


class ServedRanks(NamedTuple):
    """The source sends the output of these ranks, the bits of a hexadecimal number."""

    ranks: str


class Output(NamedTuple):
    """Bytes that a rank has written to a stream, 1 or 2; none if the stream pauses."""

    stream: int
    data: bytes


class Lines(NamedTuple):
    """Lines of several ranks, merged, as JSON of encode_lines()."""

    data: bytes


class Bars(NamedTuple):
    """The states of progress bars, as JSON of encode_bars()."""

    data: bytes


class RanksDone(NamedTuple):
    """These ranks, the bits of a hexadecimal number, send no more output."""

    ranks: str


class Drained(NamedTuple):
    """The answer to `Drain`."""


# An aggregator to its source


class Accepted(NamedTuple):
    """So many bytes of output were accepted."""

    size: int


class Drain(NamedTuple):
    """Send all output written so far, then answer `Drained`."""


ToAggregator = ServedRanks | Output | Lines | Bars | RanksDone | Flush | Drained
FromAggregator = Accepted | Drain | Flushed
