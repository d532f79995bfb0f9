"""A job that runs in this process: how its ranks agree to stop, and how this one leaves it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..say import say

if TYPE_CHECKING:
    from ..join.membership import Membership
    from .ending import Ending
    from .guard import Guard
    from .stop import Stop


class RunningJob:
    """A job, as this process has its part in it.

    `ending` ends the job where this rank fails; it is None where nobody watches the rank. `guard` notices how a
    program with a main() of its own ends. `stop` has noted signals already.
    """

    def __init__(
        self, membership: Membership, ending: Ending | None = None, stop: Stop | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.membership, self.ending, self.guard = membership, ending, guard
        self.left = False  # in order
        self._stop: Stop | None = None
        if stop is not None:
            self.stop(stop)

    def stop(self, begun: Stop | None = None) -> Stop:
        """Return what says when all ranks stop; `begun` has noted signals already."""
        if self._stop is None:
            from .stop import Stop

            self._stop = begun or Stop()
            self._stop.join(self.membership.comm)
        return self._stop

    def stops(self) -> bool:
        """Tell whether all ranks have agreed to stop."""
        return self._stop is not None and self._stop.reason != 0

    def leave(self, exit_timeout_s: float | None, trace_file: str = "") -> None:
        """Leave the job once every rank wants to; raise TimeoutError with names after `exit_timeout_s`.

        Until then rank 0's store and the process group stay up: a rank that ends early takes nothing from the
        others. The ranks' timeline is written to `trace_file`, empty for nowhere.
        """
        member = self.membership
        member.want_to_leave()
        most_calls = self._await_all(exit_timeout_s)
        if dist.is_initialized():
            dist.destroy_process_group()
        if most_calls:
            self.stop().leave(most_calls)
        if trace_file:
            from ..show import trace

            trace.write(trace_file, member.comm, socket.gethostname())
        member.drop_store()
        member.roll.close()

    def give_up(self) -> None:
        """Leave the job without a word to the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.membership.drop_store()
        self.restore()

    def restore(self) -> None:
        """Give variables their former values, and signals their former effect."""
        self.membership.restore_environment()
        if self._stop is not None:
            self._stop.release()

    def _await_all(self, timeout_s: float | None) -> int:
        """Return the most calls of should_stop() of a rank, when all are here; the exit(0) of a handler waits."""
        calls = self._stop.calls if self._stop else 0
        while True:
            try:
                return self.membership.roll.await_end(calls, timeout_s, self.membership.missing, self._remind)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise

    def _remind(self, waited_s: float) -> None:
        """Say whom the job waits for, once per job: by the rank that has waited longest."""
        member = self.membership
        if member.roll.rank == member.groups.keys.first("reminds", member.roll.rank):
            say(f"mpiddp: waiting {waited_s:.0f} s for the end of {member.missing()}")
