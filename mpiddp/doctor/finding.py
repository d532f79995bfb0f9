"""What the doctor finds in a job script or on a host. It needs no parser of shell scripts."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """NOTE: nothing breaks. WARNING: resources are wasted, or the job may fail. ERROR: it fails, or trains N times."""

    NOTE = 1
    WARNING = 2
    ERROR = 3


COLOURS = {Severity.ERROR: "\033[1;31m", Severity.WARNING: "\033[1;33m", Severity.NOTE: "\033[1m"}
PLAIN = "\033[0m"


@dataclass(frozen=True)
class Finding:
    """A problem with the name of its rule; `line` is None without a job script, `suggestion` empty if there is none."""

    rule: str
    severity: Severity
    line: int | None
    message: str
    reason: str = ""
    suggestion: str = ""


def format_severity(severity: Severity, has_colours: bool) -> str:
    """Return a severity's name, in its colour if the terminal has colours."""
    name = severity.name.lower()
    return f"{COLOURS[severity]}{name}{PLAIN}" if has_colours else name
