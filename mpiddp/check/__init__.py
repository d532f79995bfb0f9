"""The node check: `python -m mpiddp.check`, and `--check` at a job's start."""

EXIT_OUTLIERS = 1
PASSES = 3  # an outlier is one in each of them
PASS_PAUSE_S = 1.0  # before another pass, so that a busy moment of a machine does not show in all
RANK_BUDGET_S = 0.5  # in a pass, for what a rank measures by itself: two windows of 0.2 s of kernels.py, and the rest
