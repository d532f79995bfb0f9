"""Remote calls over MPI: rank 0 calls methods on the ranks; a rank that does not reply in time is lost."""

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

CALL_TAG, REPLY_TAG = 3, 4  # the roll call and the channels use others
REPLY_GRACE_S = 3.0  # for a reply to arrive after the time limit of the method
CONTROLLER_TIMEOUT_S = 300.0  # a rank gives up after this time without a call or keep-alive from rank 0
KEEPALIVE_S = 60.0  # interval of keep-alives to ranks without a call
KEEPALIVE, STOP = "keepalive", ""  # calls that are no methods

Method = Callable[..., Any]  # takes a deadline on time.monotonic()'s clock, then the arguments


class Call(NamedTuple):
    """A call; the reply repeats its number."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    limit_s: float


class RemoteError(NamedTuple):
    """The error of a rank, as a line."""

    text: str


class RpcController:
    """Rank 0's side of the calls.

    `lost`: by rank that did not reply, a line that says so. `errors`: the errors of each rank. `excluded`: ranks that
    no other rank can meet: those with errors, and those whose device does not compute.
    """

    def __init__(self, comm: MPI.Comm, methods: Mapping[str, Method], name: Callable[[int], str]) -> None:
        """Call ranks of `comm`, this rank by its own `methods`; `name` returns a rank's name for messages."""
        self._comm, self._methods, self.name = comm, methods, name
        self._number = 0
        self._sent: list[tuple[int, MPI.Request]] = []  # by rank; not yet received
        self._kept_alive_s = time.monotonic()
        self.lost: dict[int, str] = {}
        self.errors: dict[int, list[str]] = {}
        self.excluded: set[int] = set()

    def can_meet(self, ranks: Iterable[int]) -> bool:
        """Return whether none of the ranks is lost or excluded."""
        return not any(rank in self.lost or rank in self.excluded for rank in ranks)

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]], limit_s: float, doing: str) -> dict[int, Any]:
        """Call a method on several ranks at the same time, with arguments for each, and return the ranks' results.

        Lost ranks are not called. They have no result, nor have ranks whose method timed out or failed. `doing`
        describes the method in messages about ranks that do not reply.
        """
        self._number += 1
        called = {rank: of_rank for rank, of_rank in arguments.items() if rank not in self.lost}
        for rank, of_rank in called.items():
            if rank:
                self._send(Call(self._number, method, of_rank, limit_s), rank)
        self._keep_alive(called.keys())
        replies = {}
        if 0 in called:
            self._deliver()  # rank 0's method may wait for other ranks without calling MPI
            replies[0] = execute(self._methods, Call(self._number, method, called[0], limit_s))
        self._collect(replies, called.keys(), time.monotonic() + limit_s + REPLY_GRACE_S)
        for rank in called.keys() - replies.keys():
            self.lost[rank] = f"did not reply within {limit_s + REPLY_GRACE_S:.0f} s ({doing})"
        for rank, reply in replies.items():
            if isinstance(reply, RemoteError):
                self.excluded.add(rank)
                known = self.errors.setdefault(rank, [])
                known += [reply.text] if reply.text not in known else []
        return {rank: reply for rank, reply in replies.items()
                if reply is not None and not isinstance(reply, RemoteError)}

    def dismiss(self) -> None:
        """Make all ranks return from worker_loop()."""
        for rank in range(1, self._comm.size):
            self._send(Call(0, STOP, (), 0.0), rank)
        self._deliver()

    def _keep_alive(self, called: Collection[int]) -> None:
        if time.monotonic() - self._kept_alive_s > KEEPALIVE_S:
            self._kept_alive_s = time.monotonic()
            for rank in range(1, self._comm.size):
                if rank not in called and rank not in self.lost:
                    self._send(Call(0, KEEPALIVE, (), 0.0), rank)

    def _deliver(self) -> None:
        """Wait up to REPLY_GRACE_S until all ranks that are not lost have received their calls."""
        with contextlib.suppress(TimeoutError):
            deadline = time.monotonic() + REPLY_GRACE_S
            poll_until(lambda: self.lost.keys() >= {*keep_undelivered(self._sent)} or None, deadline)

    def _collect(self, replies: dict[int, Any], called: AbstractSet[int], deadline: float) -> None:
        """Receive replies until all have arrived or the deadline has passed; send keep-alives to the other ranks."""
        def poll() -> bool | None:
            self._keep_alive(called - replies.keys())
            while len(replies) < len(called) and (message := receive_message(self._comm, REPLY_TAG)) is not None:
                rank, (number, reply) = message
                if number == self._number:  # not a late reply to an earlier call
                    replies[rank] = reply
            return len(replies) >= len(called) or time.monotonic() > deadline or None

        poll_until(poll)

    def _send(self, call: Call, rank: int) -> None:
        keep_undelivered(self._sent)
        self._sent.append((rank, self._comm.issend(call, rank, CALL_TAG)))


def worker_loop(comm: MPI.Comm, methods: Mapping[str, Method], startup_timeout_s: float) -> None:
    """Execute rank 0's calls until it dismisses this rank.

    Raises TimeoutError if rank 0 is silent for CONTROLLER_TIMEOUT_S, or for `startup_timeout_s` if that is longer.
    """
    silence_s = max(CONTROLLER_TIMEOUT_S, startup_timeout_s)
    error = TimeoutError(f"no request from rank 0 for {silence_s:.0f} s")
    sent: list[MPI.Request] = []
    while True:
        _, call = poll_until(lambda: receive_message(comm, CALL_TAG, 0), time.monotonic() + silence_s, lambda: error)
        if call.method == STOP:
            return
        if call.method != KEEPALIVE:
            sent = [request for request in sent if not request.Test()]
            sent.append(comm.isend((call.number, execute(methods, call)), 0, REPLY_TAG))


def execute(methods: Mapping[str, Method], call: Call) -> Any:
    """Return a method's result, None if another rank did not join in time, or a RemoteError."""
    try:
        return methods[call.method](time.monotonic() + call.limit_s, *call.arguments)
    except TimeoutError:
        return None
    except (RuntimeError, MemoryError, OSError) as error:  # of a device, MPI, or a machine out of memory or disk space
        return RemoteError(f"{call.method}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}")
