"""A survey: every sentinel is asked where its rank is, and those who wait for it get one picture.

No I/O, no clock: the coordinator's process sends what the functions return, each message over the link beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..beside.asking import Progress, Shown, Where, Whereabouts
from ..beside.messages import Sent
from .merge import picture
from .seen import Entered, Rank, Worker
from .stack import Frame, from_lists, from_text
from .table import as_json

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
                    known[found.stack] = from_text(found.stack)
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
    return tuple(Worker(int(pid), from_lists(frames), *map(str, words))
                 for pid, frames, *words in (json.loads(text) if text else ()))
