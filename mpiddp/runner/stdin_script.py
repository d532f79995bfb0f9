"""A script that comes by standard input, `python -m mpiddp - < script.py`: rank 0 reads it for all ranks."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.config import STANDARD_INPUT
from ..base.errors import LaunchError
from ..base.polling import wait_for
from ..base.stderr import say
from ..bootstrap.rollcall import REMIND_AFTER_S, RollCall
from ..discovery import launchers
from ..discovery.mpi import identify_library
from ..discovery.script import sources

if TYPE_CHECKING:
    from mpi4py import MPI

CHUNK_BYTES = 2**16
ENDLESS_S = 10.0  # under Open MPI 5, whose mpirun (PRRTE 3.0) passes standard input on, but not its end (openpmix#4024)


def share(comm: MPI.Comm, timeout_s: float, began_s: float) -> None:
    """Read the script on rank 0, to which launchers pass their standard input, and give it to all ranks.

    srun passes it to every rank: the others leave it unread. On all ranks standard input has ended then, as under
    Python. Collective. Raises LaunchError `script-missing`, on every rank, where no script comes in time.
    """
    roll = RollCall(comm, timeout_s, began_s)
    if roll.rank > 0:
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)

    started_by = launchers.read_launch_facts(os.environ)
    is_open_mpi = started_by is not None and started_by.launcher is launchers.OPEN_MPI
    by_prrte = is_open_mpi and " 5." in identify_library().title

    def read_for_all(ranks: Sequence[None]) -> list[bytes]:
        return [read(min(roll.remaining_s, ENDLESS_S) if by_prrte else roll.remaining_s, by_prrte)] * len(ranks)

    sources[STANDARD_INPUT] = roll.agree("the script on standard input", None, read_for_all)
    roll.close()


def read(timeout_s: float, by_prrte: bool = False) -> bytes:
    """Return what standard input holds up to its end; raise LaunchError where there is nothing, or no end in time.

    `by_prrte` tells that Open MPI 5's mpirun passes it on.
    """
    if os.isatty(0):
        raise missing("standard input is a terminal")
    chunks: list[bytes] = []

    def end() -> bytes | None:
        while select.select([0], [], [], 0)[0]:
            chunks.append(os.read(0, CHUNK_BYTES))
            if not chunks[-1]:
                return b"".join(chunks)
        return None

    def remind(waited_s: float) -> None:
        say(f"mpiddp: rank 0 has waited {waited_s:.0f} s for the end of the script on standard input")

    why = " (Open MPI 5's mpirun does not pass its end on)" if by_prrte else ""
    late = missing(f"standard input had not ended after {timeout_s:.0f} s{why}")
    try:
        source = wait_for(end, time.monotonic() + timeout_s, lambda: late, remind, REMIND_AFTER_S)
    except OSError as error:
        raise missing(f"standard input cannot be read: {error.strerror}") from None
    if not source:
        raise missing("standard input is empty on rank 0")
    return source


def missing(found: str) -> LaunchError:
    """Return why there is no script."""
    return LaunchError(
        "script-missing",
        found=f"{found}, from which - reads the script",
        needed="the script on rank 0's standard input, up to its end",
        do="redirect the launcher's standard input, as in `mpirun … python -m mpiddp - < train.py`, without options\n"
        "that keep it from rank 0, or name the file",
    )
