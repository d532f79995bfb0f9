"""The process group: made for the script, and made again as the script asks for it."""

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
from . import variables
from .store import KeySpaces


class GroupMaker:
    """Makes default process groups over the job's own store.

    `unclaimed` is true while the script has not yet called init_process_group() for the group that was
    made before it ran.
    """

    def __init__(self, environment: JobEnv, keys: KeySpaces) -> None:
        self.environment = environment
        self.keys = keys
        self.unclaimed = False
        self._timeout: timedelta | None = None
        self._hook = self._hook_of_torch = sys.excepthook
        self._create: Callable[..., None] = dist.init_process_group
        self._signature = inspect.signature(self._create)

    def create(self, timeout: timedelta | None = None, binds: bool = True) -> None:
        """Initialise the default process group with the job's ranks; `timeout` None is torch's own.

        With NCCL and its like the group is bound to its device, if it `binds`: it then connects at once, and a broken
        fabric shows now and not at the first step (torch.distributed.init_process_group, `device_id`). All ranks
        take part then, also where only some of them make a further group.
        """
        env = self.environment
        self._timeout = timeout
        self._hook = sys.excepthook
        device = None if serves_cpu(env.backend) or not binds else env.device
        self._create_over_our_store(env.rank, env.world_size,
                                    {"backend": env.backend, "timeout": timeout, "device_id": device})
        self._hook_of_torch = sys.excepthook

    def try_out(self) -> None:
        """Run a first collective: some backends connect only then."""
        dist.all_reduce(torch.zeros(1, device=self.environment.device))

    def adopt_calls(self) -> None:
        """Replace torch's init_process_group(): the script's call takes the group that is there, or makes another.

        Several modules of torch.distributed hold the function; each gets ours.
        """
        self.unclaimed = dist.is_initialized()
        original = self._create

        @functools.wraps(original)
        def init_process_group(*arguments: Any, **keywords: Any) -> None:
            if not self.claim(*arguments, **keywords):
                self._create_as_asked(self._request(*arguments, **keywords))

        for name, module in list(sys.modules.items()):
            if name.startswith("torch.distributed") and getattr(module, "init_process_group", None) is original:
                module.init_process_group = init_process_group  # type: ignore[attr-defined]

    def is_idle(self) -> bool:
        """Tell whether nobody has used the group that was made before the script, as far as it counts its collectives.

        The numbers are those by which torch checks collectives (ProcessGroup::getSequenceNumberForGroup).
        """
        if not self.unclaimed or not dist.is_initialized():
            return False
        group: Any = dist.group.WORLD
        try:
            return int(group._get_sequence_number_for_group()) == 0
        except RuntimeError:  # this backend does not count
            return False

    def claim(self, *arguments: Any, **keywords: Any) -> bool:
        """Tell whether the unclaimed group is what the caller asks for; destroy it if not.

        The arguments are those of torch.distributed.init_process_group().
        """
        if self.unclaimed and dist.is_initialized() and self._is_as_asked(self._request(*arguments, **keywords)):
            self.unclaimed = False
            return True
        self.discard()
        return False

    def discard(self) -> None:
        """Destroy the group if it is unclaimed, with the hook by which torch puts the rank before each traceback.

        A hook that the script has set since then stays.
        """
        if self.unclaimed and dist.is_initialized():
            dist.destroy_process_group()
            if sys.excepthook is self._hook_of_torch:
                sys.excepthook = self._hook
        self.unclaimed = False

    def _request(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Return all arguments of an init_process_group() call by name."""
        call = self._signature.bind(*arguments, **keywords)
        call.apply_defaults()
        return call.arguments

    def _create_as_asked(self, request: dict[str, Any]) -> None:
        if not dist.is_initialized() and self._uses_our_store(request):
            self._create_over_our_store(*ranks_of(request), {**request, "init_method": None})
        else:
            self._create(**request)

    def _create_over_our_store(self, rank: int, world_size: int, request: dict[str, Any]) -> None:
        """Create a group over a fresh part of the job's store, and let gloo read many addresses at a time.

        With GLOO_ENABLE_STORE_V2_API, which gloo looks at for each group (gloo/common/utils.cc), it reads the
        addresses of up to 128 ranks in one operation. It then waits as long as the store does, so the store gets
        the group's timeout, as torch does for env://. Groups of some of the ranks are made in gloo's usual way.
        """
        store = self.keys.fresh(world_size)
        store.set_timeout(request["timeout"] or dist.distributed_c10d.default_pg_timeout)
        former = variables.set_missing({"GLOO_ENABLE_STORE_V2_API": "1"})
        try:
            self._create(**{**request, "store": store, "rank": rank, "world_size": world_size})
        finally:
            variables.restore(former)

    def _is_as_asked(self, request: dict[str, Any]) -> bool:
        """Tell whether our group is what a script asks for."""
        env = self.environment
        special = {"backend", "init_method", "store", "rank", "world_size", "timeout", "device_id", "group_name"}
        parameters = self._signature.parameters
        return (
            covers(env.backend, request["backend"], env.device)
            and request["timeout"] in (None, self._timeout)
            and request["device_id"] in (None, env.device)
            and self._uses_our_store(request)
            and ranks_of(request) == (env.rank, env.world_size)
            and all(value == parameters[name].default for name, value in request.items() if name not in special)
        )

    def _uses_our_store(self, request: dict[str, Any]) -> bool:
        """Tell whether a script's request means the job's own store.

        It does for env:// with our address, and for env:// with any other address if it wants all our
        ranks: an address that a script writes over ours (localhost, say) is no better than ours.
        """
        env = self.environment
        ours = f"{env.master_addr}:{env.master_port}"
        if request["store"] is not None or str(request["backend"]).lower() in ("mpi", "fake"):
            return False
        if request["init_method"] in (None, "env://"):
            whole = ranks_of(request) == (env.rank, env.world_size)
            return whole or ours == f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return request["init_method"] in (f"tcp://{ours}", f"tcp://{format_address(env.master_addr, env.master_port)}")


def serves_cpu(backend: str) -> bool:
    """Tell whether a backend serves the CPU; a group of any other is bound to its device."""
    return all("cpu" in dist.Backend.backend_capability.get(part.rpartition(":")[2], ["cpu"])
               for part in backend.split(","))


def covers(ours: str, asked: str | None, device: torch.device) -> bool:
    """Tell whether our backend serves every device type that the backend asked for serves, by the same backend."""
    if asked is None and device.type == "cpu":
        return True
    have, want = (backends_by_device(name) for name in (ours, asked))
    return all(have.get(kind) == backend for kind, backend in want.items())


def backends_by_device(backend: str | None) -> dict[str, str]:
    """Return which backend serves which device type, as torch reads its `backend` argument."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend(backend or "undefined"))
    return {kind: str(name) for kind, name in config.get_device_backend_map().items()}


def ranks_of(request: dict[str, Any]) -> tuple[int, int]:
    """Return the rank and world size that a request gives, or else the environment, as torch reads them."""
    rank, world_size = request["rank"], request["world_size"]
    return (
        int(os.environ.get("RANK", -1)) if rank == -1 else rank,
        int(os.environ.get("WORLD_SIZE", -1)) if world_size == -1 else world_size,
    )
