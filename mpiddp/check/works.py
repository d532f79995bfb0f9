"""What a rank can be told to do in a check."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from ..compare.figures import Who
from ..environment import Environment
from ..facts.runtime import hostname
from ..join.membership import Membership
from ..measure import clock, machine, reduction
from ..measure.channels import CLOCK_TAG, OverMpi, Pairs, serving
from ..measure.deadlines import on_device
from ..measure.meeting import Pace, Parts, Ways, greet, meet
from ..measure.own import Own, measure
from .crew import Work

REDUCING_LIMIT_S = 20.0  # for an all-reduce
CLOCK_S = 2.0  # for a rank to tell its time
GIVING_UP_S = 1.0  # for what has not come to an end by then
MPI_SHARE = 0.5  # of the time for a meeting


Answer = TypeVar("Answer")


class Met(NamedTuple):
    """What a rank knows after it has met another one: over MPI, None if the other was silent, and over the backend."""

    by_mpi: Ways | None
    by_backend: Ways


class Works:
    """A rank's part in each piece of work. All of them take a deadline first, and raise TimeoutError after it."""

    def __init__(self, membership: Membership) -> None:
        self._comm = membership.comm
        self._env: Environment = membership.environment
        self._silent: set[int] = set()  # over MPI
        backend = serving(self._env.backend, self._env.device)
        self._device = torch.device("cpu") if backend == "gloo" else self._env.device  # that the backend sends from
        self._pairs = Pairs(self._env.rank, backend, self._device, membership.groups.keys.job)

    def by_name(self) -> Mapping[str, Work]:
        """Return the pieces of work by the names that rank 0 gives them."""
        return {"who": self.who, "own": self.own, "clock": self.clock, "meet": self.meet, "stream": self.stream,
                "connect": self.connect, "reduce": self.reduce}

    def who(self, _deadline: float) -> tuple[Who, str]:
        """Tell who this rank is, and on which machine its node is, which may be one of several there."""
        env = self._env
        kind = machine.kind(env.device, torch.get_num_threads())
        return (Who(hostname(), env.node_rank, env.local_rank, str(env.device), kind, machine.switch(os.environ)),
                machine.machine() or str(env.node_rank))

    def own(self, _deadline: float, budget_s: float, only: frozenset[str] | None) -> Own:
        """Measure this rank's device, memory and disks, or only some; waits for these have deadlines of their own."""
        return measure(self._env.device, self._env.local_rank == 0, budget_s, only)

    def clock(self, deadline: float, ranks: tuple[int, ...]) -> dict[int, float]:
        """Compare clocks: rank 0 with each of the ranks, one after the other, and these with rank 0."""
        asks = self._env.rank == 0
        found = {}
        for rank in ranks:
            try:
                limit = min(deadline, time.monotonic() + CLOCK_S) if asks else deadline
                found[rank] = clock.compare(OverMpi(self._comm, rank, limit, CLOCK_TAG), asks)
            except TimeoutError:
                if not asks:
                    raise
        return found

    def meet(self, deadline: float, partner: int, pace: Pace, streams: bool, over_mpi: bool) -> Met:
        """Meet another rank while no other rank of the two nodes does: maybe `over_mpi`, then over the backend.

        Over the backend no large messages go where `streams` tells that all ranks of both nodes meet next.
        """
        by_mpi = None
        if over_mpi:
            by_mpi = self._over_mpi(deadline - MPI_SHARE * (deadline - time.monotonic()), partner, pace)
        return Met(by_mpi, self._over_backend(deadline, partner, pace, Parts(large=not streams)))

    def connect(self, deadline: float, partner: int) -> bool:
        """Connect to another rank over the job's backend, which may take long, before all ranks begin at once."""
        self._within(deadline, lambda: greet(self._pairs.channel(partner, deadline), self._env.rank < partner))
        return True

    def stream(self, deadline: float, partner: int, pace: Pace, whole: bool) -> Ways:
        """Meet another rank over the job's backend, while other ranks of the node meet others.

        If it is not the `whole` meeting, large messages alone go.
        """
        parts = Parts() if whole else Parts(pings=False, small=False, streams=True)
        return self._over_backend(deadline, partner, pace, parts)

    def _over_backend(self, deadline: float, partner: int, pace: Pace, parts: Parts) -> Ways:
        """Meet another rank over the job's backend."""
        return self._within(deadline, lambda: meet(
            self._pairs.channel(partner, deadline), self._env.rank < partner, pace, parts))

    def _over_mpi(self, deadline: float, partner: int, pace: Pace) -> Ways | None:
        """Meet another rank over MPI, if it has not been silent there before."""
        if partner in self._silent:
            return None
        try:
            return meet(OverMpi(self._comm, partner, deadline), self._env.rank < partner, pace, Parts())
        except (TimeoutError, RuntimeError):  # MPI's own errors are such, and may be of the other rank
            self._silent.add(partner)
            return None

    def reduce(self, deadline: float, size: int, times: int) -> float:
        """Take part in an all-reduce of all ranks."""
        return self._within(deadline, lambda: reduction.all_reduce(size, times, self._device, deadline))

    def _within(self, deadline: float, work: Callable[[], Answer]) -> Answer:
        """Do what takes the backend, so that a device cannot hold this rank: NCCL's own start waits.

        It waits in C++ for the other rank when the two first meet, as long as that takes (ncclCommInitRank).
        """
        return on_device(self._device, max(0.0, deadline - time.monotonic()) + GIVING_UP_S, work)
