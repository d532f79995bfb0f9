"""Transports: functions by which two ranks exchange bytes, over MPI or over the job's backend, with a deadline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_MESSAGE_BYTES = 2**26
PAIR_TAG, CLOCK_TAG = 2, 5  # the roll call and the steps have others
SPIN_S, PAUSE_S = 0.0001, 0.00001  # Linux makes the pause five times as long (timerslack, man 2 prctl)
ABORT_TIMEOUT = timedelta(milliseconds=1)
NCCL_WATCHDOG_TIMEOUT = timedelta(hours=1)  # the watchdog would end the process whose partner is lost

_abandoned: list[Any] = []  # MPI requests with their memory: another rank may still write to it


class Transport(NamedTuple):
    """Functions by which two ranks exchange bytes, each with a buffer; they raise TimeoutError.

    `new_buffer` returns memory of a size on the transport's device; `message_buffer` that of the largest message: the
    same for all transports of a process, so that its pages exist. `send` returns when the buffer can be used again.
    """

    new_buffer: Callable[[int], Any]
    message_buffer: Callable[[], Any]
    send: Callable[[Any], None]
    receive: Callable[[Any], None]


def mpi_transport(comm: MPI.Comm, partner: int, deadline: float, tag: int = PAIR_TAG) -> Transport:
    """Return a transport between the host memories of two ranks, over MPI."""
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

    return Transport(bytearray, lambda: memoryview(host_buffer()),
                     lambda buffer: wait(comm.Isend(buffer, partner, tag)),
                     lambda buffer: wait(comm.Irecv(buffer, partner, tag)))


def backend_transport(group: Any, partner: int, device: torch.device, deadline: float) -> Transport:
    """Return a transport between the devices of two ranks, over a group of the job's backend with only these two."""
    def run(start: Callable[[list[Any], int, int], dist.Work]) -> Callable[[Any], None]:
        return lambda buffer: run_backend_work(lambda: start([buffer], partner, 0), device, deadline)

    return Transport(lambda size: torch.zeros(size, dtype=torch.uint8, device=device), lambda: device_buffer(device),
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

    def transport(self, partner: int, deadline: float) -> Transport:
        """Return a transport to another rank; raise TimeoutError if it does not take part."""
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
        return backend_transport(self._groups[partner], 1 - own, self._device, deadline)


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
