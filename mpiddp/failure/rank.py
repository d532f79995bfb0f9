"""A rank's identity as the sentinels know it, and how its output is logged."""

from __future__ import annotations

from typing import NamedTuple


class LogPlan(NamedTuple):
    """The log of the output of `rank` on `host`: the file `path`, empty for none.

    The complete log is compressed by `compression`: gzip, zstd, or empty for none. It is rotated at `most_bytes`,
    unless that is 0. `ranks_file` is the index of all logs, empty for none, of the job with the run id `job`. `token`
    is random, the same on all ranks, and known to no other user.
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
    """What the sentinels need to know of a rank to report its failure and to end it.

    The root cause is written to `error_file` as JSON, unless that is empty. The ranks of a failed job have `grace_s`
    to end by themselves. If `exits`, each rank exits by itself with the job's status, because the launcher would lose
    the status of MPI_Abort. `namespace` names the node and the process namespace of `pid`: nodes may have one name, and
    a node's ranks may be in containers of their own. The job's store listens on `store_port`. `memory_advice` is for a
    lack of memory, with the scheduler's options if it is known.
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
