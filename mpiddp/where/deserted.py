"""Ranks that wait for one which has come to the end of its script, and so never comes. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.verdict import ABSENT, NOBODY, Report
from ..plan.words import ranges
from . import stack
from .merge import calls_of, what_at
from .seen import At, Rank
from .stall import has_moved

STATUS = 1  # as at --exit-timeout


class Deserted:
    """Compares one look at all ranks with the next."""

    def __init__(self) -> None:
        self._ranks: dict[int, Rank] = {}
        self._looked_s = 0.0

    def see(self, ranks: Sequence[Rank], now_s: float) -> Report | None:
        """Take a look at all ranks at `now_s`, on any monotonic clock.

        Return the report on a job that can't go on, None where it may: that needs two looks without a movement.
        """
        before, passed_s = self._ranks, now_s - self._looked_s
        self._ranks, self._looked_s = {one.rank: one for one in ranks}, now_s
        stand = before.keys() == self._ranks.keys() and not any(
            has_moved(before[one.rank], one, passed_s) for one in ranks)
        return deserted(ranks) if stand else None


def deserted(ranks: Sequence[Rank]) -> Report | None:
    """Return the report on a job of which every rank waits in a collective, or has come to its end, if that is so.

    At least one rank has to be further in a process group than another one of it that has come to its end. One that
    computes or saves a file keeps the job from that: others may wait for it. One that cannot be seen does so, too.
    """
    ended = [one for one in ranks if what_at(one) is At.ENDED]
    living = [one for one in ranks if what_at(one) is not At.ENDED]
    if not all(waits(one) for one in living):
        return None
    missed = {one.rank: [other for other in ended if has_left_behind(other, one)] for one in living}
    first = next((one for one in living if missed[one.rank]), None)
    if first is None:
        return None
    name = collective(first)
    same = [one for one in living if missed[one.rank] == missed[first.rank] and collective(one) == name]
    whom = missed[first.rank]
    wait, have = "waits" if len(same) == 1 else "wait", "has" if len(whom) == 1 else "have"
    cause = f"{words(same)} {wait} in {name} for {words(whom)}, which {have} come to the end of the script"
    return Report(NOBODY, "", ABSENT, cause, STATUS, calls_of([first]).get(first.rank, ""))


def waits(one: Rank) -> bool:
    """Tell whether a rank waits in a collective; one that computes on a GPU does so in any function of torch's."""
    return what_at(one) is At.COLLECTIVE or (one.heard and one.spins and stack.waits_in_torch(one.frames))


def has_left_behind(ended: Rank, one: Rank) -> bool:
    """Tell whether a rank that has come to its end has not made a call for which another one waits."""
    if stack.collective(one.frames) == "should_stop":
        return ended.steps < one.steps
    numbers = {(names, group): number for number, names, group in ended.entered}
    return any(numbers.get((names, group), number) < number if numbers else ended.rank in listed(names)
               for number, names, group in one.entered)  # which may have destroyed its groups


def listed(names: str) -> set[int]:
    """Return the ranks in what plan.words.ranges() has written, but those that it has only counted."""
    pairs = [part.partition("-") for part in names.partition(" and ")[0].split(",") if part]
    return {rank for first, _, last in pairs for rank in range(int(first), int(last or first) + 1)}


def collective(one: Rank) -> str:
    """Return the name of what a rank waits in."""
    return stack.collective(one.frames) or "torch"


def words(ranks: Sequence[Rank]) -> str:
    """Return what to call ranks."""
    one = ranks[0]
    return f"rank {one.rank} on {one.host}" if len(ranks) == 1 else f"ranks {ranges(rank.rank for rank in ranks)}"
