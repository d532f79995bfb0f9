"""What a rank holds of its job: its place, the store, the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..base.config import LaunchConfig
from ..base.errors import LonelyLaunchError
from ..base.ranks import Environment, Place
from ..base.text import memory_advice
from ..discovery import devices, launchers, runtime, schedulers, software
from ..failure.rank import LogPlan, RankIdentity
from ..planning.environment import Endpoint, accelerate_env, explain_env, interface_env, script_env
from ..planning.job import Placement, PostTorchPlan
from ..planning.network import check_store_reached
from . import store as rendezvous
from . import variables
from .mpi_workers import keep_from_mpi
from .output_setup import Share, open_log, share
from .process_group import GroupMaker
from .rollcall import RollCall

if TYPE_CHECKING:
    from mpi4py import MPI

GROUP = "process group"


def enter(
    roll: RollCall, place: Place, plan: PostTorchPlan, config: LaunchConfig, former: variables.Former,
    server: dist.Store | None,
) -> Membership:
    """Set this rank's variables and device, connect it to the store, and return what it holds of the job.

    `former` holds what the variables that are already set were before. `server` is rank 0's store, None elsewhere.
    Collective. Raises LaunchError `log-unwritable`, `no-zstd`, `address-unreachable` or `port-taken`, on every rank.
    """
    endpoint = plan.endpoint
    unset = interface_env(plan.interface, plan.sockets) | accelerate_env(plan.device, place.world_size)
    former = former | variables.set_missing(unset) | variables.set_all(
        script_env(place, endpoint, config.virtual_local_rank, runtime.count_restarts(os.environ)))
    environment = Environment(*place, master_addr=endpoint.address, master_port=endpoint.port, backend=plan.backend,
                              device=devices.use_device(plan.device))
    log = open_log(roll, place, config, endpoint.run_id) if config.log_dir else LogPlan()
    part = share(roll, place, endpoint, config) if config.shown.folded else None
    groups = GroupMaker(environment, rendezvous.KeySpaces(connect(roll, endpoint), endpoint.token))
    return Membership(environment, roll, groups, server, former, endpoint, log, plan.placements, part)


def connect(roll: RollCall, endpoint: Endpoint) -> dist.Store:
    """Connect to rank 0's store; raise LaunchError `address-unreachable` where some rank can't.

    After this, ranks wait for each other inside torch, where nobody can name the one that is late.
    """
    store, error = rendezvous.connect(endpoint, roll.remaining_s)
    roll.agree("devices and store", error, lambda errors: check_store_reached(errors, roll.hosts, endpoint))
    assert store is not None
    return store


class Membership:
    """Holds the ranks' communicator, the store (on rank 0 its server too) and the process group.

    `seats` are those of all ranks, on rank 0; empty elsewhere. `log` tells how this rank's output is kept, and `share`
    is its part in the output that is folded, if it is.
    """

    def __init__(
        self, environment: Environment, roll: RollCall, groups: GroupMaker, server: dist.Store | None,
        former: variables.Former, endpoint: Endpoint, log: LogPlan, seats: Sequence[Placement],
        share: Share | None = None,
    ) -> None:
        self.environment, self.endpoint, self.seats = environment, endpoint, seats
        self.roll, self.groups = roll, groups
        self._server = server
        self._former = former
        self._let_workers_start_mpi = keep_from_mpi()
        self.log, self.share = log, share

    @property
    def comm(self) -> MPI.Comm:
        """The communicator of the job's ranks, our own."""
        return self.roll.comm

    def describe(self, config: LaunchConfig) -> RankIdentity:
        """Return what this rank's sentinel has to know of it."""
        env = self.environment
        exits = runtime.is_abort_status_lost(launchers.read_launch_facts(os.environ))
        scheduler = schedulers.find_scheduler(os.environ)
        return RankIdentity(env.rank, env.world_size, env.local_rank, runtime.hostname(), str(env.device), os.getpid(),
                      self.endpoint.run_id, config.abort_grace_s, exits, self.log, config.error_file,
                      f"{env.node_rank} {runtime.read_pid_namespace()}", self.endpoint.port,
                      memory_advice(scheduler.memory_use, scheduler.memory) if scheduler else "")

    def create_group(
        self, timeout: timedelta | None, give_up: Callable[[LonelyLaunchError], object], binds: bool = True
    ) -> None:
        """Create the job's process group; call `give_up` if that takes longer than the start may take.

        `binds` is GroupMaker.create()'s.

        Return when all ranks have the group: a rank that ended earlier would close its gloo connections
        while another rank still makes its own.
        """
        with self.roll.watch(GROUP, give_up):
            self.groups.create(timeout, binds)
        try:
            self.roll.agree(GROUP, None, lambda ranks: [None] * len(ranks))
        except LonelyLaunchError as error:
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
        variables.restore(self._former)
        self._let_workers_start_mpi()

    def explain(self, script: str) -> str:
        """Return what this rank runs with, a script file among it, and where each variable that it finds comes from."""
        device = self.environment.device
        name = devices.read_gpu(torch.get_device_module(device), device.index).name if device.index is not None else ""
        where = f"{device} ({name})" if name else str(device)
        return f"runs on {where} with {software.describe_software(script)}\n{explain_env(os.environ, self._former)}"

    def spans(self, comm: MPI.Comm) -> bool:
        """Tell whether a communicator has the ranks of the job in the same order."""
        from mpi4py import MPI

        return MPI.Comm.Compare(self.comm, comm) in (MPI.IDENT, MPI.CONGRUENT)
