"""The job's TCPStore. Rank 0 serves it, and it listens before any other rank knows its address."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..discovery.runtime import RUN_PREFIX
from ..ipc.channel import listen
from ..planning.environment import Endpoint

CONNECT_TIMEOUT_S = 30.0
WARNING, ERROR = 1, 2  # levels of c10's log


class Resolver(ctypes.Structure):
    """The beginning of a thread's resolver in the C library (resolv.h, `struct __res_state`)."""

    _fields_ = (("timeout_s", ctypes.c_int), ("tries", ctypes.c_int))


@contextmanager
def reverse_dns_disabled() -> Iterator[None]:
    """Make TCPStore's connections in this block without reverse DNS lookups: they fail at once in this thread.

    For its log TCPStore looks up its peer's name at both ends of each connection. Its server does so for one rank after
    the other: when a packet is lost, all ranks wait five seconds (resolver(3)). From torch 2.9 on a process stops after
    a failed lookup (pytorch#159007). Torch's warning about the failure is hidden. If torch's log level shows more than
    warnings, the lookups stay: somebody reads that log.
    """
    level, resolver = find_log_level(), find_resolver()
    if level is None or resolver is None or level.value < WARNING:
        yield
        return
    saved = level.value, resolver.tries
    level.value, resolver.tries = max(level.value, ERROR), 0
    try:
        yield
    finally:
        level.value, resolver.tries = saved


def find_log_level() -> ctypes.c_int | None:
    """Return the C variable with torch's log level, None if this build has none."""
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so", os.RTLD_NOLOAD), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def find_resolver() -> Resolver | None:
    """Return this thread's resolver, initialised; None if the C library has no such one."""
    library = ctypes.CDLL(None)
    try:
        library.__res_state.restype = ctypes.POINTER(Resolver)
        library.__res_init()
    except AttributeError:
        return None
    resolver: Resolver = library.__res_state().contents
    return resolver


def serve_store(address: str, timeout_s: float, port: int = 0) -> tuple[dist.Store, Endpoint]:
    """Serve the store on a port of `address`, a free one if `port` is 0, and on no other interface.

    Raises OSError if the port is taken. The server can be shared within this process: a script that opens a store by
    env:// gets this one, and no error that the port is taken.
    """
    with listen(address, port) as listener:
        port = int(listener.getsockname()[1])
        with reverse_dns_disabled():
            store = open_store(
                address, port, is_master=True, wait_for_workers=False, multi_tenant=True,
                timeout=timedelta(seconds=timeout_s), master_listen_fd=listener.detach(),
                use_libuv=torch.__version__ >= "2.8",  # before, libuv's server took no socket (pytorch#150215)
            )
    return store, Endpoint(address, port, token=os.urandom(16).hex(), run_id=RUN_PREFIX + os.urandom(4).hex())


def connect_store(endpoint: Endpoint, timeout_s: float) -> tuple[dist.Store | None, str | None]:
    """Return a connection to rank 0's store, or why that failed; it waits for a key as long as torch's default."""
    timeout = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    try:
        with reverse_dns_disabled():
            store = open_store(endpoint.address, endpoint.port, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:  # dist.DistNetworkError among them
        return None, str(error).splitlines()[0]
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    return store, None


def open_store(*arguments: Any, **options: Any) -> dist.TCPStore:
    """Return a TCPStore, without libuv if torch was built without it, as Debian 13's is.

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
    """Hands out unused key prefixes of the job's store.

    A second process group over the same keys would read what the first one left, and fail at random. All ranks of a
    group must have asked the same number of times for groups of its size.
    """

    def __init__(self, store: dist.Store, token: str) -> None:
        self.job = dist.PrefixStore(token, store)
        self._uses: Counter[int] = Counter()
        self._requests: Counter[int] = Counter()

    def elect(self, key: str, rank: int) -> int:
        """Return the rank that has called this first for a key."""
        return int(self.job.compare_set(key, "", str(rank)))

    def request(self, number: int, world_size: int, rank: int) -> int:
        """Return the rank that first requested to be `number` in the next group of `world_size` ranks."""
        self._requests[world_size] += 1
        return self.elect(f"request/{world_size}/{self._requests[world_size]}/{number}", rank)

    def fresh(self, world_size: int) -> dist.Store:
        """Return the store with an unused prefix, for a group of `world_size` ranks."""
        self._uses[world_size] += 1
        return dist.PrefixStore(f"group/{world_size}/{self._uses[world_size]}", self.job)
