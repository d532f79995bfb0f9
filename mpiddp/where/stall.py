"""Jobs that hang: no rank has moved for some time, or ranks wait for one that has ended. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.text import format_duration, format_ranges
from ..failure import stack
from ..failure.root_cause import NOBODY, Report, ReportKind
from ..failure.stack import make_stall_fingerprint
from .outliers import calls_of, what_at
from .snapshot import At, Rank

MOST_S = 10.0  # between two looks
LOOKS = 5  # within the time after which a job is said to stand still
IDLE = 0.02  # of a processor: a rank that uses more, with its descendants, has moved
GRAIN_S = 0.02  # of what the kernel tells: a process's own time and the kernel's in hundredths of a second, each
IDLE_BYTES = 4096  # in a second: so has one that reads, writes, receives and sends more
IDLE_FAULTS = 20  # minor page faults in a second, and as many more: one that waits and is asked has up to 10
LOOKED_AT = "stacks, processor time, page faults, files, TCP"  # of all ranks and their children


class Stall:
    """Compares one look at all ranks with the next."""

    def __init__(self, limit_s: float) -> None:
        """Say that the job stands still when that has lasted for `limit_s`, and again whenever it has doubled."""
        self._limit_s = self._next_s = limit_s
        self._ranks: dict[int, Rank] = {}
        self._looked_s = self._since_s = 0.0
        self._said: dict[int, str] = {}  # what it is that cannot be seen of a rank
        self.lasts_s = 0.0  # since when no rank has moved, as it was told last; 0 while they move

    @property
    def pause_s(self) -> float:
        """The time to the next look."""
        return min(MOST_S, self._limit_s / LOOKS)

    def see(self, ranks: Sequence[Rank], now_s: float) -> str:
        """Take a look at all ranks at `now_s`, on any monotonic clock; return a line to print, empty for none."""
        before = self._ranks
        self._ranks = {one.rank: known(before.get(one.rank, one), one) for one in ranks}
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if before.keys() != self._ranks.keys() or all(one.ended for one in ranks) or any(
                has_moved(before[rank], one, passed_s) for rank, one in self._ranks.items()):
            self._since_s, self._next_s = now_s, self._limit_s
            stood_s, self.lasts_s = self.lasts_s, 0.0
            return f"the ranks move again, after {format_duration(stood_s)}" if stood_s else ""
        stands_s = now_s - self._since_s
        if stands_s < self._next_s:
            return ""
        if blind := [one for one in ranks if not one.heard or (one.unseen and not one.ended)]:
            return self._say_blind(blind)
        self._next_s, self.lasts_s = 2 * stands_s, stands_s
        return f"no rank has moved for {format_duration(stands_s)} ({LOOKED_AT})"

    def _say_blind(self, blind: Sequence[Rank]) -> str:
        """Say once of ranks that cannot be seen that nothing is concluded."""
        reasons = {one.rank: one.unseen if one.heard else "its sentinel does not answer" for one in blind}
        new = {rank: reason for rank, reason in reasons.items() if self._said.get(rank) != reason}
        if not new:
            return ""
        self._said.update(new)
        (first, reason), more = next(iter(new.items())), len(new) - 1
        others = f", and so it is with {more:,} more rank{'s' * (more > 1)}" if more else ""
        return f"--stall cannot tell whether the ranks move: of rank {first}, {reason}{others}"


def known(before: Rank, now: Rank) -> Rank:
    """Return what is known of a rank: where a look has not shown it, that is as before."""
    if not now.heard:
        return before
    told = now if now.entered or now.steps else before
    return now._replace(frames=now.frames or before.frames, entered=told.entered, steps=told.steps)


def has_moved(before: Rank, now: Rank, passed_s: float) -> bool:
    """Tell whether a rank is elsewhere than at the look before, `passed_s` ago, or has worked since."""
    if now.ended and before.ended:  # it polls for the others
        return False
    return (now.ended != before.ended or make_stall_fingerprint(now.frames) != make_stall_fingerprint(before.frames)
            or now.steps != before.steps or now.entered != before.entered
            or now.busy_s - before.busy_s > IDLE * passed_s + GRAIN_S
            or now.faults - before.faults > IDLE_FAULTS * (passed_s + 1)
            or now.moved_bytes - before.moved_bytes > IDLE_BYTES * passed_s)


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
    return Report(NOBODY, "", ReportKind.UNREACHABLE, cause, STATUS, calls_of([first]).get(first.rank, ""))


def waits(one: Rank) -> bool:
    """Tell whether a rank waits in a collective; one that computes on a GPU does so in any function of torch's."""
    return what_at(one) is At.COLLECTIVE or (one.heard and one.spins and stack.is_in_torch(one.frames))


def has_left_behind(ended: Rank, one: Rank) -> bool:
    """Tell whether a rank that has come to its end has not made a call for which another one waits."""
    if stack.find_collective(one.frames) == "should_stop":
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
    return stack.find_collective(one.frames) or "torch"


def words(ranks: Sequence[Rank]) -> str:
    """Return what to call ranks."""
    one = ranks[0]
    numbers = format_ranges(rank.rank for rank in ranks)
    return f"rank {one.rank} on {one.host}" if len(ranks) == 1 else f"ranks {numbers}"
