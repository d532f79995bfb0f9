"""MPI_Init in a rank.

Before it, the launcher, the MPI library and the number of tasks are checked for compatibility.
"""

from __future__ import annotations

import os
from typing import Any

from ..agent.client import AgentClient, NoAgent, holding_new_sockets
from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.stderr import warn
from ..base.timeline import begin_stage
from ..discovery import mpi, runtime, schedulers
from ..discovery.host import describe_missing_shm
from ..discovery.launchers import LaunchFacts
from ..discovery.mpi import Library, identify_library
from ..planning.compatibility import (
    check_compatibility,
    check_nested,
    check_outer_tasks,
    check_shared_memory,
    check_world_size,
    list_hidden_prefixes,
    warn_unlaunched,
)
from ..planning.environment import (
    GPU_SUPPORT,
    GPU_SUPPORT_RISKS,
    choose_fork_safety,
    disable_gpu_support,
    exclude_components,
)
from ..systems.mpi_libraries import OPEN_MPI
from .prepare import hide_env, restore_env, set_env
from .site import apply_site

PMIX_MARK = "PMIX_RANK"  # set for each rank by any launcher with PMIx


def initialise_mpi(config: LaunchConfig, started_by: LaunchFacts | None, agent: AgentClient | NoAgent) -> Any:
    """Initialise MPI and return `mpi4py.MPI`; raise LaunchError, on every rank, if the ranks can't make one world.

    If launcher and library are incompatible, MPI_Init ends the process, or makes each process a world of its own. So
    compatibility is checked before, and the number of ranks after.
    """
    check_nested(runtime.find_outer_launcher(os.environ), config.script)
    check_outer_tasks(started_by)
    begin_stage("import mpi4py")
    MPI = mpi.load_mpi()
    begin_stage("check launcher")
    loaded = identify_library()
    try:
        check_compatibility(started_by, loaded)
    except LaunchError:
        if started_by is None or started_by.rank:
            raise
        # only now run a command, which takes time, on the rank that prints
        check_compatibility(started_by, loaded, schedulers.list_mpi_interfaces(started_by.launcher))
    apply_site(config)
    check_shared_memory(loaded, describe_missing_shm(), runtime.hostname())
    agent.report_stage("MPI_Init")
    if started_by is None or (started_by.by_srun and started_by.size == 1):  # the shell that salloc opens is a step
        warn(warn_unlaunched(loaded, *schedulers.find_intended_size(os.environ)))
    saved = set_env(exclude_transports(loaded)) | hide_env(list_hidden_prefixes(started_by, loaded))
    gpu_support = os.environ.get(GPU_SUPPORT)
    without_gpus = disable_gpu_support(os.environ) if loaded.is_cray and not config.gpu_aware_mpi else {}
    fork_safety = choose_fork_safety(os.environ, mpi.has_verbs())
    set_env({**without_gpus, **fork_safety})  # kept: NCCL opens verbs too
    begin_stage("MPI_Init")
    hand_over = holding_new_sockets(agent) if PMIX_MARK in os.environ else None
    mpi.call_mpi_init(MPI)
    if hand_over is not None:
        hand_over()
    restore_env(saved)
    agent.report_stage("the start after MPI_Init")
    try:
        check_world_size(started_by, MPI.COMM_WORLD.size, loaded)
    except LaunchError:
        MPI.Finalize()
        raise
    if without_gpus and MPI.COMM_WORLD.rank == 0:
        line = (f"gpu-aware-mpi: changed {GPU_SUPPORT}={gpu_support} to 0: {GPU_SUPPORT_RISKS}; "
                "--gpu-aware-mpi keeps it")
        warn([line])
    return MPI


def exclude_transports(loaded: Library) -> dict[str, str]:
    """Return variables that keep Open MPI from searching for fast networks, if this node has none."""
    if loaded.name != OPEN_MPI.name or "FI_PROVIDER" in os.environ or mpi.has_fabric():
        return {}
    chosen = mpi.read_mca_parameters(os.environ, loaded.path)
    return {mpi.MCA_PREFIX + name: value for name, value in exclude_components(chosen).items()}
