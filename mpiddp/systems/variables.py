"""The variables that mpiddp sets for a script, and the launchers' variables for the same thing."""

from __future__ import annotations

from typing import NamedTuple

from . import launchers

MPI_SPLIT_SOURCE = "MPI (ranks that share a node's memory)"


class Variable(NamedTuple):
    """A variable that mpiddp sets: where its value comes from, as --explain says it.

    `for_each_rank`: MPI alone knows its value, so mpiddp sets it whatever it was, and no site profile may set it.
    Scripts and recipes set those with `by_hand`; mpiddp warns of another value. `field` is the field of Launcher with
    the launchers' variables for the same thing, and `others` are more of these. Those in `inherited` describe a batch
    script as a task of its own: in a rank that srun did not start, mpiddp sets them to the same value.
    """

    name: str
    source: str
    for_each_rank: bool = True
    by_hand: bool = False
    field: str = ""
    others: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()


VARIABLES = (
    Variable("RANK", "MPI (rank in the job)", by_hand=True, field="ranks", inherited=("SLURM_PROCID",)),
    Variable("WORLD_SIZE", "MPI (size of the job)", by_hand=True, field="sizes",
             others=("SLURM_NTASKS", "SLURM_NPROCS"), inherited=("SLURM_NTASKS", "SLURM_NPROCS")),
    Variable("LOCAL_RANK", MPI_SPLIT_SOURCE, by_hand=True, field="local_ranks", inherited=("SLURM_LOCALID",)),
    Variable("LOCAL_WORLD_SIZE", MPI_SPLIT_SOURCE, by_hand=True, field="local_sizes",
             others=("SLURM_NTASKS_PER_NODE",)),
    Variable("GROUP_RANK", MPI_SPLIT_SOURCE),
    Variable("NODE_RANK", MPI_SPLIT_SOURCE, by_hand=True, field="node_ranks",  # Lightning and others read it
             inherited=("SLURM_NODEID",)),
    Variable("GROUP_WORLD_SIZE", MPI_SPLIT_SOURCE, field="nodes", others=("SLURM_NNODES",)),
    Variable("ROLE_NAME", "constant"),
    Variable("ROLE_RANK", "RANK"),
    Variable("ROLE_WORLD_SIZE", "WORLD_SIZE"),
    Variable("MASTER_ADDR", "the network interfaces of rank 0's node", by_hand=True),
    Variable("MASTER_PORT", "the kernel (a free port)", by_hand=True),
    Variable("TORCHELASTIC_RUN_ID", "random, from rank 0"),
    Variable("TORCHELASTIC_RESTART_COUNT", "mpiddp.supervise, or SLURM_RESTART_COUNT"),
    Variable("TORCHELASTIC_MAX_RESTARTS", "constant"),
    Variable("OMP_NUM_THREADS", "this rank's cores, divided by the number of ranks that share them",
             for_each_rank=False),
    Variable("GLOO_SOCKET_IFNAME", "the network interface towards MASTER_ADDR", for_each_rank=False),
    Variable("NCCL_SOCKET_IFNAME", "the network interfaces towards the other nodes", for_each_rank=False),
    Variable("ACCELERATE_USE_CPU", "the ranks' device: without it, each rank would train alone", for_each_rank=False),
    Variable("CUDA_VISIBLE_DEVICES", "NVML (the GPUs of the node's ranks, in the order of local ranks)"),
)
SET_BY_HAND = tuple(row.name for row in VARIABLES if row.by_hand)


def list_same(variable: Variable) -> tuple[str, ...]:
    """Return the launchers' variables for the same thing as a variable that mpiddp sets."""
    own = launchers.list_variables(variable.field) if variable.field else ()
    return (*(name for name in own if name != variable.name), *variable.others)
