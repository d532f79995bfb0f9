"""MPI_Init, after a check that launcher, library and number of tasks belong together."""

from __future__ import annotations

import os
from typing import Any

from ..base.config import LaunchConfig
from ..base.errors import LaunchError
from ..base.stderr import warn
from ..base.timeline import begin_stage
from ..discovery import fabric, mpi, runtime, schedulers
from ..discovery.host import why_no_shm
from ..discovery.launchers import Runtime
from ..discovery.mpi import Library, library
from ..planning.compatibility import check_fit, check_nested, check_shm, check_tasks, check_whole, hidden, unlaunched
from ..planning.environment import GPU_SUPPORT, TRAPS, choose_fork_safety, left_out, switch_gpu_support_off
from ..sentinel.client import SentinelHandle
from . import variables


def initialise_mpi(config: LaunchConfig, started_by: Runtime | None, sentinel: SentinelHandle) -> Any:
    """Initialise MPI and return `mpi4py.MPI`; raise LaunchError, on every rank, if the ranks can't make one world.

    If launcher and library don't fit, MPI_Init ends the process, or makes each process a world of its own.
    So their fit is checked before, and the number of ranks after.
    """
    check_nested(runtime.outer_launcher(os.environ), config.script)
    check_tasks(started_by)
    begin_stage("import mpi4py")
    MPI = mpi.load()
    begin_stage("check launcher")
    loaded = library()
    try:
        check_fit(started_by, loaded)
    except LaunchError:  # srun is asked only now, by the rank that speaks: it takes time
        asks = started_by is not None and started_by.by_srun and started_by.rank == 0
        check_fit(started_by, loaded, schedulers.srun_mpi_types() if asks else ())
    check_shm(loaded, why_no_shm(), runtime.hostname())
    sentinel.stage("MPI_Init")
    if started_by is None:
        warn(unlaunched(loaded, *schedulers.find_allotment(os.environ)))
    former = variables.set_all(transports(loaded)) | variables.hide(hidden(started_by, loaded))
    cray = not config.gpu_aware_mpi and loaded.is_cray
    without_gpus = switch_gpu_support_off(os.environ) if cray else {}
    asked = os.environ.get(GPU_SUPPORT)
    fork_safety = choose_fork_safety(os.environ, fabric.has_verbs())
    variables.set_all({**without_gpus, **fork_safety})  # which stay: NCCL opens verbs, too
    begin_stage("MPI_Init")
    mpi.initialise(MPI)
    variables.restore(former)
    sentinel.stage("the start after MPI_Init")
    try:
        check_whole(started_by, MPI.COMM_WORLD.size, loaded)
    except LaunchError:
        MPI.Finalize()
        raise
    if without_gpus and MPI.COMM_WORLD.rank == 0:
        warn([f"gpu-aware-mpi: {GPU_SUPPORT}={asked} was set to 0: {TRAPS}; --gpu-aware-mpi keeps it"])
    return MPI


def transports(loaded: Library) -> dict[str, str]:
    """Return variables that keep Open MPI from searching for fast networks, if this node has none."""
    if loaded.name != "Open MPI" or "FI_PROVIDER" in os.environ or fabric.has_fabric():
        return {}
    chosen = fabric.chosen_components(os.environ, loaded.path)
    return {fabric.PREFIX + name: value for name, value in left_out(chosen).items()}
