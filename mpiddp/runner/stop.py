"""should_stop(): stop before the job is ended from outside, on all ranks at the same step."""

from __future__ import annotations

import signal
import time

from ..base.communicator import Communicator, Reduction, Request
from ..base.polling import poll_until
from ..base.stderr import write_line
from . import signals

WALLTIME_REASON = 1  # a reason less urgent than any signal's number
EARLY_OFFSET = 1000  # added to a reason that a rank had before its first step
SPIN_S = 0.0005  # for which a rank waits for others before it sleeps
REMIND_AFTER_S = 60.0


class Stop:
    """Decides when to stop, because of a signal or of the time.

    With a communicator the ranks agree: each call of is_due() starts a reduction over all ranks, and reads the result
    of the reduction that the previous call started.

    `steps` counts the calls that returned False. It is 0 if some rank had a reason to stop before its first call, even
    if ranks made steps until they agreed.
    """

    def __init__(self) -> None:
        self.reason = 0  # agreed by all ranks: a signal's number or WALLTIME_REASON, 0 for none yet
        self.steps = 0
        self.calls = 0  # that started a reduction
        self._end = float("inf")
        self._offset = 0  # or EARLY_OFFSET
        self._is_ready = False  # signals are noted, as far as possible
        self._rank = 0
        self._reduction: Reduction | None = None  # None while nobody else has to agree
        self._pending: Request | None = None

    def release(self) -> None:
        """Stop noting signals."""
        signals.release_signals()

    def stop_at(self, end: float) -> None:
        """Stop at `end`, on time.time()'s clock."""
        self._end = end

    def left_s(self) -> float | None:
        """Return the seconds until the time to stop, None if this rank does not know it."""
        return None if self._end == float("inf") else self._end - time.time()

    def join(self, comm: Communicator) -> None:
        """Agree with the ranks of a communicator from now on."""
        self._rank = comm.rank
        self._reduction = comm.make_reduction() if comm.size > 1 else None

    def is_due(self) -> bool:
        """Return whether it is time to stop: the same on all ranks that have called this the same number of times."""
        if not self._is_ready:
            signals.catch_signals()
            self._is_ready = True
            self._offset = EARLY_OFFSET if self._find_reason() else 0
        if not self.reason:
            if self._reduction is None:
                self._decide(self._find_reason())
            else:
                if self._pending is not None:
                    self._await(self._pending)
                    self._pending = None
                    self._decide(self._reduction.result)
                if not self.reason:
                    self.calls += 1
                    self._pending = self._reduction.start(self._find_reason())
            if self.reason:
                self._announce()
            else:
                self.steps += 1
        return self.reason != 0

    def complete(self, most_calls: int) -> None:
        """Complete the last reduction, when every rank has ended; `most_calls` is the largest of their `calls`."""
        if self._reduction is None:
            return
        while self.calls < most_calls and not self.reason:
            self.is_due()
        if self._pending is not None:
            self._await(self._pending)
        self._reduction.free()

    def _announce(self) -> None:
        if self._rank == 0:
            is_walltime = self.reason == WALLTIME_REASON
            why = "the walltime is near" if is_walltime else f"received {signal.Signals(self.reason).name}"
            write_line(f"mpiddp: time to stop: {why}")

    def _find_reason(self) -> int:
        reason = signals.received or (WALLTIME_REASON if time.time() > self._end else 0)
        return reason and reason + self._offset

    def _decide(self, reason: int) -> None:
        self.reason = reason % EARLY_OFFSET
        if reason > EARLY_OFFSET:
            self.steps = 0

    def _await(self, request: Request) -> None:
        """Return when a request is complete; sleep only if that takes longer than SPIN_S."""
        spun_until = time.perf_counter() + SPIN_S
        while not request.Test():
            if time.perf_counter() > spun_until:
                poll_until(lambda: request.Test() or None, remind=self._remind, remind_after_s=REMIND_AFTER_S)
                return

    def _remind(self, waited_s: float) -> None:
        write_line(f"mpiddp: rank {self._rank} has waited {waited_s:.0f} s in should_stop(); every rank must call it "
                   "the same number of times")
