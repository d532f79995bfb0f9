"""The store where the ranks meet: served by rank 0, bound before its address is known to anyone."""

from __future__ import annotations

import os
import socket
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from ..facts.runtime import RUN_PREFIX
from ..plan.environment import Endpoint
from . import lookups

CONNECT_TIMEOUT_S = 30.0


def serve(address: str, timeout_s: float) -> tuple[dist.Store, Endpoint]:
    """Start the store's server on a free port of `address`, and of no other interface.

    The server may be shared within this process, so that a script's own env:// finds it in use by
    itself rather than taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN) as listener:
        port = int(listener.getsockname()[1])
        with lookups.suspended():
            store = dist.TCPStore(
                address, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
                use_libuv=torch.__version__ >= "2.8",  # before, libuv's server took no socket (pytorch#150215)
            )
    return store, Endpoint(address, port, token=os.urandom(16).hex(), run_id=RUN_PREFIX + os.urandom(4).hex())


def connect(endpoint: Endpoint, timeout_s: float) -> tuple[dist.Store | None, str | None]:
    """Connect to rank 0's store and return it, or why that failed.

    Waits for keys then take as long as torch's own store would wait.
    """
    patience = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    try:
        with lookups.suspended():
            store = dist.TCPStore(endpoint.address, endpoint.port, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:  # dist.DistNetworkError among them
        return None, str(error).splitlines()[0]
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    return store, None


class KeySpaces:
    """Fresh parts of the job's store, each for one use.

    A second process group over the keys of the first reads what that one left and fails at random.
    The ranks that share a group must ask for its keys equally often for its size.
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
