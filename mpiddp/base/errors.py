"""Why a job cannot start."""

from __future__ import annotations

import os
from typing import NoReturn

PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROBLEMS_FILE = os.path.join(PACKAGE_FOLDER, "PROBLEMS.md")  # explains each name


class LaunchError(Exception):
    """A named reason why the job cannot start.

    Attributes: `name`, short and in kebab-case, as PROBLEMS.md lists it; `actual`, the values found; `needed`, what is
    required; `do`, what the user can do about it; `speaker`, the rank that prints it before MPI_Init. Pickles, so that
    rank 0 can send it to every rank.
    """

    def __init__(self, name: str, actual: str, needed: str, do: str, speaker: int = 0) -> None:
        super().__init__(name, actual, needed, do, speaker)
        self.name, self.actual, self.needed, self.do, self.speaker = name, actual, needed, do, speaker

    def __str__(self) -> str:
        lines = [f"mpiddp: cannot start: {self.name}"]
        for label, text in (("found", self.actual), ("needed", self.needed), ("do", self.do),
                            ("more", f"{PROBLEMS_FILE}, {self.name}")):
            lines.append(f"  {label:<8} " + text.replace("\n", "\n" + " " * 11))
        return "\n".join(lines)


class LocalLaunchError(LaunchError):
    """A reason that only this rank knows; the rank prints it and ends the job."""


class EndTimeoutError(TimeoutError):
    """A finished rank has waited for the others for longer than --exit-timeout."""


def assert_never(value: NoReturn) -> NoReturn:
    """Mark code that no value reaches, for type checkers; typing has it from Python 3.11 on."""
    raise AssertionError(f"unexpected value: {value!r}")
