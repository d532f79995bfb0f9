"""The schedule of a check: in each pass, benchmarks of single ranks, of pairs, and of all ranks.

It is the same on every rank; rank 0 also collects the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..base.ranks import JobEnv
from ..base.stderr import write_line
from ..bootstrap.membership import Membership
from ..discovery.process import read_boot_id
from . import PASS_PAUSE_S, RANK_BUDGET_S
from .bench.machine import describe_rank
from .bench.network import LinkResult, total_bandwidth
from .bench.pairs import PairBenchmarks, PairResult
from .bench.rank import DEVICE_START_TIMEOUT_S, RankResult, measure_rank
from .bench.timeouts import DEVICE_TIMEOUT_S
from .stats.schema import (
    BANDWIDTH,
    CLOCK,
    LATENCY,
    RETRANSMITS,
    Link,
    Measurements,
    Passes,
    RankInfo,
    group_pairs,
    no_measurements,
)
from .stats.tournament import can_meet, shuffled_tournament, split_into_turns
from .steps import Ranks, StepResult

MEETINGS_BUDGET_S = 12.0  # in a pass, for all rounds
MAX_MEETING_S, MIN_MEETING_S = 1.0, 0.2
MEETING_PARTS = 6  # latency, messages in each direction, over MPI and over the backend
MEETING_TIMEOUT_S = 12.0
RANK_TIMEOUT_S = 18.0  # in addition to the budget: three hanging folders take 5 s each (FOLDER_TIMEOUT_S)
ALLREDUCE_BUDGET_S = 0.7  # in a pass
ALLREDUCE_TIMEOUT_S = 20.0
SIZE_STEP = 4  # factor between sizes of all-reduces, and at most between their times
ALLREDUCE_SIZES = tuple(2**10 * SIZE_STEP**step for step in range(10))  # 1 KiB to 256 MiB
FIRST_REPEATS, MAX_REPEATS = 3, 20  # of the first size, and of each other size


class Place(NamedTuple):
    """Where a rank is: its node's number, an ID of its machine, which containers share, and whether it is on a CPU."""

    node: int
    machine: str
    is_on_cpu: bool


def prepare_schedule(membership: Membership) -> Schedule:
    """Return the schedule of a job's ranks. Collective.

    Raises LocalLaunchError if a rank does not say where it is until the start's deadline.
    """
    env = membership.environment
    infos: list[RankInfo] = []

    def share_places(ranks: Sequence[tuple[RankInfo, Place]]) -> Sequence[Sequence[Place]]:
        infos[:] = [info for info, _ in ranks]
        return [[place for _, place in ranks]] * len(ranks)

    place = Place(env.node_rank, read_boot_id() or f"node {env.node_rank}", env.device.type == "cpu")
    own = describe_rank(env, env.device), place
    places = membership.rendezvous.exchange("identifying its node", own, share_places)
    return Schedule(Ranks(membership.comm), places, infos, env, PairBenchmarks(membership))


class Schedule:
    """Runs the benchmarks; `measured` are the results, on rank 0 those of all ranks, elsewhere none."""

    def __init__(
        self, ranks: Ranks, places: Sequence[Place], infos: Sequence[RankInfo], env: JobEnv, pairs: PairBenchmarks
    ) -> None:
        """Prepare the benchmarks of all ranks; `infos` describes them on rank 0, and is empty elsewhere."""
        self._ranks, self._env, self._pairs = ranks, env, pairs
        self._node_of = [place.node for place in places]
        self._on_cpu = [place.is_on_cpu for place in places]
        self._nodes = group_pairs((place.node, rank) for rank, place in enumerate(places))
        self._machines = {place.node: place.machine for place in reversed(places)}
        self._unreachable: set[Link] = set()
        self._unreachable_inside: set[Link] = set()
        self._has_incomplete_allreduce = False
        self.measured = no_measurements(tuple(infos))._replace(lost=ranks.lost)

    def run_passes(self, passes: int, links: bool) -> Measurements:
        """Run the benchmarks in passes, with or without links between ranks."""
        for number in range(passes):
            time.sleep(PASS_PAUSE_S if number else 0.0)
            self._measure_ranks(number)
            if links:
                self._measure_links(number)
        for rank, lines in self._ranks.errors.items():
            self.measured.add(rank, {}, lines)
        return self.measured._replace(unreachable=frozenset(self._unreachable),
                                      unreachable_inside=frozenset(self._unreachable_inside))

    def compare_clocks(self) -> None:
        """Measure how far each node's clock is ahead of rank 0's."""
        others = tuple(ranks[0] for ranks in self._nodes.values() if ranks[0] not in {0, *self._ranks.out})
        arguments = {0: (others,), **dict.fromkeys(others, ((0,),))}
        step = self._ranks.step(self._pairs.clock, arguments, RANK_TIMEOUT_S, "clock comparison with rank 0")
        offsets = step.of_rank0 or {}
        self.measured.by_rank[CLOCK] = {0: [0.0], **{rank: [offset] for rank, offset in offsets.items()}}

    def _measure_ranks(self, pass_number: int) -> None:
        """Run the benchmarks of single ranks, except where the device does not compute: a retry may take a minute."""
        limit_s = RANK_BUDGET_S + RANK_TIMEOUT_S
        limit_s += 0.0 if all(self._on_cpu) else DEVICE_START_TIMEOUT_S + DEVICE_TIMEOUT_S
        self._print_progress("measuring nodes", pass_number)
        for turn in self._turns(rank for rank in range(self._ranks.size) if self._ranks.can_all_meet([rank])):
            step = self._ranks.step(self._measure, dict.fromkeys(turn, ()), limit_s, "benchmarks of a single rank")
            for rank, result in step.results.items():
                self.measured.add(rank, result.values, result.reports)

    def _measure(self, _: float) -> RankResult:
        result = measure_rank(self._env.device, self._env.local_rank == 0, RANK_BUDGET_S)
        self._ranks.can_meet = result.computes
        return result

    def _measure_links(self, pass_number: int) -> None:
        """Run the benchmarks of pairs inside nodes, then of pairs of nodes, then of all ranks."""
        if len(self._nodes) == 1 or not all(self._on_cpu):  # on CPUs, links inside a node are the host memory
            tournaments = [(ranks, shuffled_tournament(len(ranks), pass_number)) for ranks in self._nodes.values()]
            count = max(len(rounds) for _, rounds in tournaments)
            if count:
                self._print_progress("measuring pairs within nodes", pass_number)
            for number in range(count):
                self._meet_inside([(ranks[first], ranks[second]) for ranks, rounds in tournaments
                                   for pairs in rounds[number:number + 1] for first, second in pairs], part_s(count))
        rounds = shuffled_tournament(len(self._nodes), pass_number)
        if rounds:
            self._print_progress("measuring pairs of nodes", pass_number)
        for pairs in rounds:
            able = [pair for pair in pairs if can_meet(pair, self._unreachable)
                    and self._ranks.can_all_meet(self._first_ranks(pair, 1))]
            for turn in split_into_turns({pair: {self._machines[node] for node in pair} for pair in able}):
                self._meet_between(turn, part_s(len(rounds)))
        everyone = range(self._ranks.size)
        if len(everyone) > 1 and not self._has_incomplete_allreduce and self._ranks.can_all_meet(everyone):
            self._print_progress("measuring the all-reduce", pass_number)
            self._measure_allreduce()

    def _meet_inside(self, pairs: Iterable[Link], seconds: float) -> None:
        """Measure disjoint pairs of ranks of a node."""
        able = [pair for pair in pairs
                if self._ranks.can_all_meet(pair) and can_meet(pair, self._unreachable_inside)]
        partners = {rank: partner for pair in able for rank, partner in (pair, pair[::-1])}
        for turn in self._turns(partners):
            step = self._ranks.step(self._pairs.stream, {rank: (partners[rank], seconds, True) for rank in turn},
                                    MEETING_TIMEOUT_S, "link benchmark within its node")
            for pair in (pair for pair in able if pair[0] in turn):
                if not step.done.issuperset(pair):
                    if self._ranks.can_all_meet(pair):
                        self._unreachable_inside.add(pair)
                    continue
                for link in (pair, pair[::-1]) if step.results else ():
                    result = step.results[link[0]]._replace(retransmits=None)  # counts other links
                    _add_pass(self.measured.inside_links, link, [result], result.latency_s)

    def _meet_between(self, pairs: Sequence[Link], seconds: float) -> None:
        """Measure pairs of nodes: with their first ranks, then on GPUs with all of their ranks at once."""
        met, results = self._step_of_pairs(self._pairs.meet, pairs, 1,
                                           lambda pair: (seconds, self._count_streams(pair) > 1))
        several = [pair for pair in met if self._count_streams(pair) > 1]
        connected, _ = self._step_of_pairs(self._pairs.connect, several, 0, lambda _: ())
        streamed, streams = self._step_of_pairs(self._pairs.stream, connected, 0, lambda _: (seconds, False))
        complete = [pair for pair in met if pair not in several or pair in streamed]
        self._unreachable |= {pair for pair in pairs if pair not in complete and self._ranks.can_all_meet(
            self._first_ranks(pair, self._count_streams(pair) if pair in several else 1))}
        for link in (link for pair in complete for link in (pair, pair[::-1]) if results):
            self._add_results(link, results, streams.get(link))

    def _add_results(
        self, link: Link, results: dict[Link, list[PairResult]], streams: list[LinkResult] | None
    ) -> None:
        by_mpi, by_backend = results[link][0]
        first_by_mpi, first_by_backend = results[min(link), max(link)][0]  # one latency for both directions
        latency_s = first_by_backend.latency_s
        if by_mpi and first_by_mpi:
            _add_pass(self.measured.mpi_links, link, [by_mpi], first_by_mpi.latency_s)
            latency_s = min(latency_s, first_by_mpi.latency_s)  # gloo's threads may wake up late
        _add_pass(self.measured.links, link, streams or [by_backend], latency_s)

    def _step_of_pairs(
        self, work: Callable[..., Any], pairs: Sequence[Link], limit: int, arguments: Callable[[Link], tuple[Any, ...]]
    ) -> tuple[list[Link], dict[Link, list[Any]]]:
        """Take a step with ranks of pairs of nodes; return the pairs of which all ranks have a result, and results.

        `limit` ranks of each node take part, or all if it is 0. `arguments` returns a rank's arguments after its
        partner. On rank 0 there are the results of each link: those of the ranks of its first node.
        """
        if not pairs:
            return [], {}
        partners: dict[Link, dict[int, int]] = {}
        for pair in pairs:
            for link in (pair, pair[::-1]):
                receivers = self._nodes[link[1]][:limit or self._count_streams(pair)]
                partners[link] = dict(zip(self._nodes[link[0]], receivers, strict=False))
        calls = {rank: (partner, *arguments(link)) for link, of_link in partners.items()
                 for rank, partner in of_link.items() if self._ranks.can_all_meet((rank, partner))}
        step: StepResult = self._ranks.step(work, calls, MEETING_TIMEOUT_S, "link benchmark with another node")
        complete = [pair for pair in pairs if step.done.issuperset({*partners[pair], *partners[pair[::-1]]})]
        return complete, {link: [step.results[rank] for rank in partners[link]] for pair in complete
                          for link in (pair, pair[::-1]) if step.results}

    def _count_streams(self, pair: Link) -> int:
        """Return how many ranks of two nodes meet at the same time: one on CPUs, because they share a link."""
        if any(self._on_cpu[rank] for node in pair for rank in self._nodes[node]):
            return 1
        return min(len(self._nodes[node]) for node in pair)

    def _first_ranks(self, pair: Link, count: int) -> list[int]:
        return [rank for node in pair for rank in self._nodes[node][:count]]

    def _measure_allreduce(self) -> None:
        """Time an all-reduce over all ranks, by increasing size until the budget is used."""
        left_s, last_s = ALLREDUCE_BUDGET_S, 0.0
        everyone = range(self._ranks.size)
        for size in ALLREDUCE_SIZES:
            next_s = SIZE_STEP * last_s
            if 2 * next_s > left_s:
                return  # the warm-up and one measurement would take too long
            repeats = (max(1, min(MAX_REPEATS, int(left_s / len(ALLREDUCE_SIZES) / next_s))) if next_s
                       else FIRST_REPEATS)
            step = self._ranks.step(self._pairs.reduce, dict.fromkeys(everyone, (size, repeats)), ALLREDUCE_TIMEOUT_S,
                                    f"all-reduce of {size:,} bytes")
            if len(step.done) < len(everyone):
                self._has_incomplete_allreduce = True
                if self._ranks.can_all_meet(everyone):  # otherwise the failed rank has a finding
                    self.measured = self.measured._replace(incomplete_allreduce=(size, len(step.done)))
                return
            last_s = step.of_rank0
            left_s -= (repeats + 1) * last_s
            self.measured.allreduce[size] = min(last_s, self.measured.allreduce.get(size, last_s))

    def _turns(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return ranks in turns: nodes on the same machine, such as containers, would disturb each other."""
        nodes = group_pairs((self._node_of[rank], rank) for rank in sorted(ranks))
        turns = split_into_turns({node: {self._machines[node]} for node in nodes})
        return [[rank for node in turn for rank in nodes[node]] for turn in turns]

    def _print_progress(self, doing: str, pass_number: int) -> None:
        if self._ranks.rank == 0:
            write_line(f"mpiddp.check: {doing}, pass {pass_number + 1}")


def part_s(rounds: int) -> float:
    """Return the seconds for each part of a meeting in a pass with so many rounds."""
    return min(MAX_MEETING_S, max(MIN_MEETING_S, MEETINGS_BUDGET_S / max(1, rounds))) / MEETING_PARTS


def _add_pass(
    links: dict[str, dict[Link, Passes]], link: Link, results: Sequence[LinkResult], latency_s: float
) -> None:
    """Add a pass of a link, from the results of ranks that sent at the same time."""
    values = {LATENCY: latency_s, BANDWIDTH: total_bandwidth([result.transfers for result in results])}
    values = {name: value for name, value in values.items() if value}
    shares = [result.retransmits for result in results if result.retransmits is not None]
    if shares:
        values[RETRANSMITS] = max(shares)
    for name, value in values.items():
        links.setdefault(name, {}).setdefault(link, []).append(value)
