"""The store where the ranks meet. Rank 0 serves it, and it listens before anybody learns its address."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..beside.wire import listen
from ..facts.runtime import RUN_PREFIX
from ..plan.environment import Endpoint
from . import lookups

CONNECT_TIMEOUT_S = 30.0


def serve_store(address: str, timeout_s: float, port: int = 0) -> tuple[dist.Store, Endpoint]:
    """Serve the store on a port of `address`, a free one if `port` is 0, and on no other interface.

    Raises OSError if that port can't be listened on. The server can be shared within this process: if a
    script opens a store of its own by env://, it gets this one, and no error that the port is taken.
    """
    with listen(address, port) as listener:
        port = int(listener.getsockname()[1])
        with lookups.suspended():
            store = open_store(
                address, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
                use_libuv=torch.__version__ >= "2.8",  # before, libuv's server took no socket (pytorch#150215)
            )
    return store, Endpoint(address, port, token=os.urandom(16).hex(), run_id=RUN_PREFIX + os.urandom(4).hex())


def connect(endpoint: Endpoint, timeout_s: float) -> tuple[dist.Store | None, str | None]:
    """Connect to rank 0's store and return it, or why that failed.

    From then on it waits for a key as long as torch's own store would.
    """
    patience = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    try:
        with lookups.suspended():
            store = open_store(endpoint.address, endpoint.port, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:  # dist.DistNetworkError among them
        return None, str(error).splitlines()[0]
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    return store, None


def open_store(*arguments: Any, **options: Any) -> dist.TCPStore:
    """Return a TCPStore, without libuv where torch was built without it, as Debian 13's was.

    Torch's default is libuv, and its constructor then fails before it listens or connects. A script's own
    init_process_group() reads USE_LIBUV (docs.pytorch.org/tutorials/intermediate/TCPStore_libuv_backend.html).
    """
    try:
        return dist.TCPStore(*arguments, **options)
    except RuntimeError as error:
        if "without libuv" not in str(error):
            raise
    os.environ.setdefault("USE_LIBUV", "0")
    return dist.TCPStore(*arguments, **{**options, "use_libuv": False})


class KeySpaces:
    """Hands out fresh parts of the job's store, each for one use.

    A second process group over the same keys would read what the first one left, and fail at random.
    All ranks of a group must have asked equally often for groups of its size.
    """

    def __init__(self, store: dist.Store, token: str) -> None:
        self.job = dist.PrefixStore(token, store)
        self._uses: Counter[int] = Counter()

    def first(self, key: str, rank: int) -> int:
        """Return the first rank that has asked this of a key."""
        return int(self.job.compare_set(key, "", str(rank)))

    def fresh(self, world_size: int) -> dist.Store:
        """Return an unused part of the store for a group of `world_size` ranks."""
        self._uses[world_size] += 1
        return dist.PrefixStore(f"group/{world_size}/{self._uses[world_size]}", self.job)
