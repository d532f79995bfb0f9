"""The logic of a survey: every sentinel is asked where its rank is, and those who wait for it get one picture.

No I/O, no clock: as the coordinator, whose peers it asks.
"""

from __future__ import annotations

from ..beside.messages import Ask, Shown, Where, Whereabouts
from ..where.merge import Picture, Rank, Worker, picture
from ..where.stack import Frame, from_text
from ..where.table import as_json
from . import events
from .peers import Peers

LONGEST_S = 2.0  # for all to answer


class Survey:
    """Asks the sentinels in `peers`, and answers links that have asked."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._number = 0  # of the survey
        self._askers: list[int] = []
        self._found: dict[int, Whereabouts] = {}  # by rank
        self._expected: set[int] = set()

    def ask(self, link: int, _: Ask) -> list[events.CoordinatorAction]:
        """Begin, if none is on its way; `link` gets the picture."""
        self._askers.append(link)
        if len(self._askers) > 1:
            return []
        self._number += 1
        self._found, self._expected = {}, set(self._peers.by_rank)
        question = Where(self._number)
        return [*(events.ToPeer(peer.link, question) for peer in self._peers.by_link.values()),
                events.SetTimer("survey", LONGEST_S), *self._answer_if_complete()]

    def hear(self, link: int, found: Whereabouts) -> list[events.CoordinatorAction]:
        """Take an answer; a late one is none."""
        peer = self._peers.by_link.get(link)
        if peer is None or found.number != self._number or not self._askers:
            return []
        self._found[peer.rank] = found
        return self._answer_if_complete()

    def lose(self, link: int) -> list[events.CoordinatorAction]:
        """Forget one who asked."""
        self._askers = [one for one in self._askers if one != link]
        return []

    def due(self) -> list[events.CoordinatorAction]:
        """Answer with what has come."""
        return self._answer()

    def _answer_if_complete(self) -> list[events.CoordinatorAction]:
        return self._answer() if self._expected <= self._found.keys() else []

    def _answer(self) -> list[events.CoordinatorAction]:
        if not self._askers:
            return []
        shown = Shown(as_json(self._picture()))
        askers, self._askers = self._askers, []
        return [events.ToPeer(link, shown) for link in askers]

    def _picture(self) -> Picture:
        known: dict[str, tuple[Frame, ...]] = {"": ()}  # most ranks' stacks are alike
        ranks = []
        for rank in sorted(self._expected):
            host, found = self._peers.hosts[rank], self._found.get(rank)
            if found is None:
                ranks.append(Rank(rank, host, heard=False))
                continue
            if found.stack not in known:
                known[found.stack] = from_text(found.stack)
            ranks.append(Rank(rank, host, known[found.stack], found.state, found.kernel, found.cores,
                              ended=found.ended, workers=workers(found.children) if found.children else ()))
        return picture(ranks)


def workers(text: str) -> tuple[Worker, ...]:
    """Return the processes that a message tells of."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("  "):
            found[-1][1].append(line[2:])
        else:
            found.append((line, []))
    return tuple(Worker(int(pid), from_text("\n".join(lines)), state, kernel)
                 for (pid, state, kernel), lines in ((head.split(" ", 2), lines) for head, lines in found))
