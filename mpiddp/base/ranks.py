"""A rank's place in the job, and what it knows of itself once the job has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Place(NamedTuple):
    """A rank's place in the job.

    `rank` counts the ranks of the job, `local_rank` those of the node, and `node_rank` the nodes. All
    count from 0. torchrun's name for `node_rank` is GROUP_RANK.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


class Environment(NamedTuple):
    """A rank's place (see `Place`), where the job meets, and what the rank computes on.

    `master_addr` and `master_port` are the address of rank 0's store. `backend` is the process group's.
    """

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
