"""MPI_Init, after a check that launcher, library and number of tasks belong together."""

from __future__ import annotations

import os
from typing import Any

from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.stderr import warn
from ..base.timeline import begin
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
from ..sentinel.client import SentinelHandle
from . import variables


def initialise_mpi(config: LaunchConfig, started_by: LaunchFacts | None, sentinel: SentinelHandle) -> Any:
    """Initialise MPI and return `mpi4py.MPI`; raise LaunchError, on every rank, if the ranks can't make one world.

    If launcher and library don't fit, MPI_Init ends the process, or makes each process a world of its own.
    So their fit is checked before, and the number of ranks after.
    """
    check_nested(runtime.find_outer_launcher(os.environ), config.script)
    check_outer_tasks(started_by)
    begin("import mpi4py")
    MPI = mpi.load_mpi()
    begin("check launcher")
    loaded = identify_library()
    try:
        check_compatibility(started_by, loaded)
    except LaunchError:  # srun is asked only now, by the rank that speaks: it takes time
        asks = started_by is not None and started_by.by_srun and started_by.rank == 0
        check_compatibility(started_by, loaded, schedulers.list_srun_mpi_types() if asks else ())
    check_shared_memory(loaded, describe_missing_shm(), runtime.hostname())
    sentinel.stage("MPI_Init")
    if started_by is None:
        warn(warn_unlaunched(loaded, *schedulers.find_intended_size(os.environ)))
    former = variables.set_all(transports(loaded)) | variables.hide(list_hidden_prefixes(started_by, loaded))
    cray = not config.gpu_aware_mpi and loaded.is_cray
    without_gpus = disable_gpu_support(os.environ) if cray else {}
    asked = os.environ.get(GPU_SUPPORT)
    fork_safety = choose_fork_safety(os.environ, mpi.has_verbs())
    variables.set_all({**without_gpus, **fork_safety})  # which stay: NCCL opens verbs, too
    begin("MPI_Init")
    mpi.initialise_mpi(MPI)
    variables.restore(former)
    sentinel.stage("the start after MPI_Init")
    try:
        check_world_size(started_by, MPI.COMM_WORLD.size, loaded)
    except LaunchError:
        MPI.Finalize()
        raise
    if without_gpus and MPI.COMM_WORLD.rank == 0:
        warn([f"gpu-aware-mpi: {GPU_SUPPORT}={asked} was set to 0: {GPU_SUPPORT_RISKS}; --gpu-aware-mpi keeps it"])
    return MPI


def transports(loaded: Library) -> dict[str, str]:
    """Return variables that keep Open MPI from searching for fast networks, if this node has none."""
    if loaded.name != "Open MPI" or "FI_PROVIDER" in os.environ or mpi.has_fabric():
        return {}
    chosen = mpi.read_mca_parameters(os.environ, loaded.path)
    return {mpi.MCA_PREFIX + name: value for name, value in exclude_components(chosen).items()}
