"""The file with a rank's output."""

from __future__ import annotations

import os

from ..facts.files import open_for_writing
from .sink import Sink


def open_log(log: str, who: str) -> Sink:
    """Return a log to which output is appended."""
    descriptor = open_for_writing(log, append=True)
    return Sink(descriptor, log, who, os.fstat(descriptor).st_size, marks=True)
