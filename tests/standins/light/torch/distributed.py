"""A store that does nothing but let all ranks wait for each other, and a process group that is there when they have."""

import selectors
import socket
import threading
from datetime import timedelta
from typing import ClassVar


class Backend:
    """gloo alone."""

    default_device_backend_map: ClassVar = {"cpu": "gloo"}
    backend_capability: ClassVar = {"gloo": ["cpu"]}


class TCPStore:
    """Connects to a server, which answers all connections when as many have written a line as this says."""

    def __init__(self, host, port, master_listen_fd=None, **_):
        if master_listen_fd is not None:
            listener = socket.socket(fileno=master_listen_fd)
            threading.Thread(target=serve, args=(listener,), daemon=True).start()
        self.connection = socket.create_connection((host, port))

    def set_timeout(self, _):
        """Wait without an end."""

    def await_all(self, number):
        """Return when so many have called this."""
        self.connection.sendall(b"%d\n" % number)
        assert self.connection.recv(1)


def serve(listener):
    """Serve the store."""
    waiting, selector = [], selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                selector.register(listener.accept()[0], selectors.EVENT_READ)
            elif line := key.fileobj.recv(100):
                waiting.append(key.fileobj)
                if len(waiting) == int(line):
                    for one in waiting:
                        one.sendall(b"\n")
                    waiting.clear()
            else:
                selector.unregister(key.fileobj)


def PrefixStore(_, store):  # noqa: N802 (torch's name)
    """Return the store: it has no keys."""
    return store


class distributed_c10d:  # noqa: N801 (torch's name)
    """What mpiddp wants of that module."""

    default_pg_timeout = timedelta(minutes=30)


class group:  # noqa: N801 (torch's name)
    """The default process group."""

    class WORLD:
        """A group that does not count its collectives."""

        @staticmethod
        def _get_sequence_number_for_group():
            raise RuntimeError


_initialized = False


def init_process_group(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None,
                       group_name="", pg_options=None, device_id=None):
    """Wait for all ranks in the store, as torch does at the end of this."""
    global _initialized
    store.await_all(world_size)
    _initialized = True


def is_initialized():
    """Tell whether there is a process group."""
    return _initialized


def destroy_process_group():
    """Forget it."""
    global _initialized
    _initialized = False


def is_available():
    """Return that this torch has this."""
    return True


def is_backend_available(name):
    """Tell whether that is gloo."""
    return name == "gloo"


def is_nccl_available():
    """Return that it has no NCCL."""
    return False
