"""When each stage of this rank's start began."""

import time

WAIT_PREFIX = "wait: "  # of the names of stages in which a rank waits for others

# Names and times of time.monotonic_ns(): the system's clock may be set while the job starts.
begun_stages: list[tuple[str, int]] = [("import mpiddp", time.monotonic_ns())]


def begin_stage(name: str) -> None:
    """Record that a stage begins and that the stage before it ends."""
    begun_stages.append((name, time.monotonic_ns()))
