"""Bring all ranks' facts to rank 0, and its plan back. Each wait has a deadline and says whom it waits for.

MPI makes progress only inside MPI calls, and a send may complete while its message still waits at the sender for room:
for one of MPICH's 64 cells for a rank's messages to its node, or in a network's queue. So whoever has sent calls MPI
until all of it is received, before it does anything else, such as to wait for the same ranks inside torch.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.errors import EndTimeoutError, LaunchError, LonelyLaunchError
from ..base.polling import wait_for
from ..base.stderr import say
from ..base.text import listed
from ..base.timeline import WAIT, begin
from ..discovery.runtime import hostname, read_pid_namespace

if TYPE_CHECKING:
    import array

    from mpi4py import MPI

Facts = TypeVar("Facts")
Plan = TypeVar("Plan")

TAG = 1
REMIND_AFTER_S, REMIND_OF_END_AFTER_S = 10.0, 60.0
TURNS = 10  # at the deadline rank 0 speaks first, rank 1 a second later, and so on; those from rank 10 on together


def await_all(comm: MPI.Comm, timeout_s: float, began_s: float) -> None:
    """Return when all ranks have come to init_process_group(); raise LonelyLaunchError if one does not come in time.

    The start began at `began_s`, on time.monotonic()'s clock.
    """
    barrier = comm.Ibarrier()
    rank = f"rank {comm.rank} of {comm.size}"
    late = LonelyLaunchError(
        "startup-timeout",
        found=f"not all ranks had called init_process_group() {timeout_s:g} s after {rank}",
        needed="the same call by every rank of the communicator",
        do="look for a rank that failed before, or that takes another way; more time: MPIDDP_STARTUP_TIMEOUT",
    )

    def remind(waited_s: float) -> None:
        if comm.rank == 0:
            say(f"mpiddp: {rank} has waited {waited_s:.0f} s in init_process_group() for others")

    deadline = began_s + timeout_s + min(comm.rank, TURNS)
    wait_for(lambda: barrier.Test() or None, deadline, lambda: late, remind, REMIND_AFTER_S)


class RollCall:
    """The ranks of a communicator during their start, which may take `timeout_s` seconds from `began_s` on.

    That is when their sentinels begin to count, on time.monotonic()'s clock; rank 0 goes by the rank that began first
    of those that wait for it. `hosts` are the ranks' hostnames: on rank 0, as soon as it knows them; empty elsewhere.
    `numbers` are what the ranks are called, if the communicator has some of a job's alone.
    """

    def __init__(self, comm: MPI.Comm, timeout_s: float, began_s: float) -> None:
        self.comm = comm.Dup()  # so that our messages never meet the caller's
        self.rank, self.size = comm.rank, comm.size
        self.timeout_s = timeout_s
        self.hosts: Sequence[str] = ()
        self.numbers: Sequence[int] = ()
        self._began_s = began_s
        self._deadline = began_s + timeout_s
        self._end: tuple[MPI.Request, array.array[int], array.array[int]] | None = None

    @property
    def remaining_s(self) -> float:
        """The seconds left until the deadline, at least one."""
        return max(1.0, self._deadline - time.monotonic())

    def name(self, rank: int) -> str:
        """Return what to call a rank in a message."""
        number = self.numbers[rank] if self.numbers else rank
        return f"rank {number} on {self.hosts[rank]}" if self.hosts else f"rank {number}"

    def agree(self, stage: str, facts: Facts, plan: Callable[[Sequence[Facts]], Sequence[Plan]]) -> Plan:
        """Send this rank's facts to rank 0, where `plan` makes a plan for each rank, and return this rank's.

        `stage` says what a rank is doing that has not sent its facts. A LaunchError of `plan` is raised
        on every rank and ends the roll call. At the deadline each rank that still waits raises LonelyLaunchError.
        """
        begin(f"{WAIT}{stage}")
        if self.rank == 0:
            found = self._collect(stage, facts)
            begin(f"plan: {stage}")
            answer = self._decide(found, plan)
        else:
            sent = self.comm.isend((facts, time.monotonic() - self._began_s), 0, TAG)
            answer = self._await_answer()
            sent.wait()  # it is received: rank 0 has answered
        if isinstance(answer, LaunchError):
            self.close()
            raise answer
        return answer

    @contextmanager
    def watch(self, stage: str, give_up: Callable[[LonelyLaunchError], object]) -> Iterator[None]:
        """Run a block in which this rank waits inside a library; call `give_up` at the deadline.

        `give_up` gets the error and runs in a thread of its own, while the library still waits.
        """
        late = f"{self.name(self.rank)} waits for the others ({stage})"
        seconds = self.remaining_s + min(self.rank, TURNS)
        timer = threading.Timer(seconds, lambda: give_up(self._late(late)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # no thread of ours is left when the script runs

    def await_end(
        self, own: Sequence[int], timeout_s: float | None, name_missing: Callable[[], str],
        remind: Callable[[float], None],
    ) -> Sequence[int]:
        """Return the largest of each of the ranks' `own` when all have called this.

        Raises EndTimeoutError after `timeout_s`, with the names of those that are missing. `remind` gets the
        seconds waited, first after a minute. If a signal's handler raises meanwhile, call this again.
        """
        import array

        from mpi4py import MPI

        if self._end is None:
            mine, largest = array.array("i", own), array.array("i", [0] * len(own))  # MPI writes to these
            self._end = self.comm.Iallreduce(mine, largest, MPI.MAX), mine, largest
        reduction, _, largest = self._end
        wait_for(
            lambda: reduction.Test() or None,
            math.inf if timeout_s is None else time.monotonic() + timeout_s,
            lambda: EndTimeoutError(f"waited {timeout_s:g} s for the end of {name_missing()}"),
            remind, REMIND_OF_END_AFTER_S,
        )
        return largest

    def processes_here(self) -> list[int]:
        """Return the processes of the ranks that this one can see, when all have called this; none takes long to."""
        here = hostname(), read_pid_namespace()
        return [pid for where, pid in self.comm.allgather((here, os.getpid())) if where == here]

    def those(self, is_one: bool) -> list[int]:
        """Return on rank 0 the ranks that call this with True; none elsewhere. Collective, and no rank waits asleep."""
        return [rank for rank, one in enumerate(self.comm.gather(is_one) or ()) if one]

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.comm.Free()

    def _await_answer(self) -> Any:
        late = self._deadline + min(self.rank, TURNS)
        return wait_for(lambda: receive(self.comm, TAG, 0), late, lambda: self._late("rank 0 has not answered"),
                        lambda _: None, math.inf)[1]

    def _decide(
        self, facts: Sequence[Facts], plan: Callable[[Sequence[Facts]], Sequence[Plan]]
    ) -> Plan | LaunchError:
        """Send each rank its plan; return rank 0's when the others have received theirs."""
        answers: Sequence[Plan | LaunchError]
        try:
            answers = plan(facts)
        except LaunchError as error:
            answers = [error] * self.size
        sent = [(rank, self.comm.issend(answers[rank], rank, TAG)) for rank in range(1, self.size)]
        self._await_ranks("receiving its plan", lambda: undelivered(sent))
        return answers[0]

    def _collect(self, stage: str, own: Facts) -> list[Facts]:
        found = {0: own}

        def missing() -> Collection[int]:
            while len(found) < self.size and (message := receive(self.comm, TAG)) is not None:
                rank, (found[rank], waited_s) = message
                self._deadline = min(self._deadline, time.monotonic() + self.timeout_s - waited_s)
            return () if len(found) == self.size else range(self.size) - found.keys()

        self._await_ranks(stage, missing)
        return [found[rank] for rank in range(self.size)]

    def _await_ranks(self, stage: str, missing: Callable[[], Collection[int]]) -> None:
        """Call `missing` until it returns no ranks; meanwhile name those that it returns, which are at `stage`."""
        ranks: Collection[int] = ()

        def look() -> bool | None:
            nonlocal ranks
            ranks = missing()
            return not ranks or None

        def names() -> str:
            some = [f"{self.name(rank)} ({stage})" for rank in sorted(ranks)]
            return f"{len(some)} of {self.size} ranks: {listed(some)}"

        wait_for(look, lambda: self._deadline, lambda: self._late(f"waited for {names()}"),
                 lambda waited_s: say(f"mpiddp: waiting {waited_s:.0f} s for {names()}"), REMIND_AFTER_S)

    def _late(self, found: str) -> LonelyLaunchError:
        return LonelyLaunchError(
            "startup-timeout",
            found=f"{found} after {self.timeout_s:g} s",
            needed="every rank at the start in time",
            do="look at those hosts (a slow file system, a broken node); more time: --startup-timeout SECONDS",
        )


def undelivered(sent: list[tuple[int, MPI.Request]]) -> Collection[int]:
    """Keep those synchronous sends to ranks whose message is not received yet, and return these ranks."""
    sent[:] = [(rank, request) for rank, request in sent if not request.Test()]
    return [rank for rank, _ in sent]


def receive(comm: MPI.Comm, tag: int, source: int | None = None) -> tuple[int, Any] | None:
    """Return the sender and content of a message that has come from a rank, or from any; None if none has."""
    from mpi4py import MPI

    status = MPI.Status()
    message = comm.improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
    return None if message is None else (status.source, message.recv())
