"""A channel to one other rank, over MPI or over torch's process groups. Each wait on it has a deadline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

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
