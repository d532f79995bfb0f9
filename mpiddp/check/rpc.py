"""Remote calls over MPI: rank 0 orders work, each rank does it and answers. Who does not answer in time is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.polling import poll_until
from ..bootstrap.rollcall import keep_undelivered, receive_message

if TYPE_CHECKING:
    from mpi4py import MPI

ORDERS, ANSWERS = 3, 4  # tags; the roll call and the channels have others
GRACE_S = 3.0  # for an answer to come, after the time that the work may take
SILENCE_S = 300.0  # of rank 0, before a rank gives up
KEEPALIVE_S = 60.0  # after which ranks that have nothing to do hear of it
KEEPALIVE = "keepalive"


class Order(NamedTuple):
    """What a rank is to do: the name of a piece of work, its arguments, and the seconds that it may take."""

    number: int
    work: str
    arguments: tuple[Any, ...]
    limit_s: float


class RemoteError(NamedTuple):
    """What has gone wrong on a rank, in a line."""

    words: str


Work = Callable[..., Any]  # takes a deadline of time.monotonic(), then the arguments


class RpcController:
    """Rank 0's view of the ranks.

    `lost` has the ranks that have not answered, with what they were doing, `troubles` what has gone wrong on ranks.
    `excluded` are the ranks of these troubles, and those whose device does not compute: no other one can meet them.
    """

    def __init__(self, comm: MPI.Comm, works: Mapping[str, Work], name: Callable[[int], str]) -> None:
        """Keep the ranks' communicator, this rank's own part in each piece of work, and what ranks are called."""
        self._comm, self._works, self.name = comm, works, name
        self._number = 0
        self._sent: list[tuple[int, MPI.Request]] = []  # to which ranks; those that were not received when last looked
        self._kept_alive = time.monotonic()
        self.lost: dict[int, str] = {}
        self.troubles: dict[int, list[str]] = {}
        self.excluded: set[int] = set()

    def can_meet(self, ranks: Iterable[int]) -> bool:
        """Tell whether these ranks answer, and nothing is wrong with them."""
        return not any(rank in self.lost or rank in self.excluded for rank in ranks)

    def call(self, work: str, arguments: Mapping[int, tuple[Any, ...]], limit_s: float, words: str) -> dict[int, Any]:
        """Let ranks do work at the same time, each with its arguments, and return their answers.

        `words` say what it is that a rank is lost by. A rank that is lost already does nothing; one that
        answers None could not do its part.
        """
        self._number += 1
        asked = {rank: mine for rank, mine in arguments.items() if rank not in self.lost}
        for rank, mine in asked.items():
            if rank:
                self._send(Order(self._number, work, mine, limit_s), rank)
        self._keep_alive(asked.keys())
        found = {}
        if 0 in asked:
            self._deliver()  # this rank's part may wait for others outside MPI
            found[0] = perform(self._works, Order(self._number, work, asked[0], limit_s))
        self._collect(found, asked.keys(), time.monotonic() + limit_s + GRACE_S)
        for rank in asked.keys() - found.keys():
            self.lost[rank] = f"{words} took more than {limit_s + GRACE_S:.0f} s"
        for rank, one in found.items():
            if isinstance(one, RemoteError):
                self.excluded.add(rank)
                words_of = self.troubles.setdefault(rank, [])
                words_of += [one.words] if one.words not in words_of else []
        return {rank: one for rank, one in found.items() if one is not None and not isinstance(one, RemoteError)}

    def _keep_alive(self, asked: Collection[int]) -> None:
        """Tell the ranks that are not asked, now and then, that rank 0 is there."""
        if time.monotonic() - self._kept_alive > KEEPALIVE_S:
            self._kept_alive = time.monotonic()
            for rank in range(1, self._comm.size):
                if rank not in asked and rank not in self.lost:
                    self._send(Order(0, KEEPALIVE, (), 0.0), rank)

    def dismiss(self) -> None:
        """Let all ranks end."""
        for rank in range(1, self._comm.size):
            self._send(Order(0, "", (), 0.0), rank)
        self._deliver()

    def _deliver(self) -> None:
        """Return when all ranks have received what was sent to them, or have had time to, as who is lost has."""
        with contextlib.suppress(TimeoutError):
            poll_until(lambda: self.lost.keys() >= {*keep_undelivered(self._sent)} or None, time.monotonic() + GRACE_S,
                       TimeoutError, lambda _: None, GRACE_S)

    def _collect(self, found: dict[int, Any], asked: AbstractSet[int], deadline: float) -> None:
        """Add the answers that come until all are there, or the deadline is over; meanwhile keep the others waiting."""
        def everyone() -> bool | None:
            self._keep_alive(asked - found.keys())
            while len(found) < len(asked) and (message := receive_message(self._comm, ANSWERS)) is not None:
                rank, (of, answer) = message
                if of == self._number:  # not an answer that comes too late
                    found[rank] = answer
            return len(found) >= len(asked) or time.monotonic() > deadline or None

        poll_until(everyone, float("inf"), TimeoutError, lambda _: None, float("inf"))

    def _send(self, order: Order, rank: int) -> None:
        keep_undelivered(self._sent)
        self._sent.append((rank, self._comm.issend(order, rank, ORDERS)))


def worker_loop(comm: MPI.Comm, works: Mapping[str, Work], patience_s: float) -> None:
    """Do what rank 0 says, until it dismisses this rank. Raises TimeoutError if it is silent, also for `patience_s`."""
    silence_s = max(SILENCE_S, patience_s)
    silent = TimeoutError(f"rank 0 has not said for {silence_s:.0f} s what to measure next")
    sent: list[MPI.Request] = []
    while True:
        _, order = poll_until(lambda: receive_message(comm, ORDERS, 0), time.monotonic() + silence_s, lambda: silent,
                              lambda _: None, float("inf"))
        if order.work == KEEPALIVE:
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
        return RemoteError(f"{order.work}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")
