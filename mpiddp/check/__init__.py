"""The command that measures and compares the nodes of a job, and what the launcher checks before a job."""

from __future__ import annotations

from typing import NamedTuple

ODD = 1  # exit status
PASSES = 3  # in each of which something has to be odd


class CheckOptions(NamedTuple):
    """A quick check, or one of the nodes alone, and files to write, empty for none."""

    quick: bool = False
    nodes_only: bool = False
    svg: str = ""
    json: str = ""
    history: str = ""
    suspects: str = ""
