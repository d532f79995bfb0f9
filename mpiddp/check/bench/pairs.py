"""A rank's benchmarks with one other rank, or with all: over MPI, and over the job's backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from ...base.clock import measure_clock_offset_ns
from ...bootstrap.membership import Membership
from . import network
from .network import Benchmark, LinkResult
from .timeouts import run_on_device
from .transport import CLOCK_TAG, PairGroups, mpi_transport, pairwise_backend

CLOCK_TIMEOUT_S = 2.0  # for a rank to reply with its time
BACKEND_GRACE_S = 1.0  # after the deadline, for the backend to raise its own timeout
MPI_SHARE = 0.5  # of a meeting's time: MPI and the backend run the same benchmark

Result = TypeVar("Result")
PairResult = tuple[LinkResult | None, LinkResult]  # over MPI, None if the other rank did not reply; the backend


class PairBenchmarks:
    """A rank's part in the benchmarks of several ranks; each raises TimeoutError after its deadline."""

    def __init__(self, membership: Membership) -> None:
        env = membership.environment
        self._comm, self._rank = membership.comm, env.rank
        self._silent_over_mpi: set[int] = set()
        backend = pairwise_backend(env.backend, env.device)
        self._device = torch.device("cpu") if backend == "gloo" else env.device  # that the backend sends from
        self._groups = PairGroups(env.rank, backend, self._device, membership.groups.keys.job)

    def clock(self, deadline: float, ranks: tuple[int, ...]) -> dict[int, float]:
        """Return by how many seconds other ranks' clocks are ahead: rank 0 asks them in turn, they ask rank 0."""
        asks = self._rank == 0
        offsets = {}
        for rank in ranks:
            try:
                limit = min(deadline, time.monotonic() + CLOCK_TIMEOUT_S) if asks else deadline
                transport = mpi_transport(self._comm, rank, limit, CLOCK_TAG)
                offsets[rank] = measure_clock_offset_ns(transport.send, transport.receive, asks) / 1e9
            except TimeoutError:
                if not asks:
                    raise
        return offsets

    def meet(self, deadline: float, partner: int, seconds: float, streams: bool) -> PairResult:
        """Meet another rank while no other rank of the two nodes does: over MPI, then over the backend.

        If all ranks of the nodes stream together next, the backend's bandwidth is measured then.
        """
        by_mpi = self._over_mpi(deadline - MPI_SHARE * (deadline - time.monotonic()), partner, seconds)
        benchmark = Benchmark.LATENCY if streams else Benchmark.FULL
        return by_mpi, self._over_backend(deadline, partner, seconds, benchmark)

    def connect(self, deadline: float, partner: int) -> bool:
        """Connect to another rank over the backend, which may take long, before all ranks stream at once."""
        self._on_device(deadline, lambda: network.exchange_greeting(self._groups.transport(partner, deadline),
                                                                    self._rank < partner))
        return True

    def stream(self, deadline: float, partner: int, seconds: float, measures_latency: bool) -> LinkResult:
        """Meet another rank over the backend, while other ranks of the node meet others."""
        return self._over_backend(deadline, partner, seconds, Benchmark.FULL if measures_latency else Benchmark.STREAM)

    def reduce(self, deadline: float, size: int, times: int) -> float:
        """Return the seconds of an all-reduce of all ranks."""
        return self._on_device(deadline, lambda: network.time_allreduce(size, times, self._device, deadline))

    def _over_backend(self, deadline: float, partner: int, seconds: float, benchmark: Benchmark) -> LinkResult:
        return self._on_device(deadline, lambda: network.benchmark_link(
            self._groups.transport(partner, deadline), self._rank < partner, seconds, benchmark))

    def _over_mpi(self, deadline: float, partner: int, seconds: float) -> LinkResult | None:
        if partner in self._silent_over_mpi:
            return None
        try:
            transport = mpi_transport(self._comm, partner, deadline)
            return network.benchmark_link(transport, self._rank < partner, seconds, Benchmark.FULL)
        except (TimeoutError, RuntimeError):  # MPI raises RuntimeError, perhaps because of the other rank
            self._silent_over_mpi.add(partner)
            return None

    def _on_device(self, deadline: float, work: Callable[[], Result]) -> Result:
        """Run work of the backend such that it cannot block this rank.

        When two ranks first meet, NCCL waits in C++ for the other one, without a timeout (ncclCommInitRank).
        """
        return run_on_device(self._device, max(0.0, deadline - time.monotonic()) + BACKEND_GRACE_S, work)
