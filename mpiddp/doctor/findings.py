"""What the doctor finds in a job script or on a host."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Severity(enum.IntEnum):
    """How bad a finding is: the job fails or trains in several copies, it wastes or may fail, or it is good to know."""

    NOTE = 1
    WARNING = 2
    ERROR = 3


class Finding(NamedTuple):
    """What a rule has found: what is so, why it matters, and what to write or do instead, empty for nothing.

    `line` is that of a job script, None if the finding is about a host.
    """

    rule: str
    severity: Severity
    line: int | None
    message: str
    reason: str = ""
    suggestion: str = ""
