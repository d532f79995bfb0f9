"""What two ranks measure of the ways between them: latency, and bandwidth in each direction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..compare.figures import MEETING_LARGE, MEETING_SMALL
from .channels import Channel
from .segments import Segments, segments

PING = 8  # bytes
MOST_PINGS = 300
WINDOW = 8  # messages of 1 MiB that are on their way together, as in osu_bw
MOST_WINDOWS = 20
LEAST_OF_ALONE = 0.25  # the share of its time that a message takes among others: alone it may wait for the most part
FEWEST_SEGMENTS = 500
LEAST_SMALL_S = 0.03  # for messages of 1 MiB, so that a moment of a busy machine is not all that is seen of them
MOMENT_S = 0.1  # for which a machine may be busy; a message that takes longer is slow, and there is no time for more
STREAM_S = 0.4  # long beside the time in which ranks begin


class Trial(NamedTuple):
    """Bytes that went one way, when the first one left and when the last one had come, on the sender's monotonic clock.

    All ranks of a node have that clock, so that the trials of ranks that send at the same time can be added up.
    """

    size: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """The time that it took."""
        return max(self.ended - self.began, 1e-9)


class Ways(NamedTuple):
    """What one rank of two knows after a meeting.

    `latency_s` is half of the median round trip, 0 if it was not measured. The trials are those of the messages that
    this rank has sent, of 1 MiB and of up to 64 MiB. `resent` is the share of the node's TCP segments that were sent
    again while this rank was sending, -1 if it sent too few to tell.
    """

    latency_s: float
    small: tuple[Trial, ...]
    large: tuple[Trial, ...]
    resent: float


class Pace(NamedTuple):
    """How thorough a meeting is: how often the large messages go, and how long each time, and all pings, may take."""

    times: int = 2
    large_s: float = 0.15
    pinging_s: float = 0.15


class Parts(NamedTuple):
    """What is measured in a meeting; it `streams` for a time where other ranks of the node do so as well."""

    pings: bool = True
    small: bool = True
    large: bool = True
    streams: bool = False


def greet(channel: Channel, speaks_first: bool) -> None:
    """Exchange a few bytes with another rank, which calls this too, so that both are connected."""
    for ours in (True, False):
        one_way(channel, [channel.buffer(PING)], ours == speaks_first)


def meet(channel: Channel, speaks_first: bool, pace: Pace, parts: Parts) -> Ways:
    """Measure with another rank, which calls this too; of the two, one `speaks_first`. Raises TimeoutError."""
    greet(channel, speaks_first)
    found = Ways(ping(channel, speaks_first, pace) if parts.pings else 0.0, (), (), -1.0)
    for ours in (True, False):
        if ours == speaks_first:
            before = segments()
            small, large = send(channel, pace, parts)
            found = Ways(found.latency_s, small, large, share(before, segments()))
        else:
            receive(channel)
    return found


def send(channel: Channel, pace: Pace, parts: Parts) -> tuple[tuple[Trial, ...], tuple[Trial, ...]]:
    """Send messages of 1 MiB and of up to 64 MiB, as many and as large as go in the pace's time, and time them.

    The very first one does not count: it may take several times as long, as buffers grow and threads wake up.
    """
    trial(channel, 1, 1)
    alone = [trial(channel, 1, 1)]
    if parts.small and alone[0].seconds < MOMENT_S:
        alone.append(trial(channel, 1, 1))
    end = time.monotonic() + max(LEAST_SMALL_S, pace.large_s)
    small: list[Trial] = []
    window_s = min(one.seconds for one in alone) * WINDOW * LEAST_OF_ALONE
    while parts.small and time.monotonic() + window_s < end and len(small) < MOST_WINDOWS:
        small.append(trial(channel, WINDOW, 1))
    small = small or alone
    best = max(one.size / one.seconds for one in small)
    mebibytes = max(1, min(MEETING_LARGE, int(best * pace.large_s)) // MEETING_SMALL)
    large: list[Trial] = []
    end = time.monotonic() + STREAM_S
    while parts.large and (len(large) < pace.times or (parts.streams and time.monotonic() < end)):
        large.append(trial(channel, 1, mebibytes))
    announce(channel, 0, 0)
    return tuple(small) if parts.small else (), tuple(large)


def trial(channel: Channel, messages: int, mebibytes: int) -> Trial:
    """Send messages that go together."""
    announce(channel, messages, mebibytes)
    return one_way(channel, buffers(channel, messages, mebibytes), True)


def announce(channel: Channel, messages: int, mebibytes: int) -> None:
    """Say what comes next; no messages for the end."""
    word = channel.buffer(PING)
    word[0], word[1] = messages, mebibytes
    channel.send([word])


def receive(channel: Channel) -> None:
    """Receive what the other rank sends."""
    word = channel.buffer(PING)
    channel.receive([word])
    while int(word[0]):
        one_way(channel, buffers(channel, int(word[0]), int(word[1])), False)
        channel.receive([word])


def buffers(channel: Channel, messages: int, mebibytes: int) -> list[Any]:
    """Return memory for messages that are on their way together."""
    room, size = channel.room(), mebibytes * MEETING_SMALL
    return [room[at * size:(at + 1) * size] for at in range(messages)]


def one_way(channel: Channel, messages: list[Any], sends: bool) -> Trial:
    """Send messages and await a word that they have come, or receive them; the two ranks do one each."""
    word = [channel.buffer(PING)]
    began = time.monotonic()
    if sends:
        channel.send(messages)
        channel.receive(word)
    else:
        channel.receive(messages)
        channel.send(word)
    return Trial(sum(len(one) for one in messages), began, time.monotonic())


def ping(channel: Channel, speaks_first: bool, pace: Pace) -> float:
    """Return half of the median of round trips of a few bytes, in seconds.

    The rank that speaks first says with which one it ends.
    """
    word, back = channel.buffer(PING), channel.buffer(PING)
    trips: list[float] = []
    started = time.monotonic()
    while not int(word[0]):
        began = time.monotonic()
        if speaks_first:
            word[0] = len(trips) + 1 >= MOST_PINGS or began - started > pace.pinging_s
            channel.send([word])
            channel.receive([back])
        else:
            channel.receive([word])
            channel.send([back])
        trips.append(time.monotonic() - began)
    return statistics.median(trips) / 2


def share(before: Segments, after: Segments) -> float:
    """Return the share of the segments that were sent again, -1 if there were too few to tell."""
    sent = after.sent - before.sent
    return (after.again - before.again) / sent if sent >= FEWEST_SEGMENTS else -1.0


def together(told: Sequence[Sequence[Trial]]) -> float:
    """Return the bytes per second of ranks of one node: the best trial of one alone, the sum of several's averages.

    Those of several are 0 if they have not sent at the same time for the most part.
    """
    if len(told) == 1:
        return max((one.size / one.seconds for one in told[0]), default=0.0)
    began, ended = [trials[0].began for trials in told], [trials[-1].ended for trials in told]
    if min(ended) - max(began) < (max(ended) - min(began)) / 2:
        return 0.0
    return sum(sum(one.size for one in trials) / (end - begin)
               for trials, begin, end in zip(told, began, ended, strict=True))
