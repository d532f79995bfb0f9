"""What the doctor finds in a job script or on a host."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """NOTE: nothing breaks. WARNING: resources are wasted, or the job may fail. ERROR: it fails, or trains N times."""

    NOTE = 1
    WARNING = 2
    ERROR = 3


COLOURS = {Severity.ERROR: "\033[1;31m", Severity.WARNING: "\033[1;33m", Severity.NOTE: "\033[1m"}
PLAIN = "\033[0m"
MIN_WIDTH = 40  # of lines for a narrow terminal


@dataclass(frozen=True)
class Finding:
    """A problem with the name of its rule; `line` is None without a job script.

    `write` are the lines to write instead of what is there, `advice` says in words what else to do.
    """

    rule: str
    severity: Severity
    line: int | None
    message: str
    reason: str = ""
    advice: str = ""
    write: tuple[str, ...] = ()

    def as_record(self) -> dict[str, object]:
        """Return the finding for JSON."""
        return {**vars(self), "severity": self.severity.name.lower()}


def format_severity(severity: Severity, has_colours: bool) -> str:
    """Return a severity's name, in its colour if the terminal has colours."""
    name = severity.name.lower()
    return f"{COLOURS[severity]}{name}{PLAIN}" if has_colours else name


def count_severities(findings: Sequence[Finding]) -> str:
    """Return how many findings there are of each severity, the worst first; empty for none."""
    numbers = [(sum(finding.severity is severity for finding in findings), severity.name.lower())
               for severity in sorted(Severity, reverse=True)]
    return ", ".join(f"{number} {name}{'s' * (number > 1)}" for number, name in numbers if number)


def wrap(text: str, width: int, label: str) -> list[str]:
    """Return a text in lines, the first behind a label and the others as far to the right."""
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=" " * len(label),
                         break_long_words=False, break_on_hyphens=False)
