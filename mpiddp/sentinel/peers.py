"""Who is there: the sentinels that have said hello to the coordinator."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..beside.messages import Hello, Missing, Neighbour
from ..plan.verdict import Seen, named
from . import events


class Peer:
    """The sentinel of a rank, as the coordinator knows it."""

    def __init__(self, link: int, hello: Hello) -> None:
        self.link, self.rank, self.host = link, hello.rank, hello.host
        self.namespace, self.pid = hello.namespace, hello.pid
        self.gone = False  # the rank
        self.ruled = False  # it failed too, and has its ruling: it waits for the job's end


class Peers:
    """The sentinels, by link and by rank; and which one of each namespace watches all ranks there, its elder.

    `hosts` has the host of each rank that was ever there.
    """

    def __init__(self) -> None:
        self.by_link: dict[int, Peer] = {}
        self.by_rank: dict[int, Peer] = {}
        self.hosts: dict[int, str] = {}
        self._elders: dict[str, Peer] = {}

    def may_be(self, hello: Hello) -> bool:
        """Tell whether this may be the sentinel of a rank: a rank has one, and another one if that was killed."""
        former = self.by_rank.get(hello.rank)
        return former is None or (former.namespace, former.pid) == (hello.namespace, hello.pid)

    def admit(self, link: int, hello: Hello) -> Peer:
        """Admit a sentinel."""
        self.hosts[hello.rank] = hello.host
        peer = self.by_link[link] = self.by_rank[hello.rank] = Peer(link, hello)
        return peer

    def introduce(self, peer: Peer) -> Iterator[tuple[Peer, Neighbour]]:
        """Yield what to tell elders because one is new: whom to watch."""
        elder, news = self._elders.setdefault(peer.namespace, peer), [peer]
        if elder is not peer and elder.rank == peer.rank:  # in the place of one that was killed: it knows of nobody yet
            self._elders[peer.namespace] = elder = peer
            news = [one for one in self.by_rank.values() if one.namespace == peer.namespace]
        for one in news:
            yield elder, Neighbour(one.rank, one.pid)

    def drop(self, peer: Peer) -> None:
        """Forget a sentinel that has left, or is gone."""
        del self.by_link[peer.link], self.by_rank[peer.rank]


class Search:
    """Finds out where the ranks are: for the verdict, and for those who ask who is missing."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._askers: list[Peer] = []

    def begin(self, asker: Peer | None = None) -> list[events.CoordinatorAction]:
        """Begin, unless it has begun; `asker` waits for the answer."""
        busy = self.seen.looking
        self.seen = self.seen._replace(looking=True)
        if asker is not None:
            self._askers.append(asker)
        return [] if busy else [events.Survey()]

    def end(self, seen: Seen, missing: Collection[int], peers: Peers) -> list[events.CoordinatorAction]:
        """Take what was found, and tell those who have asked which ranks are missing, and where these are."""
        self.seen = seen
        words = named(missing, peers.hosts, seen.places)
        askers, self._askers = self._askers, []
        return [events.ToPeer(peer.link, Missing(words)) for peer in askers]
