"""A rank as the sentinels know it."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """What is told of a rank where it fails, and how it ends.

    `log` is the file that has its output, empty for none; `error_file` is where the reason is written
    as JSON, empty for nowhere. `grace_s` is the time in which the ranks of a failed job end by
    themselves. `exits` tells that each rank exits by itself with the job's status, because the
    launcher would lose the status that MPI_Abort was given.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    device: str
    pid: int
    run_id: str
    grace_s: float
    exits: bool = False
    log: str = ""
    error_file: str = ""
