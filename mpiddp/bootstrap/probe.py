"""Try rank 0's addresses from the other nodes.

Rank 0's sentinel listens on all of them. One rank of each other node connects to all of them. The kernel does
that while the ranks import torch, so it costs no time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..discovery.host import Interface
from ..ipc.channel import listen
from ..planning.network import ProbeResult

PATIENCE_S = 2.0  # for a connection, and for its answer, once another address has answered
ALONE_S = 3.5  # for a connection where none has answered: packets get lost, and Linux sends a third SYN within 3.1 s
BUSY_S = 20.0  # for the first answer, where there are connections: rank 0's node may be busy
RUNNERS_UP_S = 0.1  # for the other addresses, once the best one has answered, or a late one of any
LOOK_S = 0.1  # between two looks whether there are connections


class Door(NamedTuple):
    """Where rank 0's sentinel listens: its addresses, the best first, a port, and the answer by which it is known."""

    addresses: tuple[str, ...]
    port: int
    token: str


class Listener:
    """Answers in the place of a sentinel, where rank 0 has none, by a thread of its own; until it is closed."""

    def __init__(self, addresses: Sequence[str], port: int = 0) -> None:
        """Listen on `port`, 0 for a free one; raise OSError where that is not possible."""
        self._socket = listen("", port)
        self.door = Door(tuple(addresses), int(self._socket.getsockname()[1]), os.urandom(16).hex())
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.shutdown(socket.SHUT_RDWR)  # accept() returns
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.door.token.encode())


class Probe:
    """Begins to connect to all addresses of a door at once; `interfaces` are this node's own."""

    def __init__(self, door: Door, interfaces: Sequence[Interface]) -> None:
        self._door = door
        self._names = {one.address: one.name for one in interfaces}
        self._start = self._heard = time.monotonic()
        self._trials: dict[int, ProbeResult] = {}
        self._pending: dict[int, socket.socket] = {}
        for at, address in enumerate(door.addresses):
            try:
                one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            except OSError as error:  # this node has no IPv6
                self._trials[at] = ProbeResult(error=error.strerror or str(error))
                continue
            one.setblocking(False)
            code = one.connect_ex((address, door.port))
            if code in (0, errno.EINPROGRESS):
                self._pending[at] = one
            else:
                self._trials[at] = ProbeResult(error=os.strerror(code))
                one.close()

    def trials(self) -> tuple[ProbeResult, ...]:
        """Return the result for each address; wait until the best one has answered, or until time is up."""
        with selectors.DefaultSelector() as selector:
            for at, one in self._pending.items():
                selector.register(one, selectors.EVENT_READ, at)
            left_s = 0.0  # at first for what has come in the meantime
            while self._pending:
                ready, had_s = selector.select(max(0.0, min(left_s, LOOK_S))), left_s
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    self._trials[key.data] = self._read(self._pending.pop(key.data))
                if ready and (had_s > 0 or self._has_connections()):
                    self._heard = time.monotonic()
                left_s = self._left_s()
                if not ready and max(had_s, left_s) <= 0:
                    break
        for at, one in self._pending.items():
            self._trials[at] = ProbeResult(error="no answer")
            one.close()
        return tuple(self._trials[at] for at in range(len(self._door.addresses)))

    def _left_s(self) -> float:
        answered = [at for at, trial in self._trials.items() if not trial.error]
        if answered:
            patience_s = RUNNERS_UP_S if 0 in answered else PATIENCE_S
        else:
            patience_s = BUSY_S if self._has_connections() else ALONE_S
        return max(self._start + patience_s, self._heard + RUNNERS_UP_S) - time.monotonic()

    def _has_connections(self) -> bool:
        return any(map(is_connected, self._pending.values()))

    def _read(self, one: socket.socket) -> ProbeResult:
        with one:
            try:
                answer = one.recv(len(self._door.token))
            except OSError as error:
                return ProbeResult(error=error.strerror or str(error))
            if answer != self._door.token.encode():
                return ProbeResult(error="another host answers there")
            return ProbeResult(self._names.get(one.getsockname()[0], ""))


def is_connected(one: socket.socket) -> bool:
    """Tell whether the other end's kernel has taken a connection; a process there may still be too busy for it."""
    try:
        one.getpeername()
    except OSError:
        return False
    return True
