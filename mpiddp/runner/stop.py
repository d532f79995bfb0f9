"""Decide to stop before the job is ended from outside, on all ranks at the same step."""

from __future__ import annotations

import array
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..base.polling import poll_until
from ..base.stderr import write_line
from . import signals

if TYPE_CHECKING:
    from mpi4py import MPI

WALLTIME = 1  # a reason like the numbers of signals, and less urgent than any
EARLY = 1000  # added to a reason that was there before a rank's first step
SPINNING_S = 0.0005  # before a rank that waits for others sleeps
REMIND_AFTER_S = 60.0


class Stop:
    """Says when to stop, because of a signal or because of the time.

    With a communicator the ranks agree: each call of `due` starts a reduction over all of them, and reads
    the reduction that the call before it has started. That one had a whole step's time.

    `steps` are those that were made: the calls that said to go on. They are 0 if some rank had a reason to stop before
    its first one, whatever was done until the ranks agreed.
    """

    def __init__(self) -> None:
        self.reason = 0  # on which all agree: a signal's number or WALLTIME, 0 for none yet
        self.steps = 0
        self._end = float("inf")
        self._early = 0  # or EARLY
        self._ready = False  # signals are noted, as far as they can be
        self._parent: MPI.Comm | None = None
        self._comm: MPI.Comm | None = None
        self._pending: MPI.Request | None = None
        self._start: Callable[[], MPI.Request] | None = None  # which starts a reduction
        self.calls = 0  # in which the ranks took part
        self._sent, self._result = array.array("i", [0]), array.array("i", [0])

    def release(self) -> None:
        """Note no signals any more."""
        signals.release()

    def stop_at(self, end: float) -> None:
        """Find it time to stop at `end`, on time.time()'s clock."""
        self._end = end

    def left_s(self) -> float | None:
        """Return the seconds until it is time to stop, None if this rank does not know when that is."""
        return None if self._end == float("inf") else self._end - time.time()

    def join(self, comm: MPI.Comm) -> None:
        """Agree with the ranks of a communicator from now on."""
        self._parent = comm if comm.size > 1 else None

    def due(self) -> bool:
        """Tell whether it is time to stop: the same on all ranks that have called this equally often."""
        if not self._ready:
            signals.catch()
            self._ready = True
            self._early = EARLY if self._wanted() else 0
        if not self.reason:
            if self._parent is None:
                self._decide(self._wanted())
            else:
                self._read()
                if not self.reason:
                    self._post()
            if self.reason:
                self._announce()
            else:
                self.steps += 1
        return self.reason != 0

    def complete(self, most: int) -> None:
        """Complete the last reduction, when every rank has come to its end; `most` is the largest of their `calls`."""
        if self._parent is None:
            return
        while self.calls < most and not self.reason:
            self.due()
        if self._pending is not None:
            self._await(self._pending)
        if self._comm is not None:
            self._comm.Free()

    def _announce(self) -> None:
        if self._parent is None or self._parent.rank == 0:
            why = "the walltime is near" if self.reason == WALLTIME else f"{signal.Signals(self.reason).name} was sent"
            write_line(f"mpiddp: time to stop: {why}")

    def _wanted(self) -> int:
        reason = signals.noted or (WALLTIME if time.time() > self._end else 0)
        return reason and reason + self._early

    def _decide(self, wanted: int) -> None:
        self.reason = wanted % EARLY
        if wanted > EARLY:
            self.steps = 0

    def _read(self) -> None:
        if self._pending is not None:
            self._await(self._pending)
            self._pending = None
            self._decide(self._result[0])

    def _post(self) -> None:
        assert self._parent is not None
        self.calls += 1
        if self._comm is None:
            self._comm, self._pending = self._parent.Idup()
            return
        self._start = self._start or reduction(self._comm, self._sent, self._result)
        self._sent[0], self._result[0] = self._wanted(), 0
        self._pending = self._start()

    def _await(self, request: MPI.Request) -> None:
        """Return when a request is complete; sleep only if that takes longer than SPINNING_S."""
        spun_until = time.perf_counter() + SPINNING_S
        while not request.Test():
            if time.perf_counter() > spun_until:
                poll_until(lambda: request.Test() or None, float("inf"), TimeoutError, self._remind, REMIND_AFTER_S)
                return

    def _remind(self, waited_s: float) -> None:
        rank = self._parent.rank if self._parent else 0
        write_line(f"mpiddp: rank {rank} has waited {waited_s:.0f} s in should_stop(), which every rank has to call "
                   "equally often")


def reduction(comm: MPI.Comm, sent: array.array[int], result: array.array[int]) -> Callable[[], MPI.Request]:
    """Return a function that starts a reduction for the largest of the ranks' `sent`. Collective.

    The reduction is a persistent one, which is cheaper to start, if the library has those (MPI 4.0).
    """
    from mpi4py import MPI

    ours, all_ranks = [sent, 1, MPI.INT], [result, 1, MPI.INT]  # so that mpi4py need not look it up at each call
    try:
        request = comm.Allreduce_init(ours, all_ranks, MPI.MAX)
    except NotImplementedError:
        return lambda: comm.Iallreduce(ours, all_ranks, MPI.MAX)

    def start() -> MPI.Request:
        request.Start()
        return request

    return start
