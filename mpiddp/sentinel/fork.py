"""Fork this rank's sentinel, and tell it what only the rank can find out."""

from __future__ import annotations

import os
from typing import Any

from ..base.config import BLOCKED_EXIT_TIMEOUT_S, LaunchConfig
from ..discovery import launchers, runtime, schedulers
from .client import SentinelHandle
from .protocol import KILL_SIGNAL, Watched


def fork_sentinel(config: LaunchConfig, started_by: launchers.LaunchFacts | None) -> SentinelHandle:
    """Fork the process that watches this one; rank 0's can ask other hosts whether they answer."""
    rank = started_by.rank if started_by else 0
    by_srun = started_by is not None and started_by.by_srun
    if os.getpid() == 1:
        let_be_killed()
    return SentinelHandle(Watched(
        who=f"rank {rank} on {runtime.hostname()}",
        first_on_node=launchers.is_first_on_node(os.environ),
        step=runtime.find_slurm_step(os.environ, started_by),
        hosts=lambda: schedulers.list_slurm_hosts(os.environ) if rank == 0 else [],
        by_srun=by_srun,
        step_daemon=runtime.find_step_daemon(os.getpid()) if by_srun else 0,
        timeout_s=config.startup_timeout_s,
        stall_s=config.stall_s or 0.0,
        stall_abort=config.stall_abort,
        exit_timeout_s=config.exit_timeout_s or BLOCKED_EXIT_TIMEOUT_S,
    ), watch)


def let_be_killed() -> None:
    """Let KILL_SIGNAL end this process, which is the first of its container, also while it is in native code.

    The kernel keeps from such a process all that it does not handle, and SIGKILL (man 7 pid_namespaces).
    """
    import ctypes

    library = ctypes.CDLL(None)
    library.signal(KILL_SIGNAL, ctypes.cast(library._exit, ctypes.c_void_p))


def watch(*arguments: Any) -> None:
    """Be the sentinel, as process.watch() says; the rank itself does not wait for that import."""
    from . import process

    process.watch(*arguments)
