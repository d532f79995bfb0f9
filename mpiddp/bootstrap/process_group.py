"""The default process group: created for the script, and created again when the script asks for it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.ranks import JobEnv
from ..base.text import format_address
from .prepare import restore_env, set_missing_env
from .store import KeySpaces


class GroupMaker:
    """Creates default process groups over the job's own store.

    `unclaimed` is true while the script has not called init_process_group() for the group that was created before it.
    """

    def __init__(self, environment: JobEnv, keys: KeySpaces) -> None:
        self.environment, self.keys = environment, keys
        self.unclaimed = False
        self._timeout: timedelta | None = None
        self._excepthook = self._torch_excepthook = sys.excepthook
        self._create: Callable[..., None] = dist.init_process_group
        self._signature = inspect.signature(self._create)

    def create(self, timeout: timedelta | None = None, binds: bool = True) -> None:
        """Create the default process group of the job's ranks; `timeout` None is torch's own.

        If it `binds`, the group of a backend such as NCCL is bound to its device: it then connects at once, and a
        broken fabric fails now and not at the first step (torch.distributed.init_process_group, `device_id`). But then
        all ranks take part whenever some of them create a further group.
        """
        env = self.environment
        self._timeout = timeout
        self._excepthook = sys.excepthook
        device = None if can_serve_cpu(env.backend) or not binds else env.device
        self._create_over_our_store(env.rank, env.world_size,
                                    {"backend": env.backend, "timeout": timeout, "device_id": device})
        self._torch_excepthook = sys.excepthook

    def try_out(self) -> None:
        """Run a first collective, at which some backends connect."""
        dist.all_reduce(torch.zeros(1, device=self.environment.device))

    def adopt_calls(self) -> None:
        """Replace torch's init_process_group(): the script's call takes the group that exists, or creates another.

        Several modules of torch.distributed hold the function; each gets ours, for the life of the process: the script
        runs until then.
        """
        self.unclaimed = dist.is_initialized()
        original = self._create

        @functools.wraps(original)
        def init_process_group(*arguments: Any, **keywords: Any) -> None:
            request = self._bind_arguments(*arguments, **keywords)
            self._check_ranks(request)
            if not self.claim(*arguments, **keywords):
                self._create_as_requested(request)

        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed") and getattr(module, "init_process_group", None) is original:
                module.init_process_group = init_process_group  # type: ignore[attr-defined]

    def is_idle(self) -> bool:
        """Return whether the group created before the script is unused, as far as its backend counts collectives.

        The count is that of torch's own checks of collectives (ProcessGroup::getSequenceNumberForGroup).
        """
        if not self.unclaimed or not dist.is_initialized():
            return False
        group: Any = dist.group.WORLD
        try:
            return int(group._get_sequence_number_for_group()) == 0
        except RuntimeError:  # this backend does not count
            return False

    def claim(self, *arguments: Any, **keywords: Any) -> bool:
        """Return whether the unclaimed group is what the caller requests; destroy it if not.

        The arguments are those of torch.distributed.init_process_group().
        """
        if self.unclaimed and dist.is_initialized() and self._matches(self._bind_arguments(*arguments, **keywords)):
            self.unclaimed = False
            return True
        self.discard()
        return False

    def discard(self) -> None:
        """Destroy the group if it is unclaimed, and remove torch's excepthook, which prefixes tracebacks with the rank.

        A hook that the script has set since then stays.
        """
        if self.unclaimed and dist.is_initialized():
            dist.destroy_process_group()
            if sys.excepthook is self._torch_excepthook:
                sys.excepthook = self._excepthook
        self.unclaimed = False

    def _bind_arguments(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Return all arguments of an init_process_group() call by name."""
        call = self._signature.bind(*arguments, **keywords)
        call.apply_defaults()
        return call.arguments

    def _check_ranks(self, request: dict[str, Any]) -> None:
        """Raise ValueError if a group of the job's ranks cannot become complete: others would wait for its timeout."""
        if (dist.is_initialized() and not self.unclaimed) or not self._uses_our_store(request):
            return
        env, (number, world_size) = self.environment, requested_ranks(request)
        if number < 0:  # torch names the variable that is missing
            return
        advice = "leave out rank= and world_size=, and do not set RANK and WORLD_SIZE"
        if world_size > env.world_size:
            raise ValueError(f"init_process_group() is asked for {world_size} ranks, but the job has {env.world_size}: "
                             f"{advice}")
        first = self.keys.request(number, world_size, env.rank)
        if first != env.rank:
            raise ValueError(f"ranks {min(first, env.rank)} and {max(first, env.rank)} both call init_process_group() "
                             f"as rank {number} of {world_size}: {advice}")

    def _create_as_requested(self, request: dict[str, Any]) -> None:
        if not dist.is_initialized() and self._uses_our_store(request):
            self._create_over_our_store(*requested_ranks(request), {**request, "init_method": None})
        else:
            self._create(**request)

    def _create_over_our_store(self, rank: int, world_size: int, request: dict[str, Any]) -> None:
        """Create a group over unused keys of the job's store, with gloo's batched address exchange.

        With GLOO_ENABLE_STORE_V2_API, which gloo reads for each group (gloo/common/utils.cc), it reads the addresses of
        up to 128 ranks in one operation. It then waits as long as the store does, so the store gets the group's
        timeout, as torch does for env://. Groups of some of the ranks are made in gloo's usual way.
        """
        store = self.keys.fresh(world_size)
        store.set_timeout(request["timeout"] or dist.distributed_c10d.default_pg_timeout)
        saved = set_missing_env({"GLOO_ENABLE_STORE_V2_API": "1"})
        try:
            self._create(**{**request, "store": store, "rank": rank, "world_size": world_size})
        finally:
            restore_env(saved)

    def _matches(self, request: dict[str, Any]) -> bool:
        """Return whether our group is what a script requests."""
        env = self.environment
        special = {"backend", "init_method", "store", "rank", "world_size", "timeout", "device_id", "group_name"}
        parameters = self._signature.parameters
        return (
            has_all_backends(env.backend, request["backend"], env.device)
            and request["timeout"] in (None, self._timeout)
            and request["device_id"] in (None, env.device)
            and self._uses_our_store(request)
            and requested_ranks(request) == (env.rank, env.world_size)
            and all(value == parameters[name].default for name, value in request.items() if name not in special)
        )

    def _uses_our_store(self, request: dict[str, Any]) -> bool:
        """Return whether a script's request means the job's own store.

        It does for env:// with our address, and for env:// with any other address if it wants as many ranks as we have:
        an address that a script sets instead of ours, such as localhost, is not meant to be kept.
        """
        env = self.environment
        ours = f"{env.master_addr}:{env.master_port}"
        if request["store"] is not None or str(request["backend"]).lower() in ("mpi", "fake"):
            return False
        if request["init_method"] in (None, "env://"):
            wants_all = requested_ranks(request)[1] == env.world_size
            return wants_all or ours == f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return request["init_method"] in (f"tcp://{ours}", f"tcp://{format_address(env.master_addr, env.master_port)}")


def can_serve_cpu(backend: str) -> bool:
    """Return whether a backend serves the CPU."""
    return all("cpu" in dist.Backend.backend_capability.get(part.rpartition(":")[2], ["cpu"])
               for part in backend.split(","))


def has_all_backends(ours: str, requested: str | None, device: torch.device) -> bool:
    """Return whether our backend serves every device type of the requested one, by the same backend."""
    if requested is None and device.type == "cpu":
        return True
    have, want = (backends_by_device(name) for name in (ours, requested))
    return all(have.get(kind) == backend for kind, backend in want.items())


def backends_by_device(backend: str | None) -> dict[str, str]:
    """Return which backend serves which device type, as torch reads its `backend` argument."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend(backend or "undefined"))
    return {kind: str(name) for kind, name in config.get_device_backend_map().items()}


def requested_ranks(request: dict[str, Any]) -> tuple[int, int]:
    """Return the rank and world size that a request gives, or else the environment, as torch reads them."""
    rank, world_size = request["rank"], request["world_size"]
    return (
        int(os.environ.get("RANK", -1)) if rank == -1 else rank,
        int(os.environ.get("WORLD_SIZE", -1)) if world_size == -1 else world_size,
    )
