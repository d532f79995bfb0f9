"""When each stage of this rank's start began."""

import time

WAIT = "wait: "  # prefix of the stages in which a rank waits for others

begun: list[tuple[str, int]] = [("import mpiddp", time.time_ns())]  # each stage's name, and when it began (time_ns)


def begin(stage: str) -> None:
    """Note that a stage begins and that the stage before ends."""
    begun.append((stage, time.time_ns()))
