"""Steps that all ranks of a check take together: a deadline ends each, and rank 0 names the ranks that miss it.

Every rank knows the same schedule, so nobody sends orders. After its own part a rank sends the result to rank 0, and
waits for rank 0's answer. The messages are point-to-point: a collective would not end without a rank that hangs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.communicator import Request
from ..base.polling import poll_until
from ..bootstrap.mpi_communicator import receive_message
from ..bootstrap.rollcall import keep_undelivered

if TYPE_CHECKING:
    from mpi4py import MPI

STEP_TAG = 3  # the roll call and the transports use others
REPLY_GRACE_S = 3.0  # for a result to arrive after a step's time limit, and for rank 0's answer to be received
ANSWER_TIMEOUT_S = 300.0  # a rank gives up after this time without rank 0's answer

Work = Callable[..., Any]  # takes a deadline on time.monotonic()'s clock, then the arguments


class StepResult(NamedTuple):
    """A step's results: on rank 0 `results` has those of all ranks, elsewhere it is empty.

    Every rank knows who is `done`: the ranks that had a part in the step and have a result. `of_rank0` is rank 0's
    result, None if it has none.
    """

    results: Mapping[int, Any]
    done: frozenset[int]
    of_rank0: Any = None


class Reply(NamedTuple):
    """What a rank sends to rank 0 after its part in a step; `error` is a line, empty for none."""

    step: int
    result: Any
    error: str
    can_meet: bool


class Answer(NamedTuple):
    """What rank 0 sends to the others after a step: ranks with a part in it and no result, and those of Ranks.out."""

    failed: frozenset[int]
    out: frozenset[int]
    of_rank0: Any


class Ranks:
    """The ranks of a check.

    `out` are the ranks that no other rank can meet: those that are lost, had an error, or have set `can_meet` to False
    because their device does not compute. On rank 0 `lost` has a line for each rank that did not reply, and `errors`
    the lines of each rank that had errors.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._number = comm, 0
        self._sent: list[tuple[int, Request]] = []  # rank 0's answers, by rank, until they are received
        self.rank, self.size = comm.rank, comm.size
        self.can_meet = True
        self.out: frozenset[int] = frozenset()
        self.lost: dict[int, str] = {}
        self.errors: dict[int, list[str]] = {}

    def can_all_meet(self, ranks: Iterable[int]) -> bool:
        """Return whether none of the ranks is out."""
        return self.out.isdisjoint(ranks)

    def step(self, work: Work, arguments: Mapping[int, tuple[Any, ...]], limit_s: float, doing: str) -> StepResult:
        """Do this rank's part of a step, if it has arguments, and return what came of it. Collective.

        A rank has no result if its work raises TimeoutError, because another rank did not join in time, or another
        error. `doing` describes the work in messages. Raises TimeoutError without an answer from rank 0.
        """
        self._number += 1
        deadline = time.monotonic() + limit_s
        reply = self._work(work, arguments.get(self.rank), deadline, doing)
        if self.rank:
            return self._report(reply, arguments.keys())
        # Rank 0's own part may have taken longer: the others' replies may lie there
        replies = {0: reply} | self._collect(max(deadline, time.monotonic()) + REPLY_GRACE_S)
        for rank in range(self.size):
            if rank not in replies and rank not in self.lost:
                self.lost[rank] = f"did not reply within {limit_s + REPLY_GRACE_S:.0f} s ({doing})"
        for rank, (_, _, error, _) in replies.items():
            if error and error not in (known := self.errors.setdefault(rank, [])):
                known.append(error)
        results = {rank: other.result for rank, other in sorted(replies.items()) if other.result is not None}
        self.out = frozenset(self.lost) | {rank for rank, other in replies.items() if not other.can_meet}
        self._send(Answer(frozenset(arguments.keys() - results.keys()), self.out, reply.result))
        return StepResult(results, frozenset(results), reply.result)

    def _work(self, work: Work, arguments: tuple[Any, ...] | None, deadline: float, doing: str) -> Reply:
        result, error_text = None, ""
        if arguments is not None:
            try:
                result = work(deadline, *arguments)
            except TimeoutError:
                pass
            except (RuntimeError, MemoryError, OSError) as error:  # of a device, MPI, a full memory or disk
                error_text = f"{doing}: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
                self.can_meet = False
        return Reply(self._number, result, error_text, self.can_meet)

    def _report(self, reply: Reply, with_part: Iterable[int]) -> StepResult:
        sent = self._comm.isend(reply, 0, STEP_TAG)
        _, answer = poll_until(
            lambda: receive_message(self._comm, STEP_TAG, 0), time.monotonic() + ANSWER_TIMEOUT_S,
            lambda: TimeoutError(f"no answer from rank 0 for {ANSWER_TIMEOUT_S:.0f} s"))
        sent.wait()  # it is received: rank 0 has answered
        self.out = answer.out
        return StepResult({}, frozenset(with_part) - answer.failed, answer.of_rank0)

    def _collect(self, deadline: float) -> dict[int, Reply]:
        """Receive the replies of the ranks that are not lost, until all have come or the deadline has passed."""
        replies: dict[int, Reply] = {}

        def poll() -> bool | None:
            while len(replies) < expected and (message := receive_message(self._comm, STEP_TAG)) is not None:
                rank, reply = message
                if reply.step == self._number and rank not in self.lost:  # not a late reply
                    replies[rank] = reply
            return len(replies) >= expected or None

        expected = self.size - 1 - len(self.lost)
        with contextlib.suppress(TimeoutError):
            poll_until(poll, deadline)
        return replies

    def _send(self, answer: Answer) -> None:
        """Send the answer, and wait for it to be received: rank 0's next part may wait for others without MPI."""
        self._sent += [(rank, self._comm.issend(answer, rank, STEP_TAG)) for rank in range(1, self.size)
                       if rank not in self.lost]
        with contextlib.suppress(TimeoutError):
            poll_until(lambda: self.lost.keys() >= {*keep_undelivered(self._sent)} or None,
                       time.monotonic() + REPLY_GRACE_S)
