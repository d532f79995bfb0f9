"""Benchmarks of several ranks: latency and bandwidth of two, an all-reduce of all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...base.files import read_text
from .transport import MAX_MESSAGE_BYTES, Transport, run_backend_work

PING_BYTES, MAX_PINGS = 8, 300
MEBIBYTE = 2**20
LARGEST_TRANSFERS = 2  # of the largest size that fits the time; the better one counts
STREAM_S = 0.4  # long compared with the difference of the ranks' start times
MIN_SEGMENTS = 500  # 1 %, the limit for a finding, are then five segments
SNMP = "/proc/net/snmp"


class Benchmark(Enum):
    """What two ranks measure: latency and bandwidth, latency only, or bandwidth with all ranks of the nodes at once."""

    FULL = 1
    LATENCY = 2
    STREAM = 3


class Transfer(NamedTuple):
    """A message of `size` bytes, from the start of sending to its confirmation, on the sender's monotonic clock.

    All ranks of a node have the same monotonic clock, so simultaneous transfers can be added.
    """

    size: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """The duration."""
        return max(self.end - self.start, 1e-9)


class LinkResult(NamedTuple):
    """The results of one of two ranks.

    `latency_s` is half of the median round trip, 0 if not measured. `transfers` are the messages that this rank sent.
    `retransmits` is the share of the node's TCP segments that were retransmitted meanwhile, None if there were too few.
    """

    latency_s: float
    transfers: tuple[Transfer, ...]
    retransmits: float | None


def benchmark_link(transport: Transport, speaks_first: bool, seconds: float, benchmark: Benchmark) -> LinkResult:
    """Measure the link to another rank, which calls this too; one of the two `speaks_first`. Raises TimeoutError.

    The latency may take `seconds`, and so may the transfers in each direction.
    """
    exchange_greeting(transport, speaks_first)
    latency_s, retransmits = 0.0, None
    transfers: tuple[Transfer, ...] = ()
    if benchmark != Benchmark.STREAM:
        latency_s = measure_latency(transport, speaks_first, seconds)
    for sends in (speaks_first, not speaks_first) if benchmark != Benchmark.LATENCY else ():
        if sends:
            sent_before, again_before = tcp_segments()
            transfers = send_transfers(transport, seconds, benchmark == Benchmark.STREAM)
            sent, again = tcp_segments()
            if sent - sent_before >= MIN_SEGMENTS:
                retransmits = (again - again_before) / (sent - sent_before)
        else:
            receive_transfers(transport)
    return LinkResult(latency_s, transfers, retransmits)


def exchange_greeting(transport: Transport, speaks_first: bool) -> None:
    """Exchange a few bytes with another rank, which calls this too, so that both are connected."""
    for sends in (speaks_first, not speaks_first):
        transfer(transport, transport.new_buffer(PING_BYTES), sends)


def send_transfers(transport: Transport, seconds: float, streams: bool) -> tuple[Transfer, ...]:
    """Send messages of 1 MiB and more, doubling the size while it fits `seconds`; return the largest ones.

    If it `streams`, send more of these for STREAM_S. The first message does not count: it may take several times as
    long, because buffers grow and threads wake up.
    """
    _send_message(transport, 1)
    mebibytes, last = 1, _send_message(transport, 1)
    while mebibytes < MAX_MESSAGE_BYTES // MEBIBYTE and last.seconds * (1 + LARGEST_TRANSFERS) * 2 < seconds:
        mebibytes *= 2
        last = _send_message(transport, mebibytes)
    largest = [last]
    end = time.monotonic() + STREAM_S
    while len(largest) < LARGEST_TRANSFERS or (streams and time.monotonic() < end):
        largest.append(_send_message(transport, mebibytes))
    _announce_size(transport, 0)
    return tuple(largest)


def receive_transfers(transport: Transport) -> None:
    """Receive the messages of the other rank's send_transfers()."""
    size = transport.new_buffer(PING_BYTES)
    transport.receive(size)
    while mebibytes := int(size[0]):
        transfer(transport, transport.message_buffer()[:mebibytes * MEBIBYTE], sends=False)
        transport.receive(size)


def _send_message(transport: Transport, mebibytes: int) -> Transfer:
    _announce_size(transport, mebibytes)
    return transfer(transport, transport.message_buffer()[:mebibytes * MEBIBYTE], sends=True)


def _announce_size(transport: Transport, mebibytes: int) -> None:
    # of the next message, 0 for the end
    size = transport.new_buffer(PING_BYTES)
    size[0] = mebibytes
    transport.send(size)


def transfer(transport: Transport, message: Any, sends: bool) -> Transfer:
    """Send a message and wait for its confirmation, or receive it and confirm; each rank does one of the two."""
    confirmation = transport.new_buffer(PING_BYTES)
    start = time.monotonic()
    if sends:
        transport.send(message)
        transport.receive(confirmation)
    else:
        transport.receive(message)
        transport.send(confirmation)
    return Transfer(len(message), start, time.monotonic())


def measure_latency(transport: Transport, speaks_first: bool, limit_s: float) -> float:
    """Return half of the median round trip of a few bytes, in seconds; the first speaker marks the last one."""
    ping, reply = transport.new_buffer(PING_BYTES), transport.new_buffer(PING_BYTES)
    trips: list[float] = []
    first_start = time.monotonic()
    while not int(ping[0]):
        start = time.monotonic()
        if speaks_first:
            ping[0] = len(trips) + 1 >= MAX_PINGS or start - first_start > limit_s
            transport.send(ping)
            transport.receive(reply)
        else:
            transport.receive(ping)
            transport.send(reply)
        trips.append(time.monotonic() - start)
    return statistics.median(trips) / 2


def tcp_segments() -> tuple[int, int]:
    """Return how many TCP segments this network namespace has sent, and retransmitted; 0 if unknown.

    The kernel counts the segments that a network card makes of larger ones (RFC 4022, tcpOutSegs, tcpRetransSegs).
    """
    names, values = ([line.split() for line in read_text(SNMP).splitlines() if line.startswith("Tcp:")] or [[], []])[:2]
    counters = dict(zip(names, values, strict=False))
    return int(counters.get("OutSegs", 0)), int(counters.get("RetransSegs", 0))


def total_bandwidth(by_rank: Sequence[Sequence[Transfer]]) -> float:
    """Return the B/s of a node: the best transfer of a single rank, or the sum of several ranks' averages.

    The sum is 0 unless the ranks sent simultaneously for more than half of the time.
    """
    if len(by_rank) == 1:
        return max((transfer.size / transfer.seconds for transfer in by_rank[0]), default=0.0)
    starts, ends = [transfers[0].start for transfers in by_rank], [transfers[-1].end for transfers in by_rank]
    if min(ends) - max(starts) < (max(ends) - min(starts)) / 2:
        return 0.0
    return sum(sum(transfer.size for transfer in transfers) / (end - start)
               for transfers, start, end in zip(by_rank, starts, ends, strict=True))


def time_allreduce(size: int, repeats: int, device: torch.device, deadline: float) -> float:
    """All-reduce `size` bytes of float32 and return the seconds, the average of `repeats` after a warm-up.

    Collective over the default group. Raises TimeoutError.
    """
    data = torch.zeros(max(1, size // 4), device=device)

    def reduce() -> dist.Work:
        work: dist.Work | None = dist.all_reduce(data, async_op=True)
        assert work is not None
        return work

    run_backend_work(reduce, device, deadline)
    start = time.monotonic()
    for _ in range(repeats):
        run_backend_work(reduce, device, deadline)
    return (time.monotonic() - start) / repeats
