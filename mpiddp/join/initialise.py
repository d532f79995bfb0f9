"""MPI_Init, once it is sure that launcher, library and number of tasks belong together."""

from __future__ import annotations

import os
from typing import Any

from ..config import LaunchConfig
from ..errors import LaunchError
from ..facts import fabric, mpi, runtime
from ..facts.library import Library, library
from ..plan.fit import check_fit, check_nested, check_tasks, check_whole, hidden, unlaunched
from ..plan.transports import left_out
from ..say import warn
from ..sentinel.handle import Sentinel
from ..stages import begin
from . import variables


def initialise_mpi(config: LaunchConfig, started_by: runtime.Runtime | None, sentinel: Sentinel) -> Any:
    """Initialise MPI and return `mpi4py.MPI`; raise LaunchError, on every rank, where it can't be whole.

    Where launcher and library don't fit, MPI_Init ends the process or makes each a world of its own:
    so the fit is checked before, and the number of ranks after.
    """
    check_nested(runtime.outer_launcher(os.environ), config.script)
    check_tasks(started_by)
    begin("import mpi4py")
    MPI = mpi.load()
    begin("check launcher")
    loaded = library()
    try:
        check_fit(started_by, loaded)
    except LaunchError:  # only now, and on the rank that speaks, is the time well spent to ask srun
        check_fit(started_by, loaded, runtime.srun_mpi_types() if started_by and started_by.rank == 0 else ())
    sentinel.stage("MPI_Init")
    warn(unlaunched(started_by, loaded, runtime.slurm_tasks(os.environ)))
    former = variables.set_all(transports(loaded)) | variables.hide(hidden(started_by, loaded))
    begin("MPI_Init")
    mpi.initialise(MPI)
    variables.restore(former)
    sentinel.stage("the start after MPI_Init")
    try:
        check_whole(started_by, MPI.COMM_WORLD.size, loaded)
    except LaunchError:
        MPI.Finalize()
        raise
    return MPI


def transports(loaded: Library) -> dict[str, str]:
    """Return the variables that spare MPI_Init the search for networks that this node does not have."""
    if loaded.name != "Open MPI" or "FI_PROVIDER" in os.environ or fabric.has_fabric():
        return {}
    chosen = fabric.chosen_components(os.environ, loaded.path)
    return {fabric.PREFIX + name: value for name, value in left_out(chosen).items()}
