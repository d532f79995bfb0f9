"""What MPI is told before it starts: components to leave out, no GPU buffers, and memory that survives fork()."""

from __future__ import annotations

from collections.abc import Mapping

# Components that drive nothing but a fast network. On a node without one they are of no use, and some take time:
# libpsm2 measures the clock for 0.2 s when it is loaded, Open MPI 5's btl/ofi sleeps for a second when it is closed.
FABRIC_ONLY = {"btl": ("ofi",), "mtl": ("ofi", "psm", "psm2")}
ASKED_FOR = ("btl_ofi", "mtl_ofi", "opal_common_ofi", "mtl_psm")  # who sets one of these wants the components

GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
TRAPS = ("GPU-aware Cray MPICH may abort in MPI_Init, starts CUDA before each rank has its GPU, and can deadlock "
         "beside NCCL")
FORK_SAFE = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "FI_EFA_FORK_SAFE")
HUGE_PAGES = "FI_EFA_USE_HUGE_PAGE"
FALSE = ("0", "false", "no", "off")  # as libfabric reads it (fi_param_get_bool)


def left_out(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters by which Open MPI leaves out components on a node without a fast network.

    `chosen` are the parameters that are set already. A list of components to use stays as it is; only a list of
    components to leave out ("^...") grows. Nothing is left out if `chosen` selects a pml to use, or sets
    a parameter in ASKED_FOR.
    """
    selected = chosen.get("pml", "")
    if (selected and not selected.startswith("^")) or any(name.startswith(ASKED_FOR) for name in chosen):
        return {}
    found = {}
    for framework, components in FABRIC_ONLY.items():
        given = chosen.get(framework, "")
        if not given or given.startswith("^"):
            without = [name for name in given.removeprefix("^").split(",") if name]
            found[framework] = "^" + ",".join(dict.fromkeys((*without, *components)))
    return found


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
