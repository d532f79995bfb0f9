"""A check in which rank 1 gets the signal SIGNAL when it measures for the second time."""

import itertools
import os
import signal
import sys

from mpiddp.check import command, schedule

measure_rank, passes = schedule.measure_rank, itertools.count(1)


def measure(*arguments):
    """Measure once."""
    if next(passes) == 2 and os.environ["PMI_RANK"] == "1":
        signal.raise_signal(signal.Signals[os.environ["SIGNAL"]])
    return measure_rank(*arguments)


schedule.measure_rank = measure
schedule.RANK_TIMEOUT_S = 3.0
sys.exit(command.main())
