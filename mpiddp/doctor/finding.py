"""What the doctor finds in a job script or on a host. It needs no parser of shell scripts."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.IntEnum):
    """NOTE: nothing breaks. WARNING: resources are wasted, or the job may fail. ERROR: it fails, or trains N times."""

    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True)
class Finding:
    """A problem with the name of its rule; `line` is None without a job script, `suggestion` empty if there is none."""

    rule: str
    severity: Severity
    line: int | None
    message: str
    reason: str = ""
    suggestion: str = ""
