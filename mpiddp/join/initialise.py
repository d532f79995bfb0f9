"""MPI_Init, after a check that launcher, library and number of tasks belong together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..beside.handle import SentinelHandle
from ..config import LaunchConfig
from ..errors import LaunchError
from ..facts import fabric, mpi, runtime, schedulers
from ..facts.host import why_no_shm
from ..facts.launchers import Runtime
from ..facts.library import Library, library
from ..plan.fit import check_fit, check_nested, check_shm, check_tasks, check_whole, hidden, unlaunched
from ..plan.transports import left_out
from ..say import warn
from ..stages import begin
from . import variables

GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
TRAPS = ("GPU-aware Cray MPICH may abort in MPI_Init, starts CUDA before each rank has its GPU, and can deadlock "
         "beside NCCL")
FORK_SAFE = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "FI_EFA_FORK_SAFE")
HUGE_PAGES = "FI_EFA_USE_HUGE_PAGE"
FALSE = ("0", "false", "no", "off")  # as libfabric reads it (fi_param_get_bool)


def initialise_mpi(config: LaunchConfig, started_by: Runtime | None, sentinel: SentinelHandle) -> Any:
    """Initialise MPI and return `mpi4py.MPI`; raise LaunchError, on every rank, if the ranks can't make one world.

    If launcher and library don't fit, MPI_Init ends the process, or makes each process a world of its own.
    So their fit is checked before, and the number of ranks after.
    """
    check_nested(runtime.outer_launcher(os.environ), config.script)
    check_tasks(started_by)
    begin("import mpi4py")
    MPI = mpi.load()
    begin("check launcher")
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
    begin("MPI_Init")
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


def switch_gpu_support_off(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that switches Cray MPICH's support for GPUs off, if it is on (HPE, man intro_mpi).

    mpiddp gives MPI no GPU buffers. With the support on, MPI_Init ends with "GPU_SUPPORT_ENABLED is requested, but GTL
    library is not linked" where mpi4py was built without that library (ARCHER2's GPU guide), or else starts CUDA, which
    reads CUDA_VISIBLE_DEVICES then. NVIDIA and CSCS warn of deadlocks where GPU-aware MPI and NCCL are used at the same
    time (NCCL User Guide, "Inter-GPU Communication with CUDA-aware MPI").
    """
    return {GPU_SUPPORT: "0"} if environ.get(GPU_SUPPORT, "0") not in ("", "0") else {}


def choose_fork_safety(environ: Mapping[str, str], has_verbs: bool) -> dict[str, str]:
    """Return the variables by which memory that the network has registered survives fork(), as DataLoader uses it.

    libibverbs turns its support for fork() on by RDMAV_FORK_SAFE or IBV_FORK_SAFE, set to anything (man ibv_fork_init).
    libfabric's verbs provider has none by default (man fi_verbs); its EFA provider reads FI_EFA_FORK_SAFE since 1.13,
    and aborts a process that forks without. From rdma-core 35 and Linux 5.13 on the kernel copies such pages in
    fork(), and these variables have no effect (ibv_is_fork_initialized: IBV_FORK_UNNEEDED); before, each registration
    costs a system call. NCCL and UCX turn the support on themselves, but may come after MPI's first registration, and
    then cannot. FI_EFA_FORK_SAFE=0 keeps all three away. So does asking EFA for huge pages, since it aborts where both
    are asked for (libfabric, efa_fork_support.c).
    """
    if not has_verbs or HUGE_PAGES in environ or environ.get("FI_EFA_FORK_SAFE", "1").lower() in FALSE:
        return {}
    return {name: "1" for name in FORK_SAFE if name not in environ}
