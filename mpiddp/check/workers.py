"""The methods that rank 0 calls on the ranks during a check."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from ..base.ranks import JobEnv
from ..bootstrap.membership import Membership
from ..discovery.process import read_boot_id
from .bench import machine, network
from .bench.network import CLOCK_TAG, Benchmark, LinkResult, PairGroups, mpi_channel, pairwise_backend
from .bench.rank import RankResult, measure_rank
from .bench.timeouts import ask_device, run_on_device
from .rpc import Method
from .stats.schema import RankInfo

ALLREDUCE_TIMEOUT_S = 20.0
CLOCK_TIMEOUT_S = 2.0  # for a rank to reply with its time
BACKEND_GRACE_S = 1.0  # after the deadline, for the backend to raise its own timeout
MPI_SHARE = 0.5  # of a meeting's time: MPI and the backend run the same benchmark

Result = TypeVar("Result")
PairResult = tuple[LinkResult | None, LinkResult]  # over MPI, None if the other rank did not reply; the backend


class Identity(NamedTuple):
    """A rank, the ID of its machine (containers share it, "" is unknown), and the peak rates of its hardware."""

    info: RankInfo
    machine_id: str
    claims: dict[str, float]


class WorkerMethods:
    """A rank's methods. Each takes a deadline first; those with other ranks raise TimeoutError after it."""

    def __init__(self, membership: Membership) -> None:
        self._comm = membership.comm
        self._env: JobEnv = membership.environment
        self._silent_over_mpi: set[int] = set()
        backend = pairwise_backend(self._env.backend, self._env.device)
        self._device = torch.device("cpu") if backend == "gloo" else self._env.device  # that the backend sends from
        self._groups = PairGroups(self._env.rank, backend, self._device, membership.groups.keys.job)

    def by_name(self) -> Mapping[str, Method]:
        """Return the methods by name."""
        env = self._env
        return {"identify": lambda _: identify(env, env.device, env.backend), "measure": self.measure,
                "clock": self.clock, "meet": self.meet, "connect": self.connect, "stream": self.stream,
                "reduce": self.reduce}

    def measure(self, _: float, budget_s: float) -> RankResult:
        """Run the benchmarks of a single rank."""
        return measure_rank(self._env.device, self._env.local_rank == 0, budget_s)

    def clock(self, deadline: float, ranks: tuple[int, ...]) -> dict[int, float]:
        """Return by how many seconds other ranks' clocks are ahead: rank 0 asks them in turn, they ask rank 0."""
        asks = self._env.rank == 0
        offsets = {}
        for rank in ranks:
            try:
                limit = min(deadline, time.monotonic() + CLOCK_TIMEOUT_S) if asks else deadline
                offsets[rank] = network.clock_offset(mpi_channel(self._comm, rank, limit, CLOCK_TAG), asks)
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
        self._with_timeout(deadline, lambda: network.exchange_greeting(self._groups.channel(partner, deadline),
                                                                       self._env.rank < partner))
        return True

    def stream(self, deadline: float, partner: int, seconds: float, measures_latency: bool) -> LinkResult:
        """Meet another rank over the backend, while other ranks of the node meet others."""
        return self._over_backend(deadline, partner, seconds, Benchmark.FULL if measures_latency else Benchmark.STREAM)

    def reduce(self, deadline: float, size: int, times: int) -> float:
        """Return the seconds of an all-reduce of all ranks."""
        return self._with_timeout(deadline, lambda: network.time_allreduce(size, times, self._device, deadline))

    def _over_backend(self, deadline: float, partner: int, seconds: float, benchmark: Benchmark) -> LinkResult:
        return self._with_timeout(deadline, lambda: network.benchmark_link(
            self._groups.channel(partner, deadline), self._env.rank < partner, seconds, benchmark))

    def _over_mpi(self, deadline: float, partner: int, seconds: float) -> LinkResult | None:
        if partner in self._silent_over_mpi:
            return None
        try:
            channel = mpi_channel(self._comm, partner, deadline)
            return network.benchmark_link(channel, self._env.rank < partner, seconds, Benchmark.FULL)
        except (TimeoutError, RuntimeError):  # MPI raises RuntimeError, perhaps because of the other rank
            self._silent_over_mpi.add(partner)
            return None

    def _with_timeout(self, deadline: float, work: Callable[[], Result]) -> Result:
        """Run work of the backend such that it cannot block this rank.

        When two ranks first meet, NCCL waits in C++ for the other one, without a timeout (ncclCommInitRank).
        """
        return run_on_device(self._device, max(0.0, deadline - time.monotonic()) + BACKEND_GRACE_S, work)


def identify(env: JobEnv, device: torch.device, backend: str) -> Identity:
    """Return this rank's identity."""
    no_claims: dict[str, float] = {}
    claims = ask_device(device, lambda: machine.claimed_rates(device, pairwise_backend(backend, device), os.environ),
                        no_claims)
    return Identity(machine.describe_rank(env, device), read_boot_id(), claims)
