"""A script that comes by standard input, `python -m mpiddp - < script.py`: rank 0 reads it for all ranks."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.config import STANDARD_INPUT
from ..base.errors import LaunchError
from ..base.polling import poll_until
from ..base.stderr import write_line
from ..bootstrap.rollcall import REMIND_AFTER_S, Rendezvous
from ..discovery import launchers
from ..discovery.mpi import identify_library
from ..discovery.script import sources
from ..systems.launchers import MPIRUN

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 2**16
PRRTE_TIMEOUT_S = 10.0  # Open MPI 5's mpirun (PRRTE 3.0) forwards standard input, but not its end (openpmix#4024)


def share_script(comm: MPI.Comm, timeout_s: float, began_s: float) -> None:
    """Read the script on rank 0, to which launchers forward their standard input, and send it to all ranks. Collective.

    srun forwards it to every rank: the others leave it unread. Afterwards standard input is at its end on all ranks, as
    under Python. Raises LaunchError `script-missing` on every rank if no script arrives in time.
    """
    rendezvous = Rendezvous(comm, timeout_s, began_s)
    if rendezvous.rank > 0:
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)

    started_by = launchers.read_launch_facts(os.environ)
    is_open_mpi = started_by is not None and started_by.launcher is MPIRUN
    by_prrte = is_open_mpi and " 5." in identify_library().title

    def read_for_all(ranks: Sequence[None]) -> list[bytes]:
        left_s = rendezvous.remaining_s
        return [read_stdin(min(left_s, PRRTE_TIMEOUT_S) if by_prrte else left_s, by_prrte)] * len(ranks)

    sources[STANDARD_INPUT] = rendezvous.exchange("the script on standard input", None, read_for_all)
    rendezvous.close()


def read_stdin(timeout_s: float, by_prrte: bool = False) -> bytes:
    """Return all of standard input; raise LaunchError if it is empty, or does not end in time.

    `by_prrte` is true if Open MPI 5's mpirun forwards it.
    """
    if os.isatty(0):
        raise script_missing("it is a terminal")
    chunks: list[bytes] = []

    def read_to_end() -> bytes | None:
        while select.select([0], [], [], 0)[0]:
            chunks.append(os.read(0, CHUNK_BYTES))
            if not chunks[-1]:
                return b"".join(chunks)
        return None

    def remind(waited_s: float) -> None:
        write_line(f"mpiddp: rank 0 has waited {waited_s:.0f} s for the end of file on standard input")

    reason = " (Open MPI 5's mpirun does not forward it)" if by_prrte else ""
    timeout_error = script_missing(f"no end of file within {timeout_s:.0f} s{reason}")
    try:
        source = poll_until(read_to_end, time.monotonic() + timeout_s, lambda: timeout_error, remind, REMIND_AFTER_S)
    except OSError as error:
        raise script_missing(f"it cannot be read: {error.strerror}") from None
    if not source:
        raise script_missing("it is empty on rank 0")
    return source


def script_missing(reason: str) -> LaunchError:
    """Return the error that there is no script."""
    return LaunchError(
        "script-missing",
        actual=f"no complete script on standard input (-): {reason}",
        needed="the complete script on rank 0's standard input",
        do="redirect the launcher's standard input, as in `mpirun … python -m mpiddp - < train.py`, and remove\n"
        "launcher options that disable it on rank 0; or name the script file",
    )
