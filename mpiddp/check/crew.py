"""All ranks of a check: rank 0 says what to do, each does it and answers. Who does not answer in time is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from ..compare.figures import Who
from ..join.rollcall import receive, undelivered
from ..waiting import wait_for

if TYPE_CHECKING:
    from mpi4py import MPI

ORDERS, ANSWERS = 3, 4  # tags; the roll call and the channels have others
GRACE_S = 3.0  # for an answer to come, after the time that the work may take
SILENCE_S = 300.0  # of rank 0, before a rank gives up
REST_S = 60.0  # after which ranks that have nothing to do hear of it
REST = "rest"


class Order(NamedTuple):
    """What a rank is to do: the name of a piece of work, its arguments, and the seconds that it may take."""

    number: int
    work: str
    arguments: tuple[Any, ...]
    limit_s: float


class Trouble(NamedTuple):
    """What has gone wrong on a rank, in a line."""

    words: str


Work = Callable[..., Any]  # takes a deadline of time.monotonic(), then the arguments


class Crew:
    """Rank 0's view of the ranks.

    `lost` tells of ranks that have not answered what they were doing, `troubles` of what has gone wrong on ranks.
    `unfit` are the ranks of these troubles, and those whose device does not compute: no other one can meet them.
    """

    def __init__(self, comm: MPI.Comm, works: Mapping[str, Work], name: Callable[[int], str]) -> None:
        """Keep the ranks' communicator, this rank's own part in each piece of work, and what ranks are called."""
        self._comm, self._works, self.name = comm, works, name
        self._number = 0
        self._sent: list[tuple[int, MPI.Request]] = []  # to which ranks; those that were not received when last looked
        self._rested = time.monotonic()
        self.lost: dict[int, str] = {}
        self.troubles: dict[int, list[str]] = {}
        self.unfit: set[int] = set()

    def can_meet(self, ranks: Iterable[int]) -> bool:
        """Tell whether these ranks answer, and nothing is wrong with them."""
        return not any(rank in self.lost or rank in self.unfit for rank in ranks)

    def do(self, work: str, arguments: Mapping[int, tuple[Any, ...]], limit_s: float, words: str) -> dict[int, Any]:
        """Let ranks do a piece of work at the same time, each with its arguments, and return their answers.

        `words` say what it is that a rank is lost by. A rank that is lost already does nothing; one that
        answers None could not do its part.
        """
        self._number += 1
        asked = {rank: mine for rank, mine in arguments.items() if rank not in self.lost}
        for rank, mine in asked.items():
            if rank:
                self._send(Order(self._number, work, mine, limit_s), rank)
        self._let_rest(asked.keys())
        found = {}
        if 0 in asked:
            self._deliver()  # this rank's part may wait for others outside MPI
            found[0] = perform(self._works, Order(self._number, work, asked[0], limit_s))
        self._collect(found, asked.keys(), time.monotonic() + limit_s + GRACE_S)
        for rank in asked.keys() - found.keys():
            self.lost[rank] = f"{words} took more than {limit_s + GRACE_S:.0f} s"
        for rank, one in found.items():
            if isinstance(one, Trouble):
                self.unfit.add(rank)
                words_of = self.troubles.setdefault(rank, [])
                words_of += [one.words] if one.words not in words_of else []
        return {rank: one for rank, one in found.items() if one is not None and not isinstance(one, Trouble)}

    def _let_rest(self, asked: Collection[int]) -> None:
        """Tell the ranks that are not asked, now and then, that rank 0 is there."""
        if time.monotonic() - self._rested > REST_S:
            self._rested = time.monotonic()
            for rank in range(1, self._comm.size):
                if rank not in asked and rank not in self.lost:
                    self._send(Order(0, REST, (), 0.0), rank)

    def dismiss(self) -> None:
        """Let all ranks end."""
        for rank in range(1, self._comm.size):
            self._send(Order(0, "", (), 0.0), rank)
        self._deliver()

    def _deliver(self) -> None:
        """Return when all ranks have received what was sent to them, or have had time to."""
        with contextlib.suppress(TimeoutError):
            wait_for(lambda: not undelivered(self._sent) or None, time.monotonic() + GRACE_S, TimeoutError,
                     lambda _: None, GRACE_S)

    def _collect(self, found: dict[int, Any], asked: AbstractSet[int], deadline: float) -> None:
        """Add the answers that come until all are there, or the deadline is over; meanwhile let the others rest."""
        def everyone() -> bool | None:
            self._let_rest(asked - found.keys())
            while len(found) < len(asked) and (message := receive(self._comm, ANSWERS)) is not None:
                rank, (of, answer) = message
                if of == self._number:  # not an answer that comes too late
                    found[rank] = answer
            return len(found) >= len(asked) or time.monotonic() > deadline or None

        wait_for(everyone, float("inf"), TimeoutError, lambda _: None, float("inf"))

    def _send(self, order: Order, rank: int) -> None:
        undelivered(self._sent)
        self._sent.append((rank, self._comm.issend(order, rank, ORDERS)))


def serve(comm: MPI.Comm, works: Mapping[str, Work]) -> None:
    """Do what rank 0 says, until it dismisses this rank. Raises TimeoutError if it is silent."""
    silent = TimeoutError(f"rank 0 has not said for {SILENCE_S:.0f} s what to measure next")
    sent: list[MPI.Request] = []
    while True:
        _, order = wait_for(lambda: receive(comm, ORDERS, 0), time.monotonic() + SILENCE_S, lambda: silent,
                            lambda _: None, float("inf"))
        if order.work == REST:
            continue
        if not order.work:
            return
        sent = [one for one in sent if not one.Test()]
        sent.append(comm.isend((order.number, perform(works, order)), 0, ANSWERS))


def perform(works: Mapping[str, Work], order: Order) -> Any:
    """Do a piece of work and return what it found, None if another rank was not there for it, or what went wrong."""
    try:
        return works[order.work](time.monotonic() + order.limit_s, *order.arguments)
    except TimeoutError:
        return None
    except (RuntimeError, MemoryError, OSError) as error:  # of a device, MPI, or a machine that is full
        return Trouble(f"{order.work}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")


class Turns:
    """Shares out ranks, of which is known who they are, and on which machine.

    Nodes that share a machine, as containers do, would disturb each other.
    """

    def __init__(self, ranks: Sequence[Who], machines: Mapping[int, str]) -> None:
        self._ranks, self._machines = ranks, machines

    def of(self, ranks: Iterable[int]) -> list[list[int]]:
        """Return the ranks in turns, those of a node together, and of one machine's nodes one after the other."""
        nodes: dict[str, list[int]] = {}  # of each machine
        asked: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            node = self._ranks[rank].node
            if node not in asked:
                nodes.setdefault(self._machines[rank], []).append(node)
            asked.setdefault(node, []).append(rank)
        return [[rank for some in nodes.values() if turn < len(some) for rank in asked[some[turn]]]
                for turn in range(max(map(len, nodes.values()), default=0))]

    def of_pairs(self, pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Return pairs of nodes in turns, of which no two are on the same machine."""
        turns: list[tuple[set[str], list[tuple[int, int]]]] = []
        homes = {who.node: self._machines[rank] for rank, who in enumerate(self._ranks)}
        for pair in pairs:
            both = {homes[node] for node in pair}
            free = next((turn for turn in turns if not turn[0] & both), None)
            if free is None:
                turns.append((both, [pair]))
            else:
                free[0].update(both)
                free[1].append(pair)
        return [some for _, some in turns]
