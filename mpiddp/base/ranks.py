"""A rank's position in the job, and its environment once the job has started."""

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
