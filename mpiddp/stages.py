"""When each stage of this rank's start began."""

import time

WAIT = "wait: "  # begins the names of stages in which a rank waits for others

begun: list[tuple[str, int]] = [("import mpiddp", time.time_ns())]  # name and beginning, in ns of time.time_ns()


def begin(stage: str) -> None:
    """Note that a stage begins, and the one before it ends."""
    begun.append((stage, time.time_ns()))
