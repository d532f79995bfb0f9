"""A store through which all ranks wait for each other and exchange JSON, and a process group that does nothing else."""

import contextlib
import io
import json
import os
import selectors
import socket
import sys
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

LOST = "Connection closed by peer"  # gloo's words


class DistNetworkError(RuntimeError):
    """A connection failed."""


class Backend(str):
    """gloo alone."""

    default_device_backend_map: ClassVar = {"cpu": "gloo"}
    backend_capability: ClassVar = {"gloo": ["cpu"]}


class TCPStore:
    """Connects to a server, which answers all ranks when as many have written a line as this says."""

    def __init__(self, host, port, master_listen_fd=None, timeout=None, **_):
        if master_listen_fd is not None:
            listener = socket.socket(fileno=master_listen_fd)
            threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            self.connection = socket.create_connection((host, port), timeout and timeout.total_seconds())
        except OSError as error:
            raise DistNetworkError(str(error)) from None
        self.connection.settimeout(None)
        self.answers = self.connection.makefile("r")

    def set_timeout(self, _):
        """Wait without an end."""

    def compare_set(self, _key, _expected, value):
        """Return the value: there are no keys, so each rank is the first to set one."""
        return value

    def gather(self, size, rank, value):
        """Return the values of so many ranks, by rank, when all have called this."""
        self.connection.sendall(f"{json.dumps([size, rank, value])}\n".encode())
        if not (line := self.answers.readline()):
            raise RuntimeError(f"[gloo/transport/tcp/pair.cc:1] {LOST} [127.0.0.1]:1")
        return json.loads(line)


def serve(listener):
    """Serve the store. Who waits for ranks of which one has left loses its connection, as gloo's ranks do."""
    waiting, ranks, selector, left = {}, set(), selectors.DefaultSelector(), False
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            one = key.fileobj
            if one is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            try:
                size, rank, value = json.loads(one.recv(65536))
            except (OSError, TypeError, ValueError):  # a rank has left, or it is none
                left = left or one in ranks
                selector.unregister(one)
            else:
                ranks.add(one)
                waiting[one] = rank, value
                if len(waiting) == size:
                    values = json.dumps([value for _, value in sorted(waiting.values())])
                    # rank 0 last: when it has its answer, its script may end, and this thread with it
                    for each in sorted(waiting, key=lambda link: -waiting[link][0]):
                        with contextlib.suppress(OSError):  # it has left
                            each.sendall(f"{values}\n".encode())
                    waiting.clear()
            if left:
                for each in waiting:
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                waiting.clear()


def PrefixStore(_, store):  # noqa: N802 (torch's name)
    """Return the store: it has no keys."""
    return store


class WORLD:
    """The default process group: its store, rank, size, and number of collectives."""

    store, rank, size, count = None, -1, -1, 0

    @classmethod
    def _get_sequence_number_for_group(cls):
        return cls.count

    @classmethod
    def gather(cls, value):
        """Return the values of all ranks."""
        cls.count += 1
        return cls.store.gather(cls.size, cls.rank, value)


group = SimpleNamespace(WORLD=WORLD)
distributed_c10d = SimpleNamespace(
    default_pg_timeout=timedelta(minutes=30), Backend=Backend,
    BackendConfig=lambda _: SimpleNamespace(get_device_backend_map=lambda: {"cpu": "gloo"}))


def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None,
                       group_name="", pg_options=None, device_id=None):
    """Wait for all ranks in the store, and prefix tracebacks with the rank, as torch does."""
    WORLD.store, WORLD.rank, WORLD.size = store, rank, world_size
    barrier()
    WORLD.count, old_hook = 0, sys.excepthook  # mpiddp looks for a variable of this name

    def excepthook(*error):
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            old_hook(*error)
        finally:
            shown, sys.stderr = sys.stderr.getvalue(), stderr
        sys.stderr.write("\n".join(line and f"[rank{rank}]: {line}" for line in shown.split("\n")))
        sys.stderr.flush()

    excepthook.__module__ = "torch.distributed.distributed_c10d"
    sys.excepthook = excepthook


def is_initialized():
    """Tell whether there is a process group."""
    return WORLD.store is not None


def destroy_process_group():
    """Forget it."""
    WORLD.store = None


def get_rank():
    """Return this rank's number."""
    return WORLD.rank


def get_world_size():
    """Return the number of ranks."""
    return WORLD.size


def get_backend():
    """Return the only one."""
    return "gloo"


def barrier():
    """Wait for all ranks."""
    WORLD.gather(None)


def all_reduce(tensor):
    """Sum over all ranks."""
    tensor.values = [sum(column) for column in zip(*WORLD.gather(tensor.values), strict=True)]


def all_gather_object(found, own):
    """Put the objects of all ranks into a list; they are what JSON knows."""
    found[:] = WORLD.gather(own)


def is_torchelastic_launched():
    """Tell whether a launcher has set torchelastic's variables."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_available():
    """Return that this torch has this."""
    return True


def is_backend_available(name):
    """Tell whether that is gloo."""
    return name == "gloo"


def is_nccl_available():
    """Return that it has no NCCL."""
    return False
