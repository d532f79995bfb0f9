"""The exit statuses of mpiddp's commands, and the statuses that stand for signals."""

from __future__ import annotations

import signal
from typing import NamedTuple

EXIT_USAGE = 2
EXIT_CANNOT_START = 3
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h
EXIT_OUTPUT_LOST = 120  # as Python's own if it cannot flush stdout (Py_FinalizeEx)
EXIT_STALLED = 124  # as of timeout(1)
SIGNAL_BASE = 128  # a shell reports 128+N for signal N


class ExitStatus(NamedTuple):
    """An exit status of `python -m mpiddp` that is not the script's own: what it means, and who explains it.

    `explained` is what `mpiddp.supervise` says of it, if mpiddp has explained it on stderr without a report.
    """

    status: int
    meaning: str
    explained: str = ""


# In the order in which they are explained.
STATUSES = (
    ExitStatus(EXIT_USAGE, "wrong usage", "wrong command line"),
    ExitStatus(EXIT_CANNOT_START, "the job could not start", "the job did not start"),
    ExitStatus(EXIT_REQUEUE, "all ranks agreed to stop, and the job can go on later"),
    ExitStatus(EXIT_OUTPUT_LOST, "the script succeeded, but output was lost", "output was lost"),
    ExitStatus(EXIT_STALLED, "--stall-abort has ended the job"),
)


def signal_status(number: int) -> int:
    """Return the status that a shell reports for a process that a signal has ended."""
    return SIGNAL_BASE + number


def wait_status_to_shell(status: int) -> int:
    """Return the status that a shell reports for a wait status (man 2 wait)."""
    return signal_status(status & 0x7F) if status & 0x7F else status >> 8


EXIT_INTERRUPTED = signal_status(signal.SIGINT)
EXIT_TERMINATED = signal_status(signal.SIGTERM)
EXIT_KILLED = signal_status(signal.SIGKILL)


def find_explanation(status: int) -> str:
    """Return what `mpiddp.supervise` says of a status, empty if it is none that mpiddp has explained."""
    return next((row.explained for row in STATUSES if row.status == status), "")


def describe_statuses(*statuses: int) -> str:
    """Return statuses with their meanings, as the help of a command has them."""
    return "; ".join(f"{row.status} {row.meaning}" for row in STATUSES if row.status in statuses)
