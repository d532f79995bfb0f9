"""A rank's place in the job, and what it knows of itself once the job has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Place(NamedTuple):
    """A rank's place in the job.

    `rank` counts over the job, `local_rank` over the ranks of the node, `node_rank`, which torchrun
    calls GROUP_RANK, over the nodes; each from 0.
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
