"""A rank's position in the job, its environment once the job has started, its log, and its identity in reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class RankPosition(NamedTuple):
    """A rank's position in the job; all numbers count from 0.

    `rank` counts the ranks of the job, `local_rank` those of the node, and `node_rank` the nodes. torchrun's name for
    `node_rank` is GROUP_RANK.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


class JobEnv(NamedTuple):
    """A rank's position (see `RankPosition`), the address of rank 0's store, the group's backend, the rank's device."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    backend: str
    device: torch.device


class LogPlan(NamedTuple):
    """The log of the output of `rank` on `host`: the file `path`, empty for none.

    `ranks_file` is the index of all logs, empty for none, of the job with the run id `job`. `token` is random, the same
    on all ranks, and known to no other user.
    """

    path: str = ""
    rank: int = 0
    host: str = ""
    job: str = ""
    ranks_file: str = ""
    token: str = ""


class RankIdentity(NamedTuple):
    """What the agents need to know of a rank to report its failure and to end it.

    The root cause is written to `error_file` as JSON, unless that is empty. The ranks of a failed job have `grace_s`
    to end by themselves. `namespace` names the node and the process namespace of `pid`: nodes may have one name, and
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
    log: LogPlan = LogPlan()
    error_file: str = ""
    namespace: str = ""
    store_port: int = 0
    memory_advice: str = ""
