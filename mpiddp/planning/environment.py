"""The variables that a script finds, and those that MPI reads before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..base.ranks import RankPosition
from ..systems.schedulers import SLURM
from ..systems.variables import VARIABLES, list_same


class Endpoint(NamedTuple):
    """Where rank 0's store listens.

    All keys of this job in the store start with the random `token`. The random `run_id` names the job for the script.
    `coordinator_port` is the port of rank 0's agent, 0 if it does not listen. `agent_token` authenticates the other
    agents; it is no key of the store, since anyone who reaches the store can read its keys.
    """

    address: str
    port: int
    token: str
    run_id: str
    coordinator_port: int = 0
    agent_token: str = ""


def script_env(place: RankPosition, endpoint: Endpoint, virtual: bool = False, restarts: int = 0) -> dict[str, str]:
    """Return the variables that mpiddp sets whatever their values were: MPI is the source of truth.

    The names are torchrun's (torch.distributed.run, "Environment Variables"), and NODE_RANK, which Lightning and others
    read. Frameworks look for TORCHELASTIC_RUN_ID to learn that a launcher has set the others. `virtual` sets LOCAL_RANK
    to 0, as torchrun's --virtual-local-rank does. `restarts` is how often the job was restarted.
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": "0" if virtual else str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node_rank),
        "NODE_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": endpoint.address,
        "MASTER_PORT": str(endpoint.port),
        "TORCHELASTIC_RUN_ID": endpoint.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def correct_inherited(own: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `environ` that a rank has inherited from a batch script, with the values of our `own`.

    sbatch describes its script as task 0 on node 0 (man sbatch, "OUTPUT ENVIRONMENT VARIABLES"); a launcher other than
    srun passes that to every rank, and many scripts ask for SLURM_PROCID before RANK.
    """
    return {name: own[row.name] for row in VARIABLES for name in row.inherited if name in environ}


def explain_env(values: Mapping[str, str], former: Mapping[str, str | None], site: Mapping[str, str] = {}) -> str:
    """Return a line for each variable that mpiddp has set, or has left as the user set it, and the lines of `site`.

    `values` is the environment now, with the launchers' variables for the same thing. `former` holds the variables that
    mpiddp has set, each with its value before, None if it had none.
    """
    lines = []
    for variable in VARIABLES:
        name, source = variable.name, variable.source
        if name not in values or name in site:
            continue
        if name == "OMP_NUM_THREADS" and "SLURM_CPUS_PER_TASK" in values:
            source = f"{SLURM.name}'s {SLURM.cores}"
        line = f"{name}={values[name]}  from {source if name in former else 'the environment (set by the user)'}"
        lost = [f"{name}={former[name]} in the environment"] if former.get(name) not in (None, values[name]) else []
        others = [other for other in list_same(variable) if other in values]
        lost += [f"{other}={values[other]}" for other in others if values[other] != values[name]]
        agree = [f"{other} (was {was})" if (was := former.get(other)) not in (None, values[name]) else other
                 for other in others if values[other] == values[name]]
        line += f"; same as {', '.join(agree)}" if agree else ""
        lines.append(line + (f"; overrides {', '.join(lost)}" if lost else ""))
    return "\n".join([*lines, *site.values()])


def accelerate_env(kind: str, ranks: int) -> dict[str, str]:
    """Return the variable that Accelerate needs for several ranks on the CPU, unless the user has set it.

    If torch sees no accelerator, Accelerate 1.15 lets each process train alone, also under torchrun, unless this is set
    or the script says `Accelerator(cpu=True)` (accelerate/state.py, PartialState._prepare_backend). Older versions use
    LOCAL_RANK. Transformers' Trainer reads it too (transformers/training_args.py, _setup_devices).
    """
    return {"ACCELERATE_USE_CPU": "true"} if kind == "cpu" and ranks > 1 else {}


def interface_env(interface: str, sockets: str) -> dict[str, str]:
    """Return the variables for gloo's interface and NCCL's interfaces, without those that are empty."""
    env = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": sockets}
    return {name: value for name, value in env.items() if value}


# Components that only drive a fast network. Without one they are useless, and some are slow: libpsm2 measures the clock
# for 0.2 s when it is loaded, Open MPI 5's btl/ofi sleeps for a second when it is closed.
FABRIC_ONLY = {"btl": ("ofi",), "mtl": ("ofi", "psm", "psm2")}
FABRIC_PARAMETERS = ("btl_ofi", "mtl_ofi", "opal_common_ofi", "mtl_psm")  # setting one keeps the components

GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
GPU_SUPPORT_RISKS = ("GPU-aware Cray MPICH may abort in MPI_Init, starts CUDA before each rank has its GPU, and can "
                     "deadlock with NCCL")
FORK_SAFE_VARIABLES = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "FI_EFA_FORK_SAFE")
HUGE_PAGES = "FI_EFA_USE_HUGE_PAGE"
FALSE_WORDS = ("0", "false", "no", "off")  # as libfabric reads it (fi_param_get_bool)


def exclude_components(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters by which Open MPI excludes components on a node without a fast network.

    `chosen` are the parameters that are set already. A list of components to use stays as it is; only a list of
    components to exclude ("^...") grows. Nothing is excluded if `chosen` selects a pml to use, or sets a parameter in
    FABRIC_PARAMETERS.
    """
    selected = chosen.get("pml", "")
    if (selected and not selected.startswith("^")) or any(name.startswith(FABRIC_PARAMETERS) for name in chosen):
        return {}
    excluded = {}
    for framework, components in FABRIC_ONLY.items():
        given = chosen.get(framework, "")
        if not given or given.startswith("^"):
            without = [name for name in given.removeprefix("^").split(",") if name]
            excluded[framework] = "^" + ",".join(dict.fromkeys((*without, *components)))
    return excluded


def disable_gpu_support(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that switches Cray MPICH's support for GPUs off, if it is on (HPE, man intro_mpi).

    mpiddp passes no GPU buffers to MPI. With the support on, MPI_Init ends with "GPU_SUPPORT_ENABLED is requested, but
    GTL library is not linked" if mpi4py was built without that library (ARCHER2's GPU guide), or else starts CUDA,
    which reads CUDA_VISIBLE_DEVICES then. NVIDIA and CSCS warn of deadlocks if GPU-aware MPI and NCCL are used at the
    same time (NCCL User Guide, "Inter-GPU Communication with CUDA-aware MPI").
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
    if not has_verbs or HUGE_PAGES in environ or environ.get("FI_EFA_FORK_SAFE", "1").lower() in FALSE_WORDS:
        return {}
    return {name: "1" for name in FORK_SAFE_VARIABLES if name not in environ}
