"""A rank as the sentinels know it, and its log."""

from __future__ import annotations

from typing import NamedTuple


class LogPlan(NamedTuple):
    """How the output of `rank` on `host` is kept: in the file `path`, empty for none.

    When it is complete it is compressed by `compression`: gzip, zstd, or empty for not. When it has `most_bytes`,
    unless 0, a new one is begun. `ranks_file` is the index of all logs, empty for none, of the job with the run id
    `job`. `token` is random, the same on all ranks, and known to no other user.
    """

    path: str = ""
    rank: int = 0
    host: str = ""
    job: str = ""
    ranks_file: str = ""
    compression: str = ""
    most_bytes: int = 0
    token: str = ""


class RankIdentity(NamedTuple):
    """What the sentinels print of a rank when it fails, and need to know to end it.

    The reason of a failure is written to `error_file` as JSON, empty for nowhere. `grace_s` is the time in which the
    ranks of a failed job may end by themselves.
    `exits` tells that each rank exits by itself with the job's status, because the launcher would lose the
    status that MPI_Abort was given. `namespace` names the node, and on it the processes among which `pid` counts:
    nodes may have one name, and a node's ranks may be in containers of their own. The job's store listens on
    `store_port`. `memory_advice` says what to do where memory lacks, in the words of the scheduler if one is known.
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
    log: LogPlan = LogPlan()
    error_file: str = ""
    namespace: str = ""
    store_port: int = 0
    memory_advice: str = ""
