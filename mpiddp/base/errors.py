"""Why a job cannot start, and the exit statuses that are ours."""

from __future__ import annotations

import os
from typing import NoReturn

EXIT_USAGE = 2
EXIT_CANNOT_START = 3
EXIT_STALLED = 124  # as timeout(1) has it: --stall-abort
EXIT_OUTPUT_LOST = 120  # as Python's own, where it cannot write out what stdout holds (Py_FinalizeEx)
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: all ranks agreed to stop, and the job can go on later

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROBLEMS = os.path.join(FOLDER, "PROBLEMS.md")  # each name, and what to do


class LaunchError(Exception):
    """A named reason why the job cannot start.

    Attributes: `name`, short and in kebab-case, as PROBLEMS.md lists it; `found`, what is there, with
    values; `needed`, what must be there; `do`, what the user can do about it; `speaker`, the rank that prints it
    before MPI_Init. Pickles, so that rank 0 can send it to every rank.
    """

    def __init__(self, name: str, found: str, needed: str, do: str, speaker: int = 0) -> None:
        super().__init__(name, found, needed, do, speaker)
        self.name, self.found, self.needed, self.do, self.speaker = name, found, needed, do, speaker

    def __str__(self) -> str:
        lines = [f"mpiddp: cannot start: {self.name}"]
        for label, text in (("found", self.found), ("needed", self.needed), ("do", self.do),
                            ("more", f"{PROBLEMS}, {self.name}")):
            lines.append(f"  {label:<8} " + text.replace("\n", "\n" + " " * 11))
        return "\n".join(lines)


class EndTimeoutError(TimeoutError):
    """A rank at its end has waited for the others for --exit-timeout."""


class LonelyLaunchError(LaunchError):
    """A reason that a rank could not share with the others: it speaks for itself and ends the job."""


def assert_never(value: NoReturn) -> NoReturn:
    """Mark code that no value reaches, for type checkers; typing has it from Python 3.11 on."""
    raise AssertionError(f"unexpected value: {value!r}")
