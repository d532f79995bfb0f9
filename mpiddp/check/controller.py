"""Rank 0's part in a check: passes in each of which all ranks measure all there is to measure, and how far they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..base.errors import LocalLaunchError
from ..base.stderr import STDERR, write_all, write_line
from ..base.text import join_names
from . import OWN_S, PAUSE_S
from .bench.network import Ways, together
from .bench.rank import ANSWER_S, START_S
from .rpc import RpcController
from .stats.schema import CLOCK, Link, Measurements, Passes, empty
from .stats.tournament import Meetings, in_turns, rounds, shuffled
from .workers import REDUCING_LIMIT_S, PairResult

WIDTH = 30


class Progress:
    """Says what is being measured. Where stderr is no terminal, as under mpirun, it has no bar but a line for each."""

    def __init__(self) -> None:
        self._terminal, self._words = os.isatty(STDERR), ""

    def show(self, words: str, done: int, of: int) -> None:
        """Say that `done` of so many parts are through."""
        if self._terminal:
            filled = WIDTH * done // max(1, of)
            write_all(STDERR, f"\r\033[K{words} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{of}".encode())
        elif words != self._words:
            write_line(f"mpiddp.check: measuring {words}")
        self._words = words

    def end(self) -> None:
        """Take the bar away."""
        if self._terminal and self._words:
            write_all(STDERR, b"\r\033[K")


MEETINGS_S = 12.0  # in a pass, for all meetings together
LONGEST_MEETING_S, SHORTEST_MEETING_S = 1.0, 0.2
PARTS = 6  # of a meeting: pings, messages there, and messages back, over MPI and over the backend
REDUCING_S = 0.7  # in a pass
OWN_LIMIT_S = 18.0  # besides the time that it is meant to take: three folders that hang have 5 s each
MEETING_LIMIT_S = 12.0  # a meeting that takes so long has lost somebody
SIZES = tuple(2**power for power in range(10, 29, 2))  # of an all-reduce: 1 KiB to 256 MiB
FIRST_TIMES, MOST_TIMES = 3, 20  # of the first size, and of one at most


class Controller:
    """Lets ranks measure, and keeps what they have measured."""

    def __init__(self, ranks: RpcController, size: int, patience_s: float, progress: Progress | None = None) -> None:
        """Ask the ranks who they are, which may take `patience_s`; raise LocalLaunchError if one does not answer."""
        self._ranks, self._progress = ranks, progress
        answers = ranks.call("who", dict.fromkeys(range(size), ()), patience_s, "to say who it is")
        if len(answers) < size:
            raise unknown(ranks, [rank for rank in range(size) if rank not in answers], patience_s)
        self.measured = empty(tuple(answers[rank].info for rank in range(size)))._replace(
            lost=ranks.lost, claims={rank: answer.claims for rank, answer in answers.items()})
        self._nodes: dict[int, list[int]] = {}  # the ranks of each, in the order of local ranks
        for rank, info in enumerate(self.measured.ranks):
            self._nodes.setdefault(info.node, []).append(rank)
        self._machines = {rank: answer.machine for rank, answer in answers.items()}
        self._on_cpus = all(info.device == "cpu" for info in self.measured.ranks)  # which have memory between them
        self._meetings = Meetings(len(self._nodes))
        self._meetings_inside = {node: Meetings(len(ranks)) for node, ranks in self._nodes.items()}

    def run(self, passes: int, links: bool, goes_on: Callable[[Measurements], bool] = lambda _: True) -> Measurements:
        """Let all ranks measure in each pass, with or without the links between them; return what was measured.

        After a pass there is another one only if it `goes_on`.
        """
        for number in range(passes):
            if number:
                if not goes_on(self.measured):
                    break
                time.sleep(PAUSE_S)
            self._measure_ranks(number)
            if links:
                self._measure_links(number)
        if self._progress:
            self._progress.end()
        for rank, words in self._ranks.troubles.items():
            self.measured.add(rank, {}, words)
        inside = frozenset(pair for meetings in self._meetings_inside.values() for pair in meetings.unmet)
        return self.measured._replace(unreachable=frozenset(self._meetings.unmet), unreachable_inside=inside)

    def _show(self, words: str, number: int, done: int, of: int) -> None:
        if self._progress:
            self._progress.show(f"{words}, pass {number + 1}", done, of)

    def _measure_ranks(self, number: int) -> None:
        """Let ranks measure themselves; not again those whose device does not compute: each try may take a minute."""
        limit_s = OWN_S + OWN_LIMIT_S + (0.0 if self._on_cpus else START_S + ANSWER_S)
        turns = self._turns(rank for rank in self._machines if self._ranks.can_meet([rank]))
        for at, turn in enumerate(turns):
            self._show("nodes", number, at, len(turns))
            for rank, own in self._ranks.call("own", dict.fromkeys(turn, (OWN_S,)), limit_s,
                                              "what it measures itself").items():
                self.measured.add(rank, own.values, own.told)
                if not own.computes:
                    self._ranks.excluded.add(rank)

    def compare_clocks(self) -> None:
        """Compare each node's clock with rank 0's."""
        others = tuple(ranks[0] for ranks in self._nodes.values() if ranks[0] not in {0, *self._ranks.lost})
        orders = dict.fromkeys(others, ((0,),))
        answers = self._ranks.call("clock", {0: (others,), **orders}, OWN_LIMIT_S, "a comparison of clocks with rank 0")
        self.measured.own[CLOCK] = {0: [0.0], **{rank: [offset] for rank, offset in answers.get(0, {}).items()}}

    def _measure_links(self, number: int) -> None:
        """Let ranks meet: within their nodes, all nodes in pairs, then all together."""
        if len(self._nodes) == 1 or not self._on_cpus:
            plans = [[[(ranks[one], ranks[other]) for one, other in pairs] for pairs in
                      shuffled(rounds(len(ranks)), number)] for ranks in self._nodes.values()]
            count = max(map(len, plans))
            for at in range(count):
                self._show("pairs within nodes", number, at, count)
                now = [pair for plan in plans for some in plan[at:at + 1] for pair in some]
                self._meet_inside(now, meeting_s(count))
        plan = shuffled(rounds(len(self._nodes)), number)
        for at, pairs in enumerate(plan):
            self._show("pairs of nodes", number, at, len(plan))
            able = [pair for pair in pairs
                    if self._meetings.can_meet(pair) and self._ranks.can_meet(self._ends(pair, 1))]
            for turn in self._turns_of_pairs(able):
                self._meet_between(turn, meeting_s(len(plan)))
        if len(self.measured.ranks) > 1:
            self._reduce(number)

    def _meet_inside(self, pairs: Iterable[Link], seconds: float) -> None:
        """Let pairs of ranks of a node meet, no rank two others at a time."""
        able = [pair for pair in pairs if self._ranks.can_meet(pair) and self._meetings_of(pair).can_meet(pair)]
        partners = {one: other for pair in able for one, other in (pair, pair[::-1])}
        for turn in self._turns(partners):
            orders = {rank: (partners[rank], seconds, True) for rank in turn}
            answers = self._ranks.call("stream", orders, MEETING_LIMIT_S, "a meeting within its node")
            for pair in (pair for pair in able if pair[0] in orders):
                if answers.keys() >= {*pair}:
                    self._meetings_of(pair).note([pair], [])
                    for rank, partner in (pair, pair[::-1]):
                        ways = answers[rank]._replace(resent=-1.0)
                        keep(self.measured.inside, (rank, partner), [ways], ways.latency_s)
                elif self._ranks.can_meet(pair):
                    self._meetings_of(pair).note([], [pair])

    def _meetings_of(self, pair: Link) -> Meetings:
        """Return the meetings of the node of these ranks."""
        return self._meetings_inside[self.measured.ranks[pair[0]].node]

    def _meet_between(self, pairs: Sequence[Link], seconds: float) -> None:
        """Let the first ranks of pairs of nodes meet, then all of their ranks at once where these are GPUs'."""
        met: dict[Link, list[PairResult]] = self._meet(
            "meet", pairs, 1, lambda pair: (seconds, self._flows(pair) > 1))
        several = [pair for pair in pairs if both(pair, met) and self._flows(pair) > 1]
        connected = self._meet("connect", several, 0, lambda _: ())
        streams: dict[Link, list[Ways]] = self._meet(
            "stream", [pair for pair in several if both(pair, connected)], 0, lambda _: (seconds, False))
        through = [pair for pair in pairs if both(pair, met) and (pair not in several or both(pair, streams))]
        self._meetings.note(through, [pair for pair in pairs if pair not in through and self._ranks.can_meet(
            self._ends(pair, self._flows(pair) if pair in several else 1))])
        for link in (link for pair in through for link in (pair, pair[::-1])):
            result = met[link][0]
            first = met[min(link), max(link)][0]  # both see the same latency
            latency_s = first.by_backend.latency_s
            if result.by_mpi and first.by_mpi:
                keep(self.measured.by_mpi, link, [result.by_mpi], first.by_mpi.latency_s)
                latency_s = min(latency_s, first.by_mpi.latency_s)  # gloo's threads sleep, and may be slow to wake up
            keep(self.measured.links, link, streams.get(link, [result.by_backend]), latency_s)

    def _meet(
        self, work: str, pairs: Sequence[Link], most: int, rest: Callable[[Link], tuple[Any, ...]]
    ) -> dict[Link, list[Any]]:
        """Let ranks of nodes meet, `most` of each or all; return for each link what the ranks of its first node answer.

        `rest` returns their arguments besides their partner. Links of which not all ranks answer are left out.
        """
        orders, of = {}, {}
        for pair in pairs:
            for link in (pair, pair[::-1]):
                for rank, partner in zip(self._nodes[link[0]], self._nodes[link[1]][:most or self._flows(pair)],
                                         strict=False):
                    if self._ranks.can_meet((rank, partner)):
                        orders[rank] = (partner, *rest(pair))
                        of[rank] = link
        answers = self._ranks.call(work, orders, MEETING_LIMIT_S, "a meeting with another node")
        found: dict[Link, list[Any]] = {}
        for rank, answer in sorted(answers.items()):
            found.setdefault(of[rank], []).append(answer)
        return {link: some for link, some in found.items() if len(some) == (most or self._flows(link))}

    def _flows(self, pair: Link) -> int:
        """Return how many ranks of two nodes meet at a time: one where they compute on CPUs, as they share a link."""
        ranks = [rank for node in pair for rank in self._nodes[node]]
        if any(self.measured.ranks[rank].device == "cpu" for rank in ranks):
            return 1
        return min(len(self._nodes[node]) for node in pair)

    def _ends(self, pair: Link, count: int) -> list[int]:
        """Return the first ranks of both nodes."""
        return [rank for node in pair for rank in self._nodes[node][:count]]

    def _reduce(self, number: int) -> None:
        """Time an all-reduce over all ranks, of one size after the other, as long as there is time."""
        left_s, last_s = REDUCING_S, 0.0
        everyone = range(len(self.measured.ranks))
        for at, size in enumerate(SIZES):
            next_s = 4 * last_s
            if self.measured.incomplete_allreduce or not self._ranks.can_meet(everyone) or 2 * next_s > left_s:
                return  # a warm-up, and one that counts, would take too long
            self._show("all-reduce", number, at, len(SIZES))
            times = max(1, min(MOST_TIMES, int(left_s / len(SIZES) / next_s))) if next_s else FIRST_TIMES
            answers = self._ranks.call("reduce", dict.fromkeys(everyone, (size, times)), REDUCING_LIMIT_S,
                                       f"an all-reduce of {size:,} bytes")
            if len(answers) < len(everyone):
                if self._ranks.can_meet(everyone):  # else it is told by whom it fails
                    self.measured = self.measured._replace(incomplete_allreduce=(size, len(answers)))
                return
            last_s = answers[0]
            left_s -= (times + 1) * last_s
            self.measured.allreduce[size] = min(last_s, self.measured.allreduce.get(size, last_s))

    def _turns(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return ranks in turns: nodes that share a machine, as containers do, would disturb each other."""
        asked = sorted(ranks)
        turns = in_turns([self.measured.ranks[rank].node for rank in asked], [self._machines[rank] for rank in asked])
        return [[asked[at] for at in turn] for turn in turns]

    def _turns_of_pairs(self, pairs: Iterable[Link]) -> list[list[Link]]:
        """Return pairs of nodes in turns, of which no two are on the same machine."""
        turns: list[tuple[set[str], list[Link]]] = []
        for pair in pairs:
            both = {self._machines[self._nodes[node][0]] or f"node {node}" for node in pair}
            free = next((turn for turn in turns if not turn[0] & both), None)
            if free is None:
                turns.append((both, [pair]))
            else:
                free[0].update(both)
                free[1].append(pair)
        return [some for _, some in turns]


def meeting_s(count: int) -> float:
    """Return how many seconds each part of each of so many meetings in a row may take."""
    return min(LONGEST_MEETING_S, max(SHORTEST_MEETING_S, MEETINGS_S / max(1, count))) / PARTS


def both(pair: Link, answers: Collection[Link]) -> bool:
    """Return whether both directions of a pair have an answer."""
    return pair in answers and pair[::-1] in answers


def keep(kept: dict[str, dict[Link, Passes]], link: Link, told: Sequence[Ways], latency_s: float) -> None:
    """Add a pass of a link, on which the ranks that tell of it have sent at the same time."""
    values = {"latency": latency_s, "large": together([one.large for one in told])}
    resent = max(one.resent for one in told)
    if resent >= 0:
        values["resent"] = resent
    for name, value in values.items():
        if value or name == "resent":
            kept.setdefault(name, {}).setdefault(link, []).append(value)


def unknown(ranks: RpcController, silent: Sequence[int], patience_s: float) -> LocalLaunchError:
    """Return why there is no check where ranks do not say who they are: what went wrong there, if they tell it."""
    named = [f"{ranks.name(rank)}{''.join(f' ({words})' for words in ranks.troubles.get(rank, ()))}" for rank in silent]
    return LocalLaunchError(
        "startup-timeout",
        actual=f"{len(silent)} of the check's ranks did not say who they are within {patience_s:g} s: "
              f"{join_names(named)}",
        needed="all ranks ready before the startup timeout",
        do="look at those hosts (a slow file system, a broken node); more time: --startup-timeout SECONDS",
    )
