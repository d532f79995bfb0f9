"""Fork this rank's sentinel, and tell it what only the rank can find out."""

from __future__ import annotations

import os
import socket

from ..config import LaunchConfig
from ..facts import runtime
from ..sentinel.handle import Sentinel


def fork_sentinel(config: LaunchConfig, started_by: runtime.Runtime | None) -> Sentinel:
    """Fork the process that watches this one; rank 0's can ask other hosts whether they answer."""
    rank = started_by.rank if started_by else 0
    return Sentinel(
        f"rank {rank} on {socket.gethostname()}", runtime.is_first_on_node(os.environ),
        runtime.slurm_step(os.environ, started_by),
        lambda: runtime.slurm_hosts(os.environ) if rank == 0 else [], config.startup_timeout_s)
