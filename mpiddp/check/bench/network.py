"""Benchmarks of several ranks: latency, bandwidth and clock offset of two, an all-reduce of all."""

from __future__ import annotations

import functools
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ...base.files import read_text

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_MESSAGE_BYTES = 2**26
PAIR_TAG, CLOCK_TAG = 2, 5  # the roll call and the controller have others
SPIN_S, PAUSE_S = 0.0001, 0.00001  # Linux makes the pause five times as long (timerslack, man 2 prctl)
ABORT_TIMEOUT = timedelta(milliseconds=1)
NCCL_WATCHDOG_TIMEOUT = timedelta(hours=1)  # the watchdog would end the process whose partner is lost

_abandoned: list[Any] = []  # MPI requests with their memory: another rank may still write to it


class Channel(NamedTuple):
    """Functions by which two ranks exchange bytes, each with a buffer; they raise TimeoutError.

    `new_buffer` returns memory of a size on the channel's device; `message_buffer` that of the largest message: the
    same for all channels of a process, so that its pages exist. `send` returns when the buffer can be used again.
    """

    new_buffer: Callable[[int], Any]
    message_buffer: Callable[[], Any]
    send: Callable[[Any], None]
    receive: Callable[[Any], None]


def mpi_channel(comm: MPI.Comm, partner: int, deadline: float, tag: int = PAIR_TAG) -> Channel:
    """Return a channel between the host memories of two ranks, over MPI."""
    def wait(request: MPI.Request) -> None:
        # poll, at first without a pause, then with pauses for other processes
        start = time.monotonic()
        while not request.Test():
            now = time.monotonic()
            if now > deadline:
                _abandoned.append(request)
                raise TimeoutError(f"no MPI message from rank {partner}")
            if now - start > SPIN_S:
                time.sleep(PAUSE_S)

    return Channel(bytearray, lambda: memoryview(host_buffer()), lambda buffer: wait(comm.Isend(buffer, partner, tag)),
                   lambda buffer: wait(comm.Irecv(buffer, partner, tag)))


def backend_channel(group: Any, partner: int, device: torch.device, deadline: float) -> Channel:
    """Return a channel between the devices of two ranks, over a group of the job's backend with only these two."""
    def run(start: Callable[[list[Any], int, int], dist.Work]) -> Callable[[Any], None]:
        return lambda buffer: run_backend_work(lambda: start([buffer], partner, 0), device, deadline)

    return Channel(lambda size: torch.zeros(size, dtype=torch.uint8, device=device), lambda: device_buffer(device),
                   run(group.send), run(group.recv))


@functools.cache
def host_buffer() -> bytearray:
    """Return host memory for the largest message."""
    return bytearray(b"1") * MAX_MESSAGE_BYTES


@functools.cache
def device_buffer(device: torch.device) -> torch.Tensor:
    """Return device memory for the largest message."""
    return torch.ones(MAX_MESSAGE_BYTES, dtype=torch.uint8, device=device)


def run_backend_work(start: Callable[[], dist.Work], device: torch.device, deadline: float) -> None:
    """Start a backend's work and return when it is done.

    Raises TimeoutError after `deadline`, and if the backend fails, as it does when another rank is gone. On a device a
    wait with a timeout would poll once in a millisecond (WorkNCCL::wait in torch's ProcessGroupNCCL.cpp); without a
    timeout the device's stream waits, and not this thread.
    """
    try:
        work = start()
        if device.type == "cpu":
            work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
        else:
            work.wait()
    except RuntimeError as error:  # dist.DistBackendError is one
        raise TimeoutError(str(error).splitlines()[0]) from None
    try:
        wait_for_device(device, deadline)
    except TimeoutError:
        with suppress(RuntimeError):
            work.wait(ABORT_TIMEOUT)  # NCCL then aborts its communicator, which would block the device for ever
        raise


def wait_for_device(device: torch.device, deadline: float) -> None:
    """Wait until a device has done all its work; raise TimeoutError after `deadline`."""
    if device.type == "cpu":
        return
    event = torch.get_device_module(device).Event()
    event.record()
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"work on {device} did not finish")


class PairGroups:
    """A rank's groups with one other rank each, created over the job's store when the two first meet.

    torch's new_group() names groups by a counter, so both ranks would have to create the same number of groups. The
    backend's own class is used instead, as torch does (distributed_c10d._new_process_group_helper). If the other rank
    does not respond, the group stays unusable; the rest of the job does not wait for it.
    """

    def __init__(self, rank: int, backend: str, device: torch.device, store: dist.Store) -> None:
        self._rank, self._backend, self._device, self._store = rank, backend, device, store
        self._groups: dict[int, Any] = {}

    def channel(self, partner: int, deadline: float) -> Channel:
        """Return a channel to another rank; raise TimeoutError if it does not take part."""
        pair = sorted((self._rank, partner))
        own = pair.index(self._rank)
        if partner not in self._groups:
            store = dist.PrefixStore(f"pair/{pair[0]}/{pair[1]}", self._store)
            timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            store.set_timeout(timeout)
            try:
                self._groups[partner] = _new_group_of_two(self._backend, store, own, timeout)
            except RuntimeError as error:  # dist.DistStoreError is one
                raise TimeoutError(f"no group with rank {partner}: {str(error).splitlines()[0]}") from None
        return backend_channel(self._groups[partner], 1 - own, self._device, deadline)


def _new_group_of_two(backend: str, store: dist.Store, rank: int, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, 2, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_WATCHDOG_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    return dist.Backend._plugins[backend.upper()].creator_fn(store, rank, 2, timeout)


def pairwise_backend(backend: str, device: torch.device) -> str:
    """Return the backend of a device, also from "cpu:gloo,cuda:nccl"; empty if it cannot make groups of two."""
    by_device = dict(part.split(":") for part in backend.split(",") if ":" in part)
    name = by_device.get(device.type, backend)
    plugin = getattr(dist.Backend, "_plugins", {}).get(name.upper())
    return name if name in ("gloo", "nccl") or (plugin is not None and not plugin.extended_api) else ""


PING_BYTES, MAX_PINGS = 8, 300
MEBIBYTE = 2**20
LARGEST_TRANSFERS = 2  # of the largest size that fits the time; the better one counts
STREAM_S = 0.4  # long compared with the difference of the ranks' start times
MIN_SEGMENTS = 500  # 1 %, the limit for a finding, are then five segments
TIMESTAMP = struct.Struct("d")
CLOCK_TRIPS = 10
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


def benchmark_link(channel: Channel, speaks_first: bool, seconds: float, benchmark: Benchmark) -> LinkResult:
    """Measure the link to another rank, which calls this too; one of the two `speaks_first`. Raises TimeoutError.

    The latency may take `seconds`, and so may the transfers in each direction.
    """
    exchange_greeting(channel, speaks_first)
    latency_s, retransmits = 0.0, None
    transfers: tuple[Transfer, ...] = ()
    if benchmark != Benchmark.STREAM:
        latency_s = measure_latency(channel, speaks_first, seconds)
    for sends in (speaks_first, not speaks_first) if benchmark != Benchmark.LATENCY else ():
        if sends:
            sent_before, again_before = tcp_segments()
            transfers = send_transfers(channel, seconds, benchmark == Benchmark.STREAM)
            sent, again = tcp_segments()
            if sent - sent_before >= MIN_SEGMENTS:
                retransmits = (again - again_before) / (sent - sent_before)
        else:
            receive_transfers(channel)
    return LinkResult(latency_s, transfers, retransmits)


def exchange_greeting(channel: Channel, speaks_first: bool) -> None:
    """Exchange a few bytes with another rank, which calls this too, so that both are connected."""
    for sends in (speaks_first, not speaks_first):
        transfer(channel, channel.new_buffer(PING_BYTES), sends)


def send_transfers(channel: Channel, seconds: float, streams: bool) -> tuple[Transfer, ...]:
    """Send messages of 1 MiB and more, doubling the size while it fits `seconds`; return the largest ones.

    If it `streams`, send more of these for STREAM_S. The first message does not count: it may take several times as
    long, because buffers grow and threads wake up.
    """
    _send_message(channel, 1)
    mebibytes, last = 1, _send_message(channel, 1)
    while mebibytes < MAX_MESSAGE_BYTES // MEBIBYTE and last.seconds * (1 + LARGEST_TRANSFERS) * 2 < seconds:
        mebibytes *= 2
        last = _send_message(channel, mebibytes)
    largest = [last]
    end = time.monotonic() + STREAM_S
    while len(largest) < LARGEST_TRANSFERS or (streams and time.monotonic() < end):
        largest.append(_send_message(channel, mebibytes))
    _announce_size(channel, 0)
    return tuple(largest)


def receive_transfers(channel: Channel) -> None:
    """Receive the messages of the other rank's send_transfers()."""
    size = channel.new_buffer(PING_BYTES)
    channel.receive(size)
    while mebibytes := int(size[0]):
        transfer(channel, channel.message_buffer()[:mebibytes * MEBIBYTE], sends=False)
        channel.receive(size)


def _send_message(channel: Channel, mebibytes: int) -> Transfer:
    _announce_size(channel, mebibytes)
    return transfer(channel, channel.message_buffer()[:mebibytes * MEBIBYTE], sends=True)


def _announce_size(channel: Channel, mebibytes: int) -> None:
    # of the next message, 0 for the end
    size = channel.new_buffer(PING_BYTES)
    size[0] = mebibytes
    channel.send(size)


def transfer(channel: Channel, message: Any, sends: bool) -> Transfer:
    """Send a message and wait for its confirmation, or receive it and confirm; each rank does one of the two."""
    confirmation = channel.new_buffer(PING_BYTES)
    start = time.monotonic()
    if sends:
        channel.send(message)
        channel.receive(confirmation)
    else:
        channel.receive(message)
        channel.send(confirmation)
    return Transfer(len(message), start, time.monotonic())


def measure_latency(channel: Channel, speaks_first: bool, limit_s: float) -> float:
    """Return half of the median round trip of a few bytes, in seconds; the first speaker marks the last one."""
    ping, reply = channel.new_buffer(PING_BYTES), channel.new_buffer(PING_BYTES)
    trips: list[float] = []
    first_start = time.monotonic()
    while not int(ping[0]):
        start = time.monotonic()
        if speaks_first:
            ping[0] = len(trips) + 1 >= MAX_PINGS or start - first_start > limit_s
            channel.send(ping)
            channel.receive(reply)
        else:
            channel.receive(ping)
            channel.send(reply)
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


def clock_offset(channel: Channel, asks: bool) -> float:
    """Return by how many seconds the other rank's clock is ahead, on the rank that `asks`; 0 on the other.

    As in NTP (RFC 5905), the other's time is assigned to the middle of the shortest of several round trips.
    """
    buffer = bytearray(TIMESTAMP.size)
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_TRIPS):
        if asks:
            start, own_time = time.monotonic(), time.time()
            channel.send(buffer)
            channel.receive(buffer)
            duration_s = time.monotonic() - start
            best = min(best, (duration_s, TIMESTAMP.unpack(buffer)[0] - own_time - duration_s / 2))
        else:
            channel.receive(buffer)
            buffer[:] = TIMESTAMP.pack(time.time())
            channel.send(buffer)
    return best[1] if asks else 0.0


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
