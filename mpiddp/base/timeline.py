"""When each stage of this rank's start began."""

import time

WAIT = "wait: "  # prefix of the stages in which a rank waits for others

# Each stage's name, and when it began, on time.monotonic_ns()'s clock: the other one may be set while the job starts.
begun: list[tuple[str, int]] = [("import mpiddp", time.monotonic_ns())]


def begin(stage: str) -> None:
    """Note that a stage begins and that the stage before ends."""
    begun.append((stage, time.monotonic_ns()))
