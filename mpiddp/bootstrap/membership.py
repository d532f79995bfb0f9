"""A rank's membership of its job: its environment, the store, the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..base.config import LaunchConfig
from ..base.errors import LocalLaunchError
from ..base.ranks import JobEnv, LogPlan, RankIdentity, RankPosition
from ..base.text import memory_advice
from ..discovery import devices, host, launchers, runtime, schedulers
from ..planning.environment import Endpoint, accelerate_env, correct_inherited, explain_env, interface_env, script_env
from ..planning.job import Placement, PostTorchPlan
from ..planning.network import check_store_reached
from . import site
from . import store as job_store
from .output_setup import FoldingShare, join_folding, open_log
from .prepare import SavedEnv, restore_env, set_env, set_missing_env
from .process_group import GroupMaker
from .rollcall import Rendezvous
from .worker_start import prepare_workers

if TYPE_CHECKING:
    from mpi4py import MPI

GROUP = "process group"


def join_job(
    rendezvous: Rendezvous, place: RankPosition, plan: PostTorchPlan, config: LaunchConfig, saved: SavedEnv,
    server: dist.Store | None,
) -> Membership:
    """Set this rank's variables, connect it to the store, and return its membership. Collective.

    `saved` holds the former values of the variables that are set already. `server` is rank 0's store, None elsewhere.
    Raises LaunchError `log-unwritable`, `address-unreachable` or `port-taken`, on every rank.
    """
    endpoint = plan.endpoint
    missing = interface_env(plan.interface, plan.sockets) | accelerate_env(plan.device, place.world_size)
    own = script_env(place, endpoint, config.virtual_local_rank, runtime.count_restarts(os.environ))
    started_by = launchers.read_launch_facts(os.environ)
    if started_by is None or not started_by.by_srun:
        own |= correct_inherited(own, os.environ)
    saved = saved | set_missing_env(missing) | set_env(own)
    environment = JobEnv(*place, master_addr=endpoint.address, master_port=endpoint.port, backend=plan.backend,
                         device=torch.device(plan.device))
    log = open_log(rendezvous, place, config, endpoint.run_id) if config.log_dir else LogPlan()
    share = join_folding(rendezvous, place, endpoint, config) if config.output_filter.folded else None
    groups = GroupMaker(environment, job_store.KeySpaces(connect(rendezvous, endpoint), endpoint.token))
    return Membership(environment, rendezvous, groups, server, saved, endpoint, log, plan.placements, share)


def connect(rendezvous: Rendezvous, endpoint: Endpoint) -> dist.Store:
    """Connect to rank 0's store; raise LaunchError `address-unreachable` if some rank can't.

    After this, ranks wait for each other inside torch, where a late rank cannot be named.
    """
    store, error = job_store.connect_store(endpoint, rendezvous.remaining_s)
    rendezvous.exchange("connecting to the store", error,
                        lambda errors: check_store_reached(errors, rendezvous.hosts, endpoint))
    assert store is not None
    return store


class Membership:
    """Holds the ranks' communicator, the store (on rank 0 also its server) and the process group.

    `seats` are those of all ranks on rank 0, and empty elsewhere. `log` is how this rank's output is kept, `share` its
    part in folding, None without it.
    """

    def __init__(
        self, environment: JobEnv, rendezvous: Rendezvous, groups: GroupMaker, server: dist.Store | None,
        saved: SavedEnv, endpoint: Endpoint, log: LogPlan, seats: Sequence[Placement],
        share: FoldingShare | None = None,
    ) -> None:
        self.environment, self.endpoint, self.seats = environment, endpoint, seats
        self.rendezvous, self.groups = rendezvous, groups
        self.log, self.share = log, share
        self._server = server
        self._saved = saved
        self._undo_worker_start = prepare_workers()

    @property
    def saved(self) -> SavedEnv:
        """The variables that the job has set, each with its value before, None if it had none."""
        return self._saved

    @property
    def comm(self) -> MPI.Comm:
        """The communicator of the job's ranks, our own."""
        return self.rendezvous.comm

    def identify(self, config: LaunchConfig) -> RankIdentity:
        """Return what this rank's agent needs to know of it."""
        env = self.environment
        scheduler = schedulers.find_scheduler(os.environ)
        return RankIdentity(env.rank, env.world_size, env.local_rank, runtime.hostname(), str(env.device), os.getpid(),
                            self.endpoint.run_id, config.abort_grace_s, self.log, config.error_file,
                            f"{env.node_rank} {runtime.read_pid_namespace()}", self.endpoint.port,
                            memory_advice(scheduler.memory_use, scheduler.memory) if scheduler else "")

    def use_device(self) -> None:
        """Make this rank's device torch's current one. This is CUDA's first call: RuntimeError if a GPU is faulty."""
        devices.use_device(str(self.environment.device))

    def create_group(
        self, timeout: timedelta | None, give_up: Callable[[LocalLaunchError], object], binds: bool = True
    ) -> None:
        """Create the job's process group; call `give_up` at the startup timeout. `binds` is GroupMaker.create()'s.

        Returns when all ranks have the group: a rank that ended earlier would close its gloo connections while another
        rank still makes its own.
        """
        with self.rendezvous.abort_after(GROUP, give_up):
            self.groups.create(timeout, binds)
        self.await_all(GROUP, give_up)

    def await_all(self, stage: str, give_up: Callable[[LocalLaunchError], object]) -> None:
        """Return when all ranks have come out of a stage of the start; call `give_up` at the startup timeout."""
        try:
            self.rendezvous.exchange(stage, None, lambda ranks: [None] * len(ranks))
        except LocalLaunchError as error:
            give_up(error)

    def destroy_group(self) -> None:
        """Destroy the default process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def drop_store(self) -> None:
        """Drop the connection to the store, and on rank 0 the store."""
        del self.groups
        self._server = None

    def restore_environment(self) -> None:
        """Give the variables that the job set their former values."""
        restore_env(self._saved)
        self._undo_worker_start()

    def explain(self, script: str, config: LaunchConfig) -> str:
        """Return the device and the software of this rank, with its script file, and the origin of each variable."""
        device = self.environment.device
        name = devices.read_gpu(torch.get_device_module(device), device.index).name if device.index is not None else ""
        where = f"{device} ({name})" if name else str(device)
        lines = site.applied.explain(config)
        return f"runs on {where} with {host.describe_software(script)}\n{explain_env(os.environ, self._saved, lines)}"

    def has_same_ranks(self, comm: MPI.Comm) -> bool:
        """Return whether a communicator has the ranks of the job in the same order."""
        from mpi4py import MPI

        return MPI.Comm.Compare(self.comm, comm) in (MPI.IDENT, MPI.CONGRUENT)
