"""Rank 0's schedule of a check: in each pass, benchmarks of single ranks, of pairs, and of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..base.errors import LocalLaunchError
from ..base.stderr import write_line
from ..base.text import join_names
from . import PASS_PAUSE_S, RANK_BUDGET_S
from .bench.network import LinkResult, total_bandwidth
from .bench.rank import DEVICE_START_TIMEOUT_S
from .bench.timeouts import DEVICE_TIMEOUT_S
from .rpc import RpcController
from .stats.schema import (
    BANDWIDTH,
    CLOCK,
    LATENCY,
    RETRANSMITS,
    Link,
    Measurements,
    Passes,
    group_pairs,
    no_measurements,
)
from .stats.tournament import MeetingLog, shuffled_tournament, split_into_turns
from .workers import ALLREDUCE_TIMEOUT_S, PairResult

MEETINGS_BUDGET_S = 12.0  # in a pass, for all rounds
MAX_MEETING_S, MIN_MEETING_S = 1.0, 0.2
MEETING_PARTS = 6  # latency, messages in each direction, over MPI and over the backend
MEETING_TIMEOUT_S = 12.0
RANK_TIMEOUT_S = 18.0  # in addition to the budget: three hanging folders take 5 s each (FOLDER_TIMEOUT_S)
ALLREDUCE_BUDGET_S = 0.7  # in a pass
SIZE_STEP = 4  # factor between sizes of all-reduces, and at most between their times
ALLREDUCE_SIZES = tuple(2**10 * SIZE_STEP**step for step in range(10))  # 1 KiB to 256 MiB
FIRST_REPEATS, MAX_REPEATS = 3, 20  # of the first size, and of each other size


class Controller:
    """Calls the ranks, and collects their results."""

    def __init__(self, ranks: RpcController, size: int, startup_timeout_s: float) -> None:
        """Identify the ranks; raise LocalLaunchError if one does not reply within `startup_timeout_s`."""
        self._ranks = ranks
        identities = ranks.call("identify", dict.fromkeys(range(size), ()), startup_timeout_s, "identification")
        if silent := [rank for rank in range(size) if rank not in identities]:
            names = [f"{ranks.name(rank)}{''.join(f' ({line})' for line in ranks.errors.get(rank, ()))}"
                     for rank in silent]
            raise LocalLaunchError(
                "startup-timeout",
                actual=f"{len(silent)} of {size} ranks not ready within {startup_timeout_s:g} s: {join_names(names)}",
                needed="all ranks ready before the startup timeout",
                do="check those hosts (slow file system, broken node), or allow more time: --startup-timeout SECONDS",
            )
        self.measured = no_measurements(tuple(identities[rank].info for rank in range(size)))._replace(
            lost=ranks.lost, claims={rank: identity.claims for rank, identity in identities.items()})
        self._nodes = group_pairs((info.node, rank) for rank, info in enumerate(self.measured.ranks))
        self._machines = {node: identities[ranks[0]].machine_id or f"node {node}"
                          for node, ranks in self._nodes.items()}
        self._on_cpus = all(info.device == "cpu" for info in self.measured.ranks)
        self._meetings = MeetingLog(len(self._nodes))
        self._meetings_inside = {node: MeetingLog(len(ranks)) for node, ranks in self._nodes.items()}

    def run_passes(self, passes: int, links: bool) -> Measurements:
        """Run the benchmarks in passes, with or without links between ranks."""
        for number in range(passes):
            time.sleep(PASS_PAUSE_S if number else 0.0)
            self._measure_ranks(number)
            if links:
                self._measure_links(number)
        for rank, lines in self._ranks.errors.items():
            self.measured.add(rank, {}, lines)
        inside = frozenset(pair for meetings in self._meetings_inside.values() for pair in meetings.unreachable)
        return self.measured._replace(unreachable=frozenset(self._meetings.unreachable), unreachable_inside=inside)

    def compare_clocks(self) -> None:
        """Measure how far each node's clock is ahead of rank 0's."""
        others = tuple(ranks[0] for ranks in self._nodes.values() if ranks[0] not in {0, *self._ranks.lost})
        arguments = {0: (others,), **dict.fromkeys(others, ((0,),))}
        offsets = self._ranks.call("clock", arguments, RANK_TIMEOUT_S, "clock comparison with rank 0")
        self.measured.by_rank[CLOCK] = {0: [0.0], **{rank: [offset] for rank, offset in offsets.get(0, {}).items()}}

    def _measure_ranks(self, pass_number: int) -> None:
        """Run the benchmarks of single ranks, except where the device does not compute: a retry may take a minute."""
        limit_s = RANK_BUDGET_S + RANK_TIMEOUT_S
        limit_s += 0.0 if self._on_cpus else DEVICE_START_TIMEOUT_S + DEVICE_TIMEOUT_S
        turns = self._turns(rank for rank in range(len(self.measured.ranks)) if self._ranks.can_meet([rank]))
        write_line(f"mpiddp.check: measuring nodes, pass {pass_number + 1}")
        for turn in turns:
            results = self._ranks.call("measure", dict.fromkeys(turn, (RANK_BUDGET_S,)), limit_s,
                                       "benchmarks of a single rank")
            for rank, result in results.items():
                self.measured.add(rank, result.values, result.reports)
                if not result.computes:
                    self._ranks.excluded.add(rank)

    def _measure_links(self, pass_number: int) -> None:
        """Run the benchmarks of pairs inside nodes, then of pairs of nodes, then of all ranks."""
        if len(self._nodes) == 1 or not self._on_cpus:  # on CPUs, links inside a node are the host memory
            tournaments = [(ranks, shuffled_tournament(len(ranks), pass_number)) for ranks in self._nodes.values()]
            count = max(len(rounds) for _, rounds in tournaments)
            if count:
                write_line(f"mpiddp.check: measuring pairs within nodes, pass {pass_number + 1}")
            for number in range(count):
                self._meet_inside([(ranks[first], ranks[second]) for ranks, rounds in tournaments
                                   for pairs in rounds[number:number + 1] for first, second in pairs], part_s(count))
        rounds = shuffled_tournament(len(self._nodes), pass_number)
        if rounds:
            write_line(f"mpiddp.check: measuring pairs of nodes, pass {pass_number + 1}")
        for pairs in rounds:
            able = [pair for pair in pairs
                    if self._meetings.can_meet(pair) and self._ranks.can_meet(self._first_ranks(pair, 1))]
            for turn in split_into_turns({pair: {self._machines[node] for node in pair} for pair in able}):
                self._meet_between(turn, part_s(len(rounds)))
        everyone = range(len(self.measured.ranks))
        if len(everyone) > 1 and not self.measured.incomplete_allreduce and self._ranks.can_meet(everyone):
            write_line(f"mpiddp.check: measuring the all-reduce, pass {pass_number + 1}")
            self._measure_allreduce()

    def _meet_inside(self, pairs: Iterable[Link], seconds: float) -> None:
        """Measure disjoint pairs of ranks of a node."""
        able = [pair for pair in pairs if self._ranks.can_meet(pair) and self._log_of(pair).can_meet(pair)]
        partners = {rank: partner for pair in able for rank, partner in (pair, pair[::-1])}
        for turn in self._turns(partners):
            arguments = {rank: (partners[rank], seconds, True) for rank in turn}
            results = self._ranks.call("stream", arguments, MEETING_TIMEOUT_S, "link benchmark within its node")
            for pair in (pair for pair in able if pair[0] in arguments):
                if results.keys() >= {*pair}:
                    self._log_of(pair).record([pair], [])
                    for link in (pair, pair[::-1]):
                        result = results[link[0]]._replace(retransmits=None)  # counts other links
                        _add_pass(self.measured.inside_links, link, [result], result.latency_s)
                elif self._ranks.can_meet(pair):
                    self._log_of(pair).record([], [pair])

    def _log_of(self, pair: Link) -> MeetingLog:
        return self._meetings_inside[self.measured.ranks[pair[0]].node]

    def _meet_between(self, pairs: Sequence[Link], seconds: float) -> None:
        """Measure pairs of nodes: with their first ranks, then on GPUs with all of their ranks at once."""
        results: dict[Link, list[PairResult]] = self._call_pairs(
            "meet", pairs, 1, lambda pair: (seconds, self._streams(pair) > 1))
        several = [pair for pair in pairs if _has_both(pair, results) and self._streams(pair) > 1]
        connected = self._call_pairs("connect", several, 0, lambda _: ())
        streams: dict[Link, list[LinkResult]] = self._call_pairs(
            "stream", [pair for pair in several if _has_both(pair, connected)], 0, lambda _: (seconds, False))
        met = [pair for pair in pairs if _has_both(pair, results) and (pair not in several or _has_both(pair, streams))]
        failed = [pair for pair in pairs if pair not in met and self._ranks.can_meet(
            self._first_ranks(pair, self._streams(pair) if pair in several else 1))]
        self._meetings.record(met, failed)
        for link in (link for pair in met for link in (pair, pair[::-1])):
            by_mpi, by_backend = results[link][0]
            first_by_mpi, first_by_backend = results[min(link), max(link)][0]  # one latency for both directions
            latency_s = first_by_backend.latency_s
            if by_mpi and first_by_mpi:
                _add_pass(self.measured.mpi_links, link, [by_mpi], first_by_mpi.latency_s)
                latency_s = min(latency_s, first_by_mpi.latency_s)  # gloo's threads may wake up late
            _add_pass(self.measured.links, link, streams.get(link, [by_backend]), latency_s)

    def _call_pairs(
        self, method: str, pairs: Sequence[Link], limit: int, arguments: Callable[[Link], tuple[Any, ...]]
    ) -> dict[Link, list[Any]]:
        """Call ranks of pairs of nodes; return for each link the results of the ranks of its first node.

        `limit` ranks of each node take part, or all if it is 0. `arguments` returns a rank's arguments after its
        partner. Links without results of all ranks are omitted.
        """
        calls, link_of = {}, {}
        for pair in pairs:
            for link in (pair, pair[::-1]):
                receivers = self._nodes[link[1]][:limit or self._streams(pair)]
                for rank, partner in zip(self._nodes[link[0]], receivers, strict=False):
                    if self._ranks.can_meet((rank, partner)):
                        calls[rank] = (partner, *arguments(pair))
                        link_of[rank] = link
        results: dict[Link, list[Any]] = {}
        for rank, result in sorted(self._ranks.call(method, calls, MEETING_TIMEOUT_S,
                                                    "link benchmark with another node").items()):
            results.setdefault(link_of[rank], []).append(result)
        return {link: of_link for link, of_link in results.items() if len(of_link) == (limit or self._streams(link))}

    def _streams(self, pair: Link) -> int:
        """Return how many ranks of two nodes meet at the same time: one on CPUs, because they share a link."""
        if any(self.measured.ranks[rank].device == "cpu" for node in pair for rank in self._nodes[node]):
            return 1
        return min(len(self._nodes[node]) for node in pair)

    def _first_ranks(self, pair: Link, count: int) -> list[int]:
        return [rank for node in pair for rank in self._nodes[node][:count]]

    def _measure_allreduce(self) -> None:
        """Time an all-reduce over all ranks, by increasing size until the budget is used."""
        left_s, last_s = ALLREDUCE_BUDGET_S, 0.0
        everyone = range(len(self.measured.ranks))
        for size in ALLREDUCE_SIZES:
            next_s = SIZE_STEP * last_s
            if 2 * next_s > left_s:
                return  # the warm-up and one measurement would take too long
            repeats = (max(1, min(MAX_REPEATS, int(left_s / len(ALLREDUCE_SIZES) / next_s))) if next_s
                       else FIRST_REPEATS)
            times = self._ranks.call("reduce", dict.fromkeys(everyone, (size, repeats)), ALLREDUCE_TIMEOUT_S,
                                     f"all-reduce of {size:,} bytes")
            if len(times) < len(everyone):
                if self._ranks.can_meet(everyone):  # otherwise the failed rank has a finding
                    self.measured = self.measured._replace(incomplete_allreduce=(size, len(times)))
                return
            last_s = times[0]
            left_s -= (repeats + 1) * last_s
            self.measured.allreduce[size] = min(last_s, self.measured.allreduce.get(size, last_s))

    def _turns(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return ranks in turns: nodes on the same machine, such as containers, would disturb each other."""
        nodes = group_pairs((self.measured.ranks[rank].node, rank) for rank in sorted(ranks))
        turns = split_into_turns({node: {self._machines[node]} for node in nodes})
        return [[rank for node in turn for rank in nodes[node]] for turn in turns]


def part_s(rounds: int) -> float:
    """Return the seconds for each part of a meeting in a pass with so many rounds."""
    return min(MAX_MEETING_S, max(MIN_MEETING_S, MEETINGS_BUDGET_S / max(1, rounds))) / MEETING_PARTS


def _has_both(pair: Link, results: Collection[Link]) -> bool:
    return pair in results and pair[::-1] in results


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
