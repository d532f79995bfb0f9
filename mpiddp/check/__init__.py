"""The command that measures and compares the nodes of a job, and what the launcher checks before a job."""

from __future__ import annotations

from typing import NamedTuple

ODD = 1  # exit status
PASSES = 3  # in each of which something has to be odd
PAUSE_S = 1.0  # between passes, so that a busy moment of a machine does not show in all
OWN_S = 0.5  # in a pass, for what a rank measures by itself: two periods of a cgroup's quota, and the rest


class CheckOptions(NamedTuple):
    """A quick check, or one of the nodes alone, and files to write, empty for none."""

    quick: bool = False
    nodes_only: bool = False
    svg: str = ""
    json: str = ""
    history: str = ""
    suspects: str = ""
