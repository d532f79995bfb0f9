"""The variables that a script finds."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import Place


@dataclass(frozen=True)
class Endpoint:
    """Where rank 0's store listens.

    Its keys for this job start with `token`, which is random; `run_id` is the job's name for the
    script, random too.
    """

    address: str
    port: int
    token: str
    run_id: str


# What scripts and recipes set by hand: MPI wins over it, but the user should know.
SET_BY_HAND = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def exports(place: Place, endpoint: Endpoint) -> dict[str, str]:
    """Return the variables that mpiddp sets whatever they were: MPI is the source of truth.

    The names are torchrun's (torch.distributed.run, "Environment Variables"), and NODE_RANK, which
    Lightning and others read. TORCHELASTIC_RUN_ID is what frameworks test to learn that a launcher
    has set the others.
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
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
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "MPI4PY_RC_INITIALIZE": "0",  # a worker process that imports mpi4py must not start MPI again
    }


def defaults(threads: int, interface: str | None) -> dict[str, str]:
    """Return the variables that are set only where the user has not: needed before torch starts."""
    found = {"OMP_NUM_THREADS": str(threads)}
    if interface is not None:
        found["GLOO_SOCKET_IFNAME"] = interface
    return found
