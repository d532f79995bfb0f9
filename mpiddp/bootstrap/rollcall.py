"""The roll call: gather all ranks' facts on rank 0, and scatter its plans. A wait has a deadline and names late ranks.

MPI makes progress only inside MPI calls, and a send may complete while its message still waits at the sender for room:
for one of MPICH's 64 cells for a rank's messages to its node, or in a network's queue. So a rank that has sent
a message stays in MPI until it is received, before it does anything else, such as waiting inside torch.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.communicator import Communicator, Request
from ..base.errors import EndTimeoutError, LaunchError, LocalLaunchError
from ..base.polling import poll_until
from ..base.stderr import write_line
from ..base.text import join_names
from ..base.timeline import WAIT_PREFIX, begin_stage
from ..failure.root_cause import EXIT_TIMEOUT_WORDS

if TYPE_CHECKING:
    import array

    from mpi4py import MPI

Facts = TypeVar("Facts")
Plan = TypeVar("Plan")

REMIND_AFTER_S, REMIND_END_AFTER_S = 10.0, 60.0
MAX_STAGGER_S = 10  # at the deadline rank 0 reports first, rank 1 a second later, and so on up to this many seconds


def await_all(comm: Communicator, timeout_s: float, began_s: float) -> None:
    """Return when all ranks have called init_process_group(); raise LocalLaunchError at the timeout.

    The start began at `began_s`, on time.monotonic()'s clock.
    """
    barrier = comm.start_barrier()
    rank = f"rank {comm.rank} of {comm.size}"
    error = LocalLaunchError(
        "startup-timeout",
        actual=f"{rank} timed out after {timeout_s:g} s in init_process_group(), which not all ranks have called",
        needed="a call of init_process_group() by every rank of the communicator",
        do="look for a rank that failed earlier or skips the call, or allow more time: MPIDDP_STARTUP_TIMEOUT=SECONDS",
    )

    def remind(waited_s: float) -> None:
        if comm.rank == 0:
            write_line(f"mpiddp: {rank} has waited {waited_s:.0f} s in init_process_group() for the other ranks")

    deadline = began_s + timeout_s + min(comm.rank, MAX_STAGGER_S)
    poll_until(lambda: barrier.Test() or None, deadline, lambda: error, remind, REMIND_AFTER_S)


class Rendezvous:
    """The ranks of a communicator during their start, which may take `timeout_s` from `began_s` on.

    The agents use the same start time (time.monotonic()); rank 0 uses the earliest start of the ranks that wait for
    it. `hosts` are the ranks' hostnames on rank 0, once it knows them, and empty elsewhere. `job_ranks` are the
    ranks' numbers in the job, if the communicator has only some of its ranks.
    """

    def __init__(self, comm: Communicator, timeout_s: float, began_s: float) -> None:
        self.ranks = comm.duplicate()  # so that our messages never meet the caller's
        self.rank, self.size = comm.rank, comm.size
        self.timeout_s = timeout_s
        self.hosts: Sequence[str] = ()
        self.job_ranks: Sequence[int] = ()
        self._began_s = began_s
        self._deadline = began_s + timeout_s
        self._reductions: dict[str, tuple[MPI.Request, array.array[int], array.array[int]]] = {}  # by step of the end

    @property
    def comm(self) -> MPI.Comm:
        """MPI's communicator."""
        ranks: Any = self.ranks  # MPI's; a script may have unloaded its class
        comm: MPI.Comm = ranks.comm
        return comm

    @property
    def remaining_s(self) -> float:
        """The seconds left until the deadline, at least one."""
        return max(1.0, self._deadline - time.monotonic())

    def name(self, rank: int) -> str:
        """Return what to call a rank in a message."""
        number = self.job_ranks[rank] if self.job_ranks else rank
        return f"rank {number} on {self.hosts[rank]}" if self.hosts else f"rank {number}"

    def exchange(self, stage: str, facts: Facts, plan: Callable[[Sequence[Facts]], Sequence[Plan]]) -> Plan:
        """Send this rank's facts to rank 0, where `plan` makes a plan for each rank, and return this rank's plan.

        `stage` is what a rank that has not sent its facts is doing. A LaunchError of `plan` is raised on every rank and
        closes the communicator. At the deadline each rank that still waits raises LocalLaunchError.
        """
        begin_stage(f"{WAIT_PREFIX}{stage}")
        if self.rank == 0:
            all_facts = self._gather(stage, facts)
            begin_stage(f"plan: {stage}")
            result = self._plan_and_scatter(all_facts, plan)
        else:
            request = self.ranks.send((facts, time.monotonic() - self._began_s), 0)
            result = self._receive_plan()
            request.wait()  # it is received: rank 0 has answered
        if isinstance(result, LaunchError):
            self.close()
            raise result
        return result

    @contextmanager
    def abort_after(self, stage: str, give_up: Callable[[LocalLaunchError], object]) -> Iterator[None]:
        """Run a block in which this rank waits inside a library; at the deadline call `give_up` in another thread."""
        error = self._timeout_error(f"the other ranks ({stage}); reported by {self.name(self.rank)}")
        timer = threading.Timer(self.remaining_s + min(self.rank, MAX_STAGGER_S), lambda: give_up(error))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # no thread is left when the script runs

    def await_end(
        self, step: str, own: Sequence[int], timeout_s: float | None, name_missing: Callable[[], str],
        remind: Callable[[float], None],
    ) -> Sequence[int]:
        """Return the element-wise maximum of the ranks' `own` when all ranks have called this for a step of the end.

        Raises EndTimeoutError after `timeout_s`, with the names of missing ranks. `remind` gets the seconds waited,
        first after a minute. If a signal's handler raises meanwhile, call this again.
        """
        import array

        from mpi4py import MPI

        if step not in self._reductions:
            mine, largest = array.array("i", own), array.array("i", [0] * len(own))  # MPI writes to these
            self._reductions[step] = self.comm.Iallreduce(mine, largest, MPI.MAX), mine, largest
        reduction, _, largest = self._reductions[step]
        poll_until(
            lambda: reduction.Test() or None,
            math.inf if timeout_s is None else time.monotonic() + timeout_s,
            lambda: EndTimeoutError(f"{EXIT_TIMEOUT_WORDS} {timeout_s:g} s: {name_missing()}"),
            remind, REMIND_END_AFTER_S,
        )
        return largest

    def close(self) -> None:
        """Free the communicator. Collective."""
        self.ranks.free()

    def _gather(self, stage: str, own: Facts) -> list[Facts]:
        facts = {0: own}

        def receive_facts() -> Collection[int]:
            while len(facts) < self.size and (message := self.ranks.receive()) is not None:
                rank, (facts[rank], waited_s) = message
                self._deadline = min(self._deadline, time.monotonic() + self.timeout_s - waited_s)
            return () if len(facts) == self.size else range(self.size) - facts.keys()

        self._await_ranks(stage, receive_facts)
        return [facts[rank] for rank in range(self.size)]

    def _plan_and_scatter(
        self, facts: Sequence[Facts], plan: Callable[[Sequence[Facts]], Sequence[Plan]]
    ) -> Plan | LaunchError:
        """Send each rank its plan; return rank 0's when the others have received theirs."""
        results: Sequence[Plan | LaunchError]
        try:
            results = plan(facts)
        except LaunchError as error:
            results = [error] * self.size
        sent = [(rank, self.ranks.send(results[rank], rank, until_received=True)) for rank in range(1, self.size)]
        self._await_ranks("receiving its plan", lambda: keep_undelivered(sent))
        return results[0]

    def _receive_plan(self) -> Any:
        deadline = self._deadline + min(self.rank, MAX_STAGGER_S)
        _, result = poll_until(lambda: self.ranks.receive(0), deadline,
                               lambda: self._timeout_error("the plan from rank 0"))
        return result

    def _await_ranks(self, stage: str, find_missing: Callable[[], Collection[int]]) -> None:
        """Call `find_missing` until it returns no ranks; meanwhile name those that it returns, which are at `stage`."""
        missing: Collection[int] = ()

        def poll() -> bool | None:
            nonlocal missing
            missing = find_missing()
            return not missing or None

        def describe() -> str:
            names = [f"{self.name(rank)} ({stage})" for rank in sorted(missing)]
            return f"{len(names)} of {self.size} ranks: {join_names(names)}"

        poll_until(poll, lambda: self._deadline, lambda: self._timeout_error(describe()),
                   lambda waited_s: write_line(f"mpiddp: still waiting after {waited_s:.0f} s for {describe()}"),
                   REMIND_AFTER_S)

    def _timeout_error(self, awaited: str) -> LocalLaunchError:
        return LocalLaunchError(
            "startup-timeout",
            actual=f"timed out after {self.timeout_s:g} s waiting for {awaited}",
            needed="all ranks ready before the startup timeout",
            do="check those hosts (slow file system, broken node), or allow more time: --startup-timeout SECONDS",
        )


def keep_undelivered(sent: list[tuple[int, Request]]) -> Collection[int]:
    """Remove the synchronous sends that are received from `sent`, and return the ranks of the others."""
    sent[:] = [(rank, request) for rank, request in sent if not request.Test()]
    return [rank for rank, _ in sent]
