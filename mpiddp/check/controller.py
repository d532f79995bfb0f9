"""Rank 0's part in a check: in each pass, call the ranks to measure themselves, in pairs, and all together."""

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
from .stats.schema import BANDWIDTH, CLOCK, LATENCY, RETRANSMITS, Link, Measurements, Passes, no_measurements
from .stats.tournament import MeetingLog, shuffled_tournament, split_into_turns
from .workers import ALLREDUCE_TIMEOUT_S, PairResult

MEETINGS_BUDGET_S = 12.0  # in a pass, for all rounds together
MAX_MEETING_S, MIN_MEETING_S = 1.0, 0.2
MEETING_PARTS = 6  # latency, messages there and messages back, over MPI and over the backend
MEETING_TIMEOUT_S = 12.0
RANK_TIMEOUT_S = 18.0  # in addition to the budget: three folders that hang take 5 s each (FOLDER_TIMEOUT_S)
ALLREDUCE_BUDGET_S = 0.7  # in a pass
SIZE_STEP = 4  # from a size of an all-reduce to the next, which takes at most so many times as long
ALLREDUCE_SIZES = tuple(2**10 * SIZE_STEP**step for step in range(10))  # 1 KiB to 256 MiB
FIRST_REPEATS, MAX_REPEATS = 3, 20  # of an all-reduce of the first size, and of any


class Controller:
    """Calls the ranks, and collects what they measure."""

    def __init__(self, ranks: RpcController, size: int, startup_timeout_s: float) -> None:
        """Ask the ranks what they are; raise LocalLaunchError if one does not answer within `startup_timeout_s`."""
        self._ranks = ranks
        identities = ranks.call("identify", dict.fromkeys(range(size), ()), startup_timeout_s, "to say who it is")
        if len(identities) < size:
            raise startup_error(ranks, [rank for rank in range(size) if rank not in identities], startup_timeout_s)
        self.measured = no_measurements(tuple(identities[rank].info for rank in range(size)))._replace(
            lost=ranks.lost, claims={rank: identity.claims for rank, identity in identities.items()})
        self._nodes: dict[int, list[int]] = {}  # the ranks of each node, by local rank
        for rank, info in enumerate(self.measured.ranks):
            self._nodes.setdefault(info.node, []).append(rank)
        self._machines = {rank: identity.machine_id for rank, identity in identities.items()}
        self._on_cpus = all(info.device == "cpu" for info in self.measured.ranks)
        self._meetings = MeetingLog(len(self._nodes))
        self._meetings_inside = {node: MeetingLog(len(ranks)) for node, ranks in self._nodes.items()}

    def run_passes(self, passes: int, links: bool) -> Measurements:
        """Measure in passes, with or without the links between ranks."""
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
        offsets = self._ranks.call("clock", arguments, RANK_TIMEOUT_S, "a comparison of clocks with rank 0")
        self.measured.by_rank[CLOCK] = {0: [0.0], **{rank: [offset] for rank, offset in offsets.get(0, {}).items()}}

    def _measure_ranks(self, pass_number: int) -> None:
        """Let ranks measure themselves, except those whose device does not compute: each try may take a minute."""
        limit_s = RANK_BUDGET_S + RANK_TIMEOUT_S
        limit_s += 0.0 if self._on_cpus else DEVICE_START_TIMEOUT_S + DEVICE_TIMEOUT_S
        turns = self._turns(rank for rank in self._machines if self._ranks.can_meet([rank]))
        write_line(f"mpiddp.check: measuring nodes, pass {pass_number + 1}")
        for turn in turns:
            results = self._ranks.call("measure", dict.fromkeys(turn, (RANK_BUDGET_S,)), limit_s,
                                       "what it measures itself")
            for rank, result in results.items():
                self.measured.add(rank, result.values, result.reports)
                if not result.computes:
                    self._ranks.excluded.add(rank)

    def _measure_links(self, pass_number: int) -> None:
        """Let ranks meet: inside nodes, then all nodes in pairs, then all ranks together."""
        if len(self._nodes) == 1 or not self._on_cpus:  # on CPUs, the links inside a node are the host memory
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
            for turn in self._turns_of_pairs(able):
                self._meet_between(turn, part_s(len(rounds)))
        everyone = range(len(self.measured.ranks))
        if len(everyone) > 1 and not self.measured.incomplete_allreduce and self._ranks.can_meet(everyone):
            write_line(f"mpiddp.check: measuring all-reduce, pass {pass_number + 1}")
            self._measure_allreduce()

    def _meet_inside(self, pairs: Iterable[Link], seconds: float) -> None:
        """Let pairs of ranks of a node meet, each rank one other."""
        able = [pair for pair in pairs if self._ranks.can_meet(pair) and self._log_of(pair).can_meet(pair)]
        partners = {rank: partner for pair in able for rank, partner in (pair, pair[::-1])}
        for turn in self._turns(partners):
            arguments = {rank: (partners[rank], seconds, True) for rank in turn}
            results = self._ranks.call("stream", arguments, MEETING_TIMEOUT_S, "a meeting within its node")
            for pair in (pair for pair in able if pair[0] in arguments):
                if results.keys() >= {*pair}:
                    self._log_of(pair).record([pair], [])
                    for link in (pair, pair[::-1]):
                        result = results[link[0]]._replace(retransmits=None)  # it is of other links
                        add_pass(self.measured.inside_links, link, [result], result.latency_s)
                elif self._ranks.can_meet(pair):
                    self._log_of(pair).record([], [pair])

    def _log_of(self, pair: Link) -> MeetingLog:
        return self._meetings_inside[self.measured.ranks[pair[0]].node]

    def _meet_between(self, pairs: Sequence[Link], seconds: float) -> None:
        """Let the first ranks of pairs of nodes meet; then all of their ranks at once if these have GPUs."""
        results: dict[Link, list[PairResult]] = self._call_pairs(
            "meet", pairs, 1, lambda pair: (seconds, self._streams(pair) > 1))
        several = [pair for pair in pairs if has_both(pair, results) and self._streams(pair) > 1]
        connected = self._call_pairs("connect", several, 0, lambda _: ())
        streams: dict[Link, list[LinkResult]] = self._call_pairs(
            "stream", [pair for pair in several if has_both(pair, connected)], 0, lambda _: (seconds, False))
        met = [pair for pair in pairs if has_both(pair, results) and (pair not in several or has_both(pair, streams))]
        failed = [pair for pair in pairs if pair not in met and self._ranks.can_meet(
            self._first_ranks(pair, self._streams(pair) if pair in several else 1))]
        self._meetings.record(met, failed)
        for link in (link for pair in met for link in (pair, pair[::-1])):
            result = results[link][0]
            first = results[min(link), max(link)][0]  # one latency for both directions
            latency_s = first.by_backend.latency_s
            if result.by_mpi and first.by_mpi:
                add_pass(self.measured.mpi_links, link, [result.by_mpi], first.by_mpi.latency_s)
                latency_s = min(latency_s, first.by_mpi.latency_s)  # gloo's threads sleep, and may wake up late
            add_pass(self.measured.links, link, streams.get(link, [result.by_backend]), latency_s)

    def _call_pairs(
        self, method: str, pairs: Sequence[Link], limit: int, arguments: Callable[[Link], tuple[Any, ...]]
    ) -> dict[Link, list[Any]]:
        """Let ranks of pairs of nodes meet; return for each link the results of the ranks of its first node.

        `limit` ranks of each node meet, or all if it is 0. `arguments` returns what a rank gets besides its partner.
        Links without results of all ranks are left out.
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
                                                    "a meeting with another node").items()):
            results.setdefault(link_of[rank], []).append(result)
        return {link: of_link for link, of_link in results.items() if len(of_link) == (limit or self._streams(link))}

    def _streams(self, pair: Link) -> int:
        """Return how many ranks of two nodes meet at a time: on CPUs one, as they share a link."""
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
                return  # a warm-up and one measurement would take too long
            repeats = (max(1, min(MAX_REPEATS, int(left_s / len(ALLREDUCE_SIZES) / next_s))) if next_s
                       else FIRST_REPEATS)
            times = self._ranks.call("reduce", dict.fromkeys(everyone, (size, repeats)), ALLREDUCE_TIMEOUT_S,
                                     f"an all-reduce of {size:,} bytes")
            if len(times) < len(everyone):
                if self._ranks.can_meet(everyone):  # otherwise the rank that failed has a finding
                    self.measured = self.measured._replace(incomplete_allreduce=(size, len(times)))
                return
            last_s = times[0]
            left_s -= (repeats + 1) * last_s
            self.measured.allreduce[size] = min(last_s, self.measured.allreduce.get(size, last_s))

    def _turns(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return ranks in turns: nodes on one machine, as containers are, would disturb each other."""
        members = sorted(ranks)
        turns = split_into_turns([self.measured.ranks[rank].node for rank in members],
                                 [self._machines[rank] for rank in members])
        return [[members[number] for number in turn] for turn in turns]

    def _turns_of_pairs(self, pairs: Iterable[Link]) -> list[list[Link]]:
        """Return pairs of nodes in turns without two nodes on one machine, except in a pair."""
        turns: list[tuple[set[str], list[Link]]] = []
        for pair in pairs:
            machines = {self._machines[self._nodes[node][0]] or f"node {node}" for node in pair}
            busy, members = next((turn for turn in turns if not turn[0] & machines), (set[str](), list[Link]()))
            if not members:
                turns.append((busy, members))
            busy.update(machines)
            members.append(pair)
        return [members for _, members in turns]


def part_s(rounds: int) -> float:
    """Return the seconds for each part of a meeting, if a pass has so many rounds."""
    return min(MAX_MEETING_S, max(MIN_MEETING_S, MEETINGS_BUDGET_S / max(1, rounds))) / MEETING_PARTS


def has_both(pair: Link, results: Collection[Link]) -> bool:
    """Return whether both directions of a pair have results."""
    return pair in results and pair[::-1] in results


def add_pass(
    links: dict[str, dict[Link, Passes]], link: Link, results: Sequence[LinkResult], latency_s: float
) -> None:
    """Add a pass of a link, on which the ranks of these results sent at the same time."""
    values = {LATENCY: latency_s, BANDWIDTH: total_bandwidth([result.transfers for result in results])}
    values = {name: value for name, value in values.items() if value}
    shares = [result.retransmits for result in results if result.retransmits is not None]
    if shares:
        values[RETRANSMITS] = max(shares)
    for name, value in values.items():
        links.setdefault(name, {}).setdefault(link, []).append(value)


def startup_error(ranks: RpcController, silent: Sequence[int], startup_timeout_s: float) -> LocalLaunchError:
    """Return why there is no check if ranks do not say what they are, with their errors."""
    names = [f"{ranks.name(rank)}{''.join(f' ({line})' for line in ranks.errors.get(rank, ()))}" for rank in silent]
    return LocalLaunchError(
        "startup-timeout",
        actual=f"{len(silent)} of the check's ranks did not say who they are within {startup_timeout_s:g} s: "
              f"{join_names(names)}",
        needed="all ranks ready before the startup timeout",
        do="look at those hosts (a slow file system, a broken node); more time: --startup-timeout SECONDS",
    )
