"""Probe rank 0's addresses from the other nodes, to find an address that all of them reach.

Rank 0's agent listens on all of them. One rank of each other node connects to all of them. The kernel does that
while the ranks import torch, so it costs no time.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..discovery.host import Interface
from ..planning.network import ProbeResult

OTHER_ADDRESS_TIMEOUT_S = 2.0  # to connect and to get the token, once another address has answered
CONNECT_TIMEOUT_S = 3.5  # to connect to a first address: packets get lost, and Linux sends a third SYN within 3.1 s
ANSWER_TIMEOUT_S = 20.0  # for the first token once there is a connection: rank 0's node may be busy
OTHER_ADDRESS_GRACE_S = 0.1  # for other addresses once the best one has answered, and after each answer
POLL_INTERVAL_S = 0.1  # between two checks for connections


class ProbeTarget(NamedTuple):
    """Where rank 0's agent listens: its addresses, the best first, a port, and the token that it answers with."""

    addresses: tuple[str, ...]
    port: int
    token: str


class AddressProber:
    """Connects to all addresses of a target at once; `interfaces` are this node's own."""

    def __init__(self, target: ProbeTarget, interfaces: Sequence[Interface]) -> None:
        """Start to connect."""
        self._target = target
        self._interface_names = {interface.address: interface.name for interface in interfaces}
        self._start = self._last_answer = time.monotonic()
        self._trials: dict[int, ProbeResult] = {}  # by the index of the address
        self._pending: dict[int, socket.socket] = {}
        for index, address in enumerate(target.addresses):
            try:
                connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            except OSError as error:  # this node has no IPv6
                self._trials[index] = ProbeResult(error=error.strerror or str(error))
                continue
            connection.setblocking(False)
            code = connection.connect_ex((address, target.port))
            if code in (0, errno.EINPROGRESS):
                self._pending[index] = connection
            else:
                self._trials[index] = ProbeResult(error=os.strerror(code))
                connection.close()

    def await_trials(self) -> tuple[ProbeResult, ...]:
        """Return the result for each address; wait until the best one has answered, or until a timeout."""
        with selectors.DefaultSelector() as selector:
            for index, connection in self._pending.items():
                selector.register(connection, selectors.EVENT_READ, index)
            remaining_s = 0.0  # the first poll takes the answers that have come meanwhile
            while self._pending:
                ready, waited_s = selector.select(max(0.0, min(remaining_s, POLL_INTERVAL_S))), remaining_s
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    self._trials[key.data] = self._read(self._pending.pop(key.data))
                if ready and (waited_s > 0 or self._has_connections()):
                    self._last_answer = time.monotonic()
                remaining_s = self._find_remaining_s()
                if not ready and max(waited_s, remaining_s) <= 0:
                    break
        for index, connection in self._pending.items():
            self._trials[index] = ProbeResult(error="no answer")
            connection.close()
        return tuple(self._trials[index] for index in range(len(self._target.addresses)))

    def _find_remaining_s(self) -> float:
        answered = [index for index, trial in self._trials.items() if not trial.error]
        if answered:
            timeout_s = OTHER_ADDRESS_GRACE_S if 0 in answered else OTHER_ADDRESS_TIMEOUT_S
        else:
            timeout_s = ANSWER_TIMEOUT_S if self._has_connections() else CONNECT_TIMEOUT_S
        return max(self._start + timeout_s, self._last_answer + OTHER_ADDRESS_GRACE_S) - time.monotonic()

    def _has_connections(self) -> bool:
        return any(map(is_connected, self._pending.values()))

    def _read(self, connection: socket.socket) -> ProbeResult:
        with connection:
            try:
                answer = connection.recv(len(self._target.token))
            except OSError as error:
                return ProbeResult(error=error.strerror or str(error))
            if answer != self._target.token.encode():
                return ProbeResult(error="answered by another host")
            return ProbeResult(self._interface_names.get(connection.getsockname()[0], ""))


def is_connected(connection: socket.socket) -> bool:
    """Return whether the peer's kernel has accepted a connection; the process there may still be too busy for it."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True
