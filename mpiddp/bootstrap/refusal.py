"""Print, once per job, why it cannot start."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from ..base.errors import LaunchError, LocalLaunchError
from ..base.polling import poll_until
from ..base.stderr import LAUNCHER_FORWARDING_S, write_line
from ..base.termination import flush_and_wait
from ..discovery import launchers
from ..discovery.site_profile import load_site
from ..systems.statuses import EXIT_CANNOT_START

if TYPE_CHECKING:
    from ..agent.client import AgentClient, NoAgent
    from ..base.communicator import Communicator

SPEAKER_TIMEOUT_S = 2.0  # for rank 0 to print, before a launcher that sees another rank end suppresses its output


# A site's launch line helps with these.
LAUNCHER_PROBLEMS = ("launcher-mismatch", "nested-launcher", "no-pmix", "pmi-unsupported", "split-world")


def format_refusal(error: LaunchError) -> str:
    """Return why the job cannot start, with the centre's words for its users."""
    profile = load_site(os.environ).profile
    if profile is None:
        return str(error)
    lines = [", ".join(filter(None, (f"{profile.name}: {profile.contact}", profile.link)))]
    lines += profile.text.strip().splitlines()
    if error.name in LAUNCHER_PROBLEMS and profile.launch_line:
        lines.append(f"start with: {profile.launch_line}")
    return f"{error}\n  {'site':<8} " + ("\n" + " " * 11).join(lines)


def refuse_early(message: str, on_node: bool = False, speaker: int = 0) -> None:
    """Print a reason before MPI is initialised; return when the launcher has had time to forward it.

    A rank knows its number from the launcher's variables. Only the rank `speaker` prints; if each task of a Slurm step
    or Flux job has started a launcher, only rank 0 of the first task. If the reason concerns only this node
    (`on_node`), the first rank of this node also prints it, unless the launcher has ended it by then.
    """
    launcher = launchers.read_launch_facts(os.environ)
    if launcher is not None and (launcher.rank != speaker or launcher.task > 0):
        time.sleep(SPEAKER_TIMEOUT_S)
        if not on_node or launcher.task > 0 or not launchers.is_first_on_node(os.environ):
            return
    write_line(message)
    if launcher is not None:
        time.sleep(LAUNCHER_FORWARDING_S)


@contextlib.contextmanager
def refusing_early(agent: AgentClient | NoAgent) -> Iterator[None]:
    """Print why the start up to MPI_Init, which runs in this block, fails."""
    try:
        yield
    except LaunchError as error:
        agent.report_locally_handled()
        refuse_early(format_refusal(error), isinstance(error, LocalLaunchError), error.speaker)
        agent.close()
        raise


def refuse(comm: Communicator, error: LaunchError) -> None:
    """Print on rank 0 why the job cannot start; return when the launcher has had time to forward it. Collective."""
    if comm.rank == 0:
        write_line(format_refusal(error))
        time.sleep(LAUNCHER_FORWARDING_S)
    printed = comm.start_barrier()
    with contextlib.suppress(TimeoutError):
        poll_until(lambda: printed.Test() or None, time.monotonic() + SPEAKER_TIMEOUT_S)


def refuse_alone(comm: Communicator, error: LocalLaunchError) -> NoReturn:
    """Print a reason that only this rank knows, and end the job on all ranks."""
    write_line(format_refusal(error))
    flush_and_wait()
    comm.abort(EXIT_CANNOT_START)
