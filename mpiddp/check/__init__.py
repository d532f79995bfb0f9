"""The node check: `python -m mpiddp.check`, and `--check` at a job's start."""

from typing import NamedTuple

EXIT_OUTLIERS = 1
PASSES = 3  # an outlier is one in each of them
PASS_PAUSE_S = 1.0  # between passes, so that a short disturbance is not in all of them
RANK_BUDGET_S = 0.5  # in a pass, for a rank's own benchmarks: two windows of 0.2 s of bench/rank.py, and the rest


class CheckOptions(NamedTuple):
    """What to measure, and the files to write, "" for none."""

    quick: bool = False
    nodes_only: bool = False
    json: str = ""
    suspects: str = ""
