"""The functions for programs that keep their own main(): notebooks, coupled codes, one's own start."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from .errors import EXIT_REQUEUE

if TYPE_CHECKING:
    from datetime import timedelta

    from mpi4py import MPI

    from .act.membership import Membership
    from .act.stop import Stop
    from .environment import Environment

_own: Membership | None = None  # of the job that init_process_group() started in this process
_stop: Stop | None = None


def init_process_group(
    comm: MPI.Comm | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> Environment:
    """Make the ranks of an MPI communicator torch's default process group and return this rank's part.

    Collective over `comm`, which is COMM_WORLD by default and may be any intra-communicator: ranks
    outside it take no part, and several communicators get a group each. `backend` None is the
    device's own; `timeout` is that of the group's collectives, None for torch's default. MPI is
    initialised if it is not. Under `python -m mpiddp` the group that is there is returned where it
    is what is asked for.

    Raises LaunchError, the same on every rank, where the group cannot start, and ValueError where
    the process has a default group already.
    """
    global _own
    launched = _launched()
    if launched is not None and _adopts(launched, comm, backend, timeout):
        return launched.environment
    if _is_initialized():
        raise ValueError("the default process group is initialized already; call mpiddp.destroy_process_group() first")
    from mpi4py import MPI

    from .config import LaunchConfig
    from .launch import give_up, meet

    if not MPI.Is_initialized():
        MPI.Init_thread()
    membership = meet(MPI.COMM_WORLD if comm is None else comm, LaunchConfig(backend=backend, binding="launcher"))
    membership.create_group(timeout, give_up)
    _own = membership
    return _own.environment


def destroy_process_group() -> None:
    """Destroy the default process group and undo what init_process_group() set in the environment.

    Collective over its communicator: returns when every rank of it has called this, so that none
    takes the store away from the others.
    """
    global _own, _stop
    if _own is not None:
        leaving, _own, _stop = _own, None, None
        leaving.leave(exit_timeout_s=None)
        leaving.restore_environment()
    elif _is_initialized():
        import torch.distributed as dist

        dist.destroy_process_group()


@contextmanager
def process_group(
    comm: MPI.Comm | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> Iterator[Environment]:
    """Hold a default process group in a `with` block, as init_process_group() makes it.

    Where the block raises, the group is given up without waiting for the other ranks; to end their
    part of an MPI job too, start it with `python -m mpi4py` (mpi4py.run).
    """
    global _own
    env = init_process_group(comm, backend, timeout)
    try:
        yield env
    except BaseException:
        if _own is not None:
            leaving, _own = _own, None
            leaving.give_up()
        raise
    destroy_process_group()


def should_stop() -> bool:
    """Tell in a training loop whether it is time to write a checkpoint and stop; the same on all ranks at one step.

    It is once any rank was sent SIGUSR1 or SIGTERM, or the walltime is nearer than --stop-before. Every
    rank of the job has to call it equally often: a call starts a reduction over MPI and reads that of the
    call before it, so that no step is held up by it. The first call begins to note signals, and with
    --stop-before the start of the job did. Without a job of mpiddp's this process alone decides.
    """
    global _stop
    if member := _launched() or _own:
        return member.stop(_stop).due()
    if _stop is None:
        from .act.stop import Stop

        _stop = Stop()
    return _stop.due()


def stop_for_requeue() -> NoReturn:
    """End the script with status REQUEUE, 75, which tells a batch script to queue the job again; see should_stop()."""
    raise SystemExit(EXIT_REQUEUE)


def _launched() -> Membership | None:
    """Return this process's part in the job that `python -m mpiddp` started, if it did."""
    launch = sys.modules.get("mpiddp.launch")
    return launch.membership if launch is not None else None


def _adopts(
    launched: Membership, comm: MPI.Comm | None, backend: str | None, timeout: timedelta | None
) -> bool:
    """Take the launcher's group for a call and tell so; destroy it where another one is asked for."""
    if comm is not None and not launched.spans(comm):
        launched.groups.discard()
        return False
    return launched.groups.claim(backend=backend, timeout=timeout)


def _is_initialized() -> bool:
    """Tell whether there is a default process group, without importing torch for it."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())
