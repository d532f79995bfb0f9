"""The snapshot service of the coordinator: it asks every sentinel where its rank is, and answers those who asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from ..failure.root_cause import NOBODY, JobActivity, Report
from ..failure.stack import Frame, frames_from_json, frames_from_lists
from ..sentinel.protocol import Sent
from .outliers import calls_of, failed_at, free, picture, places_of
from .protocol import Progress, Shown, Where, Whereabouts
from .rendering import as_json, lines
from .snapshot import WAITING, Entered, Rank, Worker
from .stall import Deserted, Stall, deserted

NOTHING = Progress(0, 0.0, "", False)

Letters = list[tuple[int, Sent]]


class Survey:
    """Asks sentinels, and answers the links that have asked."""

    def __init__(self) -> None:
        self._number = 0
        self._askers: list[int] = []
        self._hosts: dict[int, str] = {}  # of the ranks that are asked for
        self._found: dict[int, Whereabouts] = {}
        self.ranks: list[Rank] = []  # as they were seen last

    def ask(self, asker: int, links: Mapping[int, int], hosts: Mapping[int, str]) -> Letters:
        """Begin, if none is on its way, and return the questions: to the `links` of all ranks, which are on `hosts`.

        An `asker` below 0 has no link: it reads `ranks`.
        """
        is_busy = bool(self._askers)
        self._askers = [*self._askers, asker] if asker not in self._askers else self._askers
        if is_busy:
            return []
        self._number += 1
        self._found, self._hosts = {}, dict(hosts)
        return [(link, Where(self._number)) for link in links.values()]

    def hear(self, rank: int, found: Whereabouts) -> Letters:
        """Take a rank's answer, unless it comes too late; return the picture, if it is the last one."""
        if found.number == self._number:
            self._found[rank] = found
        return self.answer() if self._hosts.keys() <= self._found.keys() else []

    def forget(self, asker: int) -> None:
        """Forget one who asked."""
        self._askers = [one for one in self._askers if one != asker]

    def answer(self) -> Letters:
        """Return the picture, as far as answers have come, for those who asked."""
        askers, self._askers = self._askers, []
        if not askers:
            return []
        self.ranks = self._ranks()
        shown = Shown(as_json(picture(self.ranks)) if max(askers) >= 0 else "")
        return [(link, shown) for link in askers]

    def _ranks(self) -> list[Rank]:
        known: dict[str, tuple[Frame, ...]] = {"": ()}  # most ranks' stacks are alike, and how far they are
        entered: dict[str, tuple[Entered, ...]] = {}
        ranks = []
        for rank in sorted(self._hosts):
            host, found = self._hosts[rank], self._found.get(rank)
            if found is None:
                ranks.append(Rank(rank, host, heard=False))
                continue
            steps, age_s, groups, spins = found.progress or NOTHING
            try:
                if found.stack not in known:
                    known[found.stack] = frames_from_json(found.stack)
                if groups not in entered:
                    entered[groups] = collectives(groups)
                children = workers(found.children)
            except (ValueError, TypeError, RecursionError):  # that does not make the others dumb
                ranks.append(Rank(rank, host, heard=False))
                continue
            ranks.append(Rank(rank, host, known[found.stack], found.state, found.kernel, found.cores, found.busy_s,
                              found.moved_bytes, True, found.ended, children, steps, age_s, entered[groups], spins,
                              found.faults, found.unseen, found.native))
        return ranks


def collectives(text: str) -> tuple[Entered, ...]:
    """Return how far a rank is in each process group, as `Progress` tells it."""
    return tuple(Entered(int(number), str(ranks), str(name))
                 for number, ranks, name in (json.loads(text) if text else ()))


def workers(text: str) -> tuple[Worker, ...]:
    """Return the processes that a message tells of."""
    return tuple(Worker(int(pid), frames_from_lists(frames), *map(str, words))
                 for pid, frames, *words in (json.loads(text) if text else ()))


class Standstill(NamedTuple):
    """What is said of a job whose ranks do not move, or move again; why it ends, empty if it moves.

    `rank` is the first one that is odd, NOBODY if none is.
    """

    text: str
    cause: str
    rank: int


class Inquiry:
    """Asks by `survey`, and makes sentences and tables of what it has found last."""

    def __init__(self, stall_s: float) -> None:
        self.survey, self._stall, self._deserted = Survey(), Stall(stall_s), Deserted()

    @property
    def pause_s(self) -> float:
        """The time from one look of --stall to the next."""
        return self._stall.pause_s

    def table(self) -> str:
        """Return where the ranks are, in lines."""
        return "\n".join(lines(picture(self.survey.ranks)))

    def seen(self, failed: Mapping[int, str]) -> JobActivity:
        """Return where ranks are for a verdict; those that have `failed` already are at the line where they did."""
        ranks = [failed_at(one, failed[one.rank]) if failed.get(one.rank) else one for one in self.survey.ranks]
        found = picture(ranks)
        stands = found.odd is not None or all(group.place.at in WAITING for group in found.groups)
        return JobActivity(places_of(ranks), free(ranks), calls_of(ranks), "\n".join(lines(found)) if stands else "",
                           has_groups=any(len(one.entered) > 1 for one in ranks), deadlock=deserted(ranks))

    def deserted(self, now_s: float) -> Report | None:
        """Return the report on ranks that wait for one which has come to its end, as Deserted.see() does."""
        return self._deserted.see(self.survey.ranks, now_s)

    def standstill(self, now_s: float) -> Standstill | None:
        """Return what to say at `now_s`, on any monotonic clock, None for nothing."""
        line = self._stall.see(self.survey.ranks, now_s)
        if not line:
            return None
        if not self._stall.lasts_s:
            return Standstill(line, "", NOBODY)
        found = picture(self.survey.ranks)
        cause = "; ".join([line, *found.findings])
        return Standstill("\n".join([line, *lines(found)]), cause, found.odd.ranks[0] if found.odd else NOBODY)
