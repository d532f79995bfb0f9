"""A rank's part in a running job: what it holds, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..environment import Environment
from ..errors import LonelyLaunchError
from ..plan.environment import Endpoint, explain
from ..plan.map import Seat
from ..plan.report import Member
from ..plan.words import listed
from . import trace, variables
from .process_group import GroupMaker
from .rollcall import RollCall, tell

if TYPE_CHECKING:
    from mpi4py import MPI

    from .stop import Stop

ANSWER_S = 2.0  # for rank 0's store


class Membership:
    """Holds the ranks' communicator, the store (on rank 0 its server too) and the process group."""

    def __init__(
        self, environment: Environment, roll: RollCall, groups: GroupMaker, server: dist.Store | None,
        replaced: Mapping[str, str | None], endpoint: Endpoint, log: str, seats: Sequence[Seat],
    ) -> None:
        self.environment = environment
        self.groups = groups
        self._roll = roll
        self._server = server
        self._replaced = replaced
        self.endpoint = endpoint
        self._log = log
        self.seats = seats  # of all ranks, on rank 0
        self._stop: Stop | None = None

    def describe(self, grace_s: float, exits: bool, error_file: str) -> Member:
        """Return what is told of this rank where it fails; for the options see `Member`."""
        env = self.environment
        return Member(env.rank, env.world_size, env.local_rank, socket.gethostname(), str(env.device), os.getpid(),
                      self.endpoint.run_id, grace_s, exits, self._log, error_file)

    def create_group(self, timeout: timedelta | None, give_up: Callable[[LonelyLaunchError], object]) -> None:
        """Create the job's process group; `give_up` is called where it is not there at the deadline of the start.

        It is there when all ranks have it: one that ended before would take its end of gloo's
        connections from another that is still making its own.
        """
        with self._roll.watch("process group", give_up):
            self.groups.create(timeout)
            self._roll.await_all()

    def leave(self, exit_timeout_s: float | None, trace_file: str = "") -> None:
        """Leave the job once every rank wants to; raise TimeoutError with names after `exit_timeout_s`.

        Until then rank 0's store and the process group stay up: a rank that ends early takes nothing from the
        others. The ranks' timeline is written to `trace_file`, empty for nowhere.
        """
        self.groups.keys.job.set(left_key(self._roll.rank), "")
        most = self._await_all(exit_timeout_s)
        if dist.is_initialized():
            dist.destroy_process_group()
        if most:
            self.stop().leave(most)
        if trace_file:
            trace.write(trace_file, self._roll.comm, socket.gethostname())
        self._drop_store()
        self._roll.close()

    def give_up(self) -> None:
        """Leave the job without a word to the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._drop_store()
        self.restore_environment()

    def restore_environment(self) -> None:
        """Give the variables that the job set their former values, and signals their former effect."""
        variables.restore(self._replaced)
        if self._stop is not None:
            self._stop.release()

    def stop(self, begun: Stop | None = None) -> Stop:
        """Return what says when all ranks stop; `begun` has noted signals already."""
        if self._stop is None:
            from .stop import Stop

            self._stop = begun or Stop()
            self._stop.join(self._roll.comm)
        return self._stop

    def stops(self) -> bool:
        """Tell whether all ranks have agreed to stop."""
        return self._stop is not None and self._stop.reason != 0

    def explain(self) -> str:
        """Return where each variable that the script finds comes from."""
        return explain(os.environ, self._replaced)

    def spans(self, comm: MPI.Comm) -> bool:
        """Tell whether a communicator has the ranks of the job in the same order."""
        from mpi4py import MPI

        return MPI.Comm.Compare(self._roll.comm, comm) in (MPI.IDENT, MPI.CONGRUENT)

    def _await_all(self, timeout_s: float | None) -> int:
        """Return the most calls of should_stop() of a rank, when all are here; the exit(0) of a handler waits."""
        calls = self._stop.calls if self._stop else 0
        while True:
            try:
                return self._roll.await_end(calls, timeout_s, self._missing, self._remind)
            except SystemExit as error:
                if error.code not in (None, 0):
                    raise

    def _drop_store(self) -> None:
        del self.groups
        self._server = None

    def _missing(self) -> str:
        """Return in words which ranks have not left; rank 0, if its store does not answer."""
        store = self.groups.keys.job
        found: list[int] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # dist.DistNetworkError among them
                found.extend(rank for rank in range(self._roll.size) if not store.check([left_key(rank)]))

        asking = threading.Thread(target=ask, daemon=True)  # a store that does not answer holds whoever asks
        asking.start()
        asking.join(ANSWER_S)
        return listed([self._roll.name(rank) for rank in ([0] if asking.is_alive() else found)])

    def _remind(self, waited_s: float) -> None:
        """Say whom the job waits for, once per job: by the rank that has waited longest."""
        if self._roll.rank == self.groups.keys.first("reminds", self._roll.rank):
            tell(f"waiting {waited_s:.0f} s for the end of {self._missing()}")


def left_key(rank: int) -> str:
    """Return the store's key that says that a rank wants to leave."""
    return f"left/{rank}"
