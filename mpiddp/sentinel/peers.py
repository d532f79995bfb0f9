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
        self.watched = True  # its sentinel lives; else the rank speaks for itself over this link
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

    def admit(self, link: int, hello: Hello) -> Peer:
        """Admit a sentinel."""
        self.hosts[hello.rank] = hello.host
        peer = self.by_link[link] = self.by_rank[hello.rank] = Peer(link, hello)
        return peer

    def introduce(self, peer: Peer) -> tuple[Peer, Neighbour]:
        """Return what to tell the elder of a new one's namespace: whom to watch."""
        return self._elders.setdefault(peer.namespace, peer), Neighbour(peer.rank, peer.pid)

    def unwatch(self, peer: Peer) -> Iterator[tuple[Peer, Neighbour]]:
        """Note that a sentinel was killed, and its rank lives; yield what to tell the next elder, if that was it."""
        peer.watched = False
        if self._elders[peer.namespace] is not peer:
            return
        here = [one for one in self.by_rank.values() if one.namespace == peer.namespace]
        if elder := next((one for one in here if one.watched), None):
            self._elders[peer.namespace] = elder
            for one in here:
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
