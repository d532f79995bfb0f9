"""What ranks measure together: latency, bandwidth and clock offset between two, an all-reduce of all."""

from __future__ import annotations

import functools
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ...base.files import read_text

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST = 2**26  # bytes of a message
TAG, CLOCK_TAG = 2, 5  # of messages of a channel; the roll call and the controller have others
OVER = timedelta(milliseconds=1)
SPIN_S, PAUSE_S = 0.0001, 0.00001  # Linux makes the pause five times as long (timerslack, man 2 prctl)

_left: list[Any] = []  # requests that were given up, with their memory, into which another rank may still write


class Channel(Protocol):
    """Two ranks that exchange bytes."""

    def buffer(self, size: int) -> Any:
        """Return memory of `size` bytes that can be sent, on the device that the channel serves."""

    def room(self) -> Any:
        """Return such memory for the largest messages: of each process the same, so that its pages are there."""

    def send(self, buffers: list[Any]) -> None:
        """Send buffers; return when they may be used again. Raises TimeoutError."""

    def receive(self, buffers: list[Any]) -> None:
        """Fill buffers with what the other rank sends. Raises TimeoutError."""


class OverMpi:
    """A channel between the host memories of two ranks of a communicator, by MPI's own messages."""

    def __init__(self, comm: MPI.Comm, partner: int, deadline: float, tag: int = TAG) -> None:
        self._comm, self._partner, self._deadline, self._tag = comm, partner, deadline, tag

    def buffer(self, size: int) -> bytearray:
        """Return memory of the host."""
        return bytearray(size)

    def room(self) -> memoryview:
        """Return memory of the host for the largest messages."""
        return memoryview(host_room())

    def send(self, buffers: list[bytearray]) -> None:
        """Send buffers."""
        self._await([self._comm.Isend(one, self._partner, self._tag) for one in buffers])

    def receive(self, buffers: list[bytearray]) -> None:
        """Fill buffers."""
        self._await([self._comm.Irecv(one, self._partner, self._tag) for one in buffers])

    def _await(self, requests: list[MPI.Request]) -> None:
        """Look until all is through: at first without a pause, then let others have the core in between."""
        began = time.monotonic()
        for request in requests:
            while not request.Test():
                now = time.monotonic()
                if now > self._deadline:
                    _left.extend(requests)
                    raise TimeoutError(f"rank {self._partner} is silent over MPI")
                if now - began > SPIN_S:
                    time.sleep(PAUSE_S)


class OverBackend:
    """A channel between the devices of two ranks, by the job's backend, which has a group of these two alone."""

    def __init__(self, group: Any, other: int, device: torch.device, deadline: float) -> None:
        self._group, self._other, self._device, self._deadline = group, other, device, deadline

    def buffer(self, size: int) -> torch.Tensor:
        """Return memory of the rank's device."""
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def room(self) -> torch.Tensor:
        """Return memory of the rank's device for the largest messages."""
        return device_room(self._device)

    def send(self, buffers: list[torch.Tensor]) -> None:
        """Send buffers."""
        self._await(lambda one: self._group.send([one], self._other, 0), buffers)

    def receive(self, buffers: list[torch.Tensor]) -> None:
        """Fill buffers."""
        self._await(lambda one: self._group.recv([one], self._other, 0), buffers)

    def _await(self, start: Callable[[torch.Tensor], dist.Work], buffers: list[torch.Tensor]) -> None:
        complete(lambda: list(map(start, buffers)), self._device, self._deadline)


@functools.cache
def host_room() -> bytearray:
    """Return memory of the host that has pages."""
    return bytearray(b"1") * LARGEST


@functools.cache
def device_room(device: torch.device) -> torch.Tensor:
    """Return memory of a device."""
    return torch.ones(LARGEST, dtype=torch.uint8, device=device)


def complete(start: Callable[[], Sequence[dist.Work]], device: torch.device, deadline: float) -> None:
    """Start a backend's work and return when all of it is done.

    Raises TimeoutError after `deadline`, and where the backend fails, as it does where another rank is gone. A wait
    with a timeout would look once in a millisecond on a device (WorkNCCL::wait in torch's ProcessGroupNCCL.cpp); one
    without lets the device's stream wait, and not us.
    """
    works: Sequence[dist.Work] = ()
    try:
        works = start()
        for work in works:
            if device.type == "cpu":
                work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))
            else:
                work.wait()
    except RuntimeError as error:  # dist.DistBackendError among them
        raise TimeoutError(str(error).splitlines()[0]) from None
    try:
        settle(device, deadline)
    except TimeoutError:
        for work in works:
            with suppress(RuntimeError):
                work.wait(OVER)  # NCCL gives its communicator up then, which would keep the device busy for ever
        raise


def settle(device: torch.device, deadline: float) -> None:
    """Return when a device has done all that it was told; raise TimeoutError after `deadline`."""
    if device.type == "cpu":
        return
    event = torch.get_device_module(device).Event()
    event.record()
    while not event.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{device} has not come to an end")


class Pairs:
    """The groups of two that a rank makes with others, each when the two first meet, over the job's store.

    torch's new_group() would want ranks to have made equally many groups before, as it names them by that number. So
    the backend itself is asked (torch.distributed.distributed_c10d, _new_process_group_helper, does the same). A group
    in which the other rank was silent is of no more use; the rest of the job does not wait for it.
    """

    def __init__(self, rank: int, backend: str, device: torch.device, store: dist.Store) -> None:
        self._rank, self._backend, self._device, self._store = rank, backend, device, store
        self._made: dict[int, Any] = {}

    def channel(self, partner: int, deadline: float) -> OverBackend:
        """Return a channel to another rank; raise TimeoutError if it does not come."""
        pair = sorted((self._rank, partner))
        mine = pair.index(self._rank)
        if partner not in self._made:
            store = dist.PrefixStore(f"pair/{pair[0]}/{pair[1]}", self._store)
            timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            store.set_timeout(timeout)
            try:
                self._made[partner] = group_of_two(self._backend, store, mine, timeout)
            except RuntimeError as error:  # dist.DistStoreError among them
                raise TimeoutError(f"no group with rank {partner}: {str(error).splitlines()[0]}") from None
        return OverBackend(self._made[partner], 1 - mine, self._device, deadline)


WATCHDOG = timedelta(hours=1)


def group_of_two(backend: str, store: dist.Store, rank: int, timeout: timedelta) -> Any:
    """Return a backend's group of ranks 0 and 1."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, 2, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = WATCHDOG  # its watchdog would end the process of the rank that is left
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    return dist.Backend._plugins[backend.upper()].creator_fn(store, rank, 2, timeout)


def serving(backend: str, device: torch.device) -> str:
    """Return the backend that serves a device, of one as "cpu:gloo,cuda:nccl", empty if it makes no groups of two."""
    parts = dict(part.split(":") for part in backend.split(",") if ":" in part)
    name = parts.get(device.type, backend)
    plugin = getattr(dist.Backend, "_plugins", {}).get(name.upper())
    return name if name in ("gloo", "nccl") or (plugin is not None and not plugin.extended_api) else ""


PING = 8  # bytes
MOST_PINGS = 300
MEBIBYTE = 2**20
TIMES = 2  # messages of the size that fits the time; of more passes and these the best one counts
FEWEST_SEGMENTS = 500  # of which a share of 1 % is still five
STREAM_S = 0.4  # long beside the time in which ranks begin
STAMP = struct.Struct("d")
TRIPS = 10
SNMP = "/proc/net/snmp"


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
    this rank has sent, of up to 64 MiB. `resent` is the share of the node's TCP segments that were sent again while
    this rank was sending, -1 if it sent too few to tell.
    """

    latency_s: float
    large: tuple[Trial, ...]
    resent: float


class Parts(NamedTuple):
    """What is measured in a meeting; it `streams` for a time where other ranks of the node do so as well."""

    pings: bool = True
    large: bool = True
    streams: bool = False


def greet(channel: Channel, speaks_first: bool) -> None:
    """Exchange a few bytes with another rank, which calls this too, so that both are connected."""
    for ours in (True, False):
        one_way(channel, [channel.buffer(PING)], ours == speaks_first)


def meet(channel: Channel, speaks_first: bool, seconds: float, parts: Parts) -> Ways:
    """Measure with another rank, which calls this too; of the two, one `speaks_first`. Raises TimeoutError.

    The pings may take `seconds`, and so may the messages that each of the two sends.
    """
    greet(channel, speaks_first)
    found = Ways(ping(channel, speaks_first, seconds) if parts.pings else 0.0, (), -1.0)
    for ours in (True, False) if parts.large else ():
        if ours == speaks_first:
            before = segments()
            large = send(channel, seconds, parts.streams)
            found = Ways(found.latency_s, large, share(before, segments()))
        else:
            receive(channel)
    return found


def send(channel: Channel, seconds: float, streams: bool) -> tuple[Trial, ...]:
    """Send messages, from 1 MiB on twice as large each time, and then some of the largest that fits; time these.

    The very first one does not count: it may take several times as long, as buffers grow and threads wake up.
    """
    trial(channel, 1)
    mebibytes, last = 1, trial(channel, 1)
    while mebibytes < LARGEST // MEBIBYTE and last.seconds * (1 + TIMES) * 2 < seconds:
        mebibytes *= 2
        last = trial(channel, mebibytes)
    large = [last]
    end = time.monotonic() + STREAM_S
    while len(large) < TIMES or (streams and time.monotonic() < end):
        large.append(trial(channel, mebibytes))
    announce(channel, 0)
    return tuple(large)


def trial(channel: Channel, mebibytes: int) -> Trial:
    """Send a message."""
    announce(channel, mebibytes)
    return one_way(channel, [channel.room()[:mebibytes * MEBIBYTE]], True)


def announce(channel: Channel, mebibytes: int) -> None:
    """Say how large the next message is; 0 for the end."""
    word = channel.buffer(PING)
    word[0] = mebibytes
    channel.send([word])


def receive(channel: Channel) -> None:
    """Receive what the other rank sends."""
    word = channel.buffer(PING)
    channel.receive([word])
    while mebibytes := int(word[0]):
        one_way(channel, [channel.room()[:mebibytes * MEBIBYTE]], False)
        channel.receive([word])


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


def ping(channel: Channel, speaks_first: bool, limit_s: float) -> float:
    """Return half of the median of round trips of a few bytes, in seconds.

    The rank that speaks first says with which one it ends.
    """
    word, back = channel.buffer(PING), channel.buffer(PING)
    trips: list[float] = []
    started = time.monotonic()
    while not int(word[0]):
        began = time.monotonic()
        if speaks_first:
            word[0] = len(trips) + 1 >= MOST_PINGS or began - started > limit_s
            channel.send([word])
            channel.receive([back])
        else:
            channel.receive([word])
            channel.send([back])
        trips.append(time.monotonic() - began)
    return statistics.median(trips) / 2


class Segments(NamedTuple):
    """The TCP segments that this network namespace has sent since it exists, and those that it has sent again.

    The kernel counts the segments that a network card makes of larger ones (RFC 4022, tcpOutSegs, tcpRetransSegs).
    """

    sent: int
    again: int


def segments() -> Segments:
    """Return the numbers by now, 0 where the kernel does not tell."""
    heads, values = ([line.split() for line in read_text(SNMP).splitlines() if line.startswith("Tcp:")] or [[], []])[:2]
    found = dict(zip(heads, values, strict=False))
    return Segments(int(found.get("OutSegs", 0)), int(found.get("RetransSegs", 0)))


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


def clock_offset(channel: Channel, asks: bool) -> float:
    """Return by how many seconds the other rank's clock is ahead of this one's, to the one that `asks`; else 0.

    As in NTP (RFC 5905): the other's time is taken for that of the middle of the shortest of a few round trips.
    """
    buffer = bytearray(STAMP.size)
    best = (float("inf"), 0.0)
    for _ in range(TRIPS):
        if asks:
            began, here = time.monotonic(), time.time()
            channel.send([buffer])
            channel.receive([buffer])
            took = time.monotonic() - began
            best = min(best, (took, STAMP.unpack(buffer)[0] - here - took / 2))
        else:
            channel.receive([buffer])
            buffer[:] = STAMP.pack(time.time())
            channel.send([buffer])
    return best[1] if asks else 0.0


def all_reduce(size: int, times: int, device: torch.device, deadline: float) -> float:
    """Sum `size` bytes of float32 over all ranks `times` times, and return the seconds that one takes.

    Collective over the default group; the first one of each size is not counted. Raises TimeoutError.
    """
    data = torch.zeros(max(1, size // 4), device=device)
    reduce_once(data, deadline)
    began = time.monotonic()
    for _ in range(times):
        reduce_once(data, deadline)
    return (time.monotonic() - began) / times


def reduce_once(data: torch.Tensor, deadline: float) -> None:
    """Sum once, and wait for it."""
    def start() -> list[dist.Work]:
        work = dist.all_reduce(data, async_op=True)
        assert work is not None
        return [work]

    complete(start, data.device, deadline)
