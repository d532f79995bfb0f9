"""What a rank knows of itself once the job has started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Environment:
    """A rank's place in the job, where the job meets, and what this rank computes on.

    `rank` counts over the job, `local_rank` over the ranks of this node, `node_rank` over the nodes.
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
