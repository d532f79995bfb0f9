"""Fork this rank's sentinel, and tell it what only the rank can find out."""

from __future__ import annotations

import os
import socket

from ..config import LaunchConfig
from ..facts import runtime
from ..sentinel.handle import SentinelHandle
from ..sentinel.messages import Watched


def fork_sentinel(config: LaunchConfig, started_by: runtime.Runtime | None) -> SentinelHandle:
    """Fork the process that watches this one; rank 0's can ask other hosts whether they answer."""
    rank = started_by.rank if started_by else 0
    return SentinelHandle(Watched(
        who=f"rank {rank} on {socket.gethostname()}",
        first_on_node=runtime.is_first_on_node(os.environ),
        step=runtime.slurm_step(os.environ, started_by),
        hosts=lambda: runtime.slurm_hosts(os.environ) if rank == 0 else [],
        by_srun=started_by is not None and started_by.launcher is runtime.SRUN,
        timeout_s=config.startup_timeout_s))
