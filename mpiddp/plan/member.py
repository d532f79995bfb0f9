"""A rank as the sentinels know it."""

from __future__ import annotations

from typing import NamedTuple


class Member(NamedTuple):
    """What the sentinels print of a rank when it fails, and need to know to end it.

    `log` is the file with its output, empty for none. The reason of a failure is written to `error_file` as
    JSON, empty for nowhere. `grace_s` is the time in which the ranks of a failed job may end by themselves.
    `exits` tells that each rank exits by itself with the job's status, because the launcher would lose the
    status that MPI_Abort was given. `namespace` names the node, and on it the processes among which `pid` counts:
    nodes may have one name, and a node's ranks may be in containers of their own.
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
    namespace: str = ""
