"""A rank's place in the job, and what it knows of itself once the job has started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)  # slots: rank 0 makes one for each rank of the job
class Place:
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


@dataclass(frozen=True, slots=True)
class Environment(Place):
    """A rank's place, where the job meets, and what the rank computes on.

    `master_addr` and `master_port` are the address of rank 0's store. `backend` is the process group's.
    """

    master_addr: str
    master_port: int
    backend: str
    device: torch.device
