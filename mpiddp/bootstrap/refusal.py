"""Say, once per job, why it cannot start."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ..base.errors import EXIT_CANNOT_START, LaunchError, LonelyLaunchError
from ..base.polling import wait_for
from ..base.stderr import FORWARDING_S, STDERR, say
from ..base.termination import abort, let_through
from ..discovery import launchers

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..sentinel.client import SentinelHandle

PATIENCE_S = 2.0  # for rank 0 to speak, before a launcher that sees another rank end silences it


def refuse_early(message: str, on_node: bool = False, speaker: int = 0) -> None:
    """Print a reason before MPI is there; return when the launcher has had time to pass it on.

    A rank knows its own number from the launcher's variables. The rank `speaker` speaks; where each task of a Slurm
    step or Flux job has started a launcher, only rank 0 of the first task. If the reason is one of this node alone
    (`on_node`), a rank of another node than rank 0's speaks, too, where no launcher has ended it by then.
    """
    launcher = launchers.read_launch_facts(os.environ)
    if launcher is not None and (launcher.rank != speaker or launcher.task > 0):
        time.sleep(PATIENCE_S)
        if not on_node or launcher.task > 0 or not launchers.is_first_on_node(os.environ):
            return
    say(message)
    if launcher is not None:
        time.sleep(FORWARDING_S)


@contextlib.contextmanager
def refusing_early(sentinel: SentinelHandle) -> Iterator[None]:
    """Run the start up to MPI_Init in this block; if it fails, say why."""
    try:
        yield
    except LaunchError as error:
        sentinel.settle()
        refuse_early(str(error), isinstance(error, LonelyLaunchError), error.speaker)
        raise


def refuse(comm: MPI.Comm, error: LaunchError) -> None:
    """Print on rank 0 why the job cannot start; return when the launcher has had time to pass it on. Collective."""
    if comm.rank == 0:
        say(str(error))
        time.sleep(FORWARDING_S)
    said = comm.Ibarrier()
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: said.Test() or None, time.monotonic() + PATIENCE_S, TimeoutError, lambda _: None, PATIENCE_S)


def refuse_alone(error: LonelyLaunchError, descriptor: int = STDERR) -> NoReturn:
    """Print a reason that only this rank knows, and end the job on all ranks."""
    from mpi4py import MPI

    say(str(error), descriptor)
    let_through()
    abort(MPI, EXIT_CANNOT_START)
