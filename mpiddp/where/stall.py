"""A job that stands still: no rank has moved for some time. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan.words import duration
from .seen import Rank
from .stack import essential

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
            return f"the ranks move again, after {duration(stood_s)}" if stood_s else ""
        stands_s = now_s - self._since_s
        if stands_s < self._next_s:
            return ""
        if blind := [one for one in ranks if not one.heard or (one.unseen and not one.ended)]:
            return self._say_blind(blind)
        self._next_s, self.lasts_s = 2 * stands_s, stands_s
        return f"no rank has moved for {duration(stands_s)} ({LOOKED_AT})"

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
    return (now.ended != before.ended or essential(now.frames) != essential(before.frames)
            or now.steps != before.steps or now.entered != before.entered
            or now.busy_s - before.busy_s > IDLE * passed_s + GRAIN_S
            or now.faults - before.faults > IDLE_FAULTS * (passed_s + 1)
            or now.moved_bytes - before.moved_bytes > IDLE_BYTES * passed_s)
