"""What a rank does in a check when rank 0 orders it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from ..base.ranks import JobEnv
from ..bootstrap.membership import Membership
from .bench import hardware, machine, network
from .bench.network import CLOCK_TAG, OverMpi, Pairs, Parts, Ways, serving
from .bench.rank import measure
from .bench.timeouts import on_device
from .identity import describe, told
from .rpc import Work
from .stats.schema import RankInfo

REDUCING_LIMIT_S = 20.0  # for an all-reduce
CLOCK_S = 2.0  # for a rank to tell its time
GIVING_UP_S = 1.0  # for what has not come to an end by then
MPI_SHARE = 0.5  # of the time for a meeting


Answer = TypeVar("Answer")


class Who(NamedTuple):
    """Who a rank is, on which machine its node is, which may be one of several there, and what its hardware claims."""

    info: RankInfo
    machine: str
    claims: dict[str, float]


class PairResult(NamedTuple):
    """What a rank knows after it has met another one: over MPI, None if the other was silent, and over the backend."""

    by_mpi: Ways | None
    by_backend: Ways


def who(place: JobEnv, device: torch.device, backend: str) -> Who:
    """Return who this rank is."""
    claims: dict[str, float] = told(device, lambda: hardware.claims(device, serving(backend, device), os.environ), {})
    return Who(describe(place, device), machine.machine(), claims)


def measuring(place: JobEnv, device: torch.device, backend: str) -> dict[str, Work]:
    """Return the work of a rank by itself, by the names that rank 0 uses; all take a deadline first."""
    return {"who": lambda _: who(place, device, backend),
            "own": lambda _, budget_s: measure(device, place.local_rank == 0, budget_s)}


class Meeting:
    """The work of a rank with others. All of it takes a deadline first, and raises TimeoutError after it."""

    def __init__(self, membership: Membership) -> None:
        self._comm = membership.comm
        self._env: JobEnv = membership.environment
        self._silent: set[int] = set()  # over MPI
        backend = serving(self._env.backend, self._env.device)
        self._device = torch.device("cpu") if backend == "gloo" else self._env.device  # that the backend sends from
        self._pairs = Pairs(self._env.rank, backend, self._device, membership.groups.keys.job)

    def by_name(self) -> Mapping[str, Work]:
        """Return the work by the names that rank 0 uses."""
        return {"clock": self.clock, "meet": self.meet, "stream": self.stream, "connect": self.connect,
                "reduce": self.reduce}

    def clock(self, deadline: float, ranks: tuple[int, ...]) -> dict[int, float]:
        """Compare clocks: rank 0 with each of the ranks, one after the other, and these with rank 0."""
        asks = self._env.rank == 0
        found = {}
        for rank in ranks:
            try:
                limit = min(deadline, time.monotonic() + CLOCK_S) if asks else deadline
                found[rank] = network.clock_offset(OverMpi(self._comm, rank, limit, CLOCK_TAG), asks)
            except TimeoutError:
                if not asks:
                    raise
        return found

    def meet(self, deadline: float, partner: int, seconds: float, streams: bool) -> PairResult:
        """Meet another rank while no other rank of the two nodes does: over MPI, then over the backend.

        Over the backend no large messages go where `streams` tells that all ranks of both nodes meet next.
        """
        by_mpi = self._over_mpi(deadline - MPI_SHARE * (deadline - time.monotonic()), partner, seconds)
        return PairResult(by_mpi, self._over_backend(deadline, partner, seconds, Parts(large=not streams)))

    def connect(self, deadline: float, partner: int) -> bool:
        """Connect to another rank over the job's backend, which may take long, before all ranks begin at once."""
        self._within(deadline, lambda: network.greet(self._pairs.channel(partner, deadline), self._env.rank < partner))
        return True

    def stream(self, deadline: float, partner: int, seconds: float, whole: bool) -> Ways:
        """Meet another rank over the job's backend, while other ranks of the node meet others.

        If it is not the `whole` meeting, large messages alone go.
        """
        parts = Parts() if whole else Parts(pings=False, streams=True)
        return self._over_backend(deadline, partner, seconds, parts)

    def _over_backend(self, deadline: float, partner: int, seconds: float, parts: Parts) -> Ways:
        """Meet another rank over the job's backend."""
        return self._within(deadline, lambda: network.meet(
            self._pairs.channel(partner, deadline), self._env.rank < partner, seconds, parts))

    def _over_mpi(self, deadline: float, partner: int, seconds: float) -> Ways | None:
        """Meet another rank over MPI, if it has not been silent there before."""
        if partner in self._silent:
            return None
        try:
            return network.meet(OverMpi(self._comm, partner, deadline), self._env.rank < partner, seconds, Parts())
        except (TimeoutError, RuntimeError):  # MPI's own errors are such, and may be of the other rank
            self._silent.add(partner)
            return None

    def reduce(self, deadline: float, size: int, times: int) -> float:
        """Take part in an all-reduce of all ranks."""
        return self._within(deadline, lambda: network.all_reduce(size, times, self._device, deadline))

    def _within(self, deadline: float, work: Callable[[], Answer]) -> Answer:
        """Do what takes the backend, so that a device cannot hold this rank: NCCL's own start waits.

        It waits in C++ for the other rank when the two first meet, as long as that takes (ncclCommInitRank).
        """
        return on_device(self._device, max(0.0, deadline - time.monotonic()) + GIVING_UP_S, work)
