"""Connects to an `AuthListener` of another node, without waiting."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from functools import partial

from ..base.text import format_address
from .event_loop import EventLoop
from .listener import RETRY_INTERVAL_S, ClientHandshake

CONNECT_TIMEOUT_S, MAX_ATTEMPTS = 2.0, 3
SERVER_PROOF_TIMEOUT_S = 60.0  # the server's node may be busy


class Connector:
    """Makes one authenticated connection, in up to three attempts; a refused connection is not tried again."""

    def __init__(self, loop: EventLoop, address: str, port: int, token: str, server: str,
                 on_result: Callable[[socket.socket | None, str], None]) -> None:
        """Call `on_result` with the connection, or with None and the reason; `server` names the server in that."""
        self._loop, self._address, self._port, self._token = loop, address, port, token
        self._server, self._on_result = server, on_result
        self._left_s = MAX_ATTEMPTS * (CONNECT_TIMEOUT_S + RETRY_INTERVAL_S)

    def connect(self) -> None:
        """Start an attempt, and another one later if it fails."""
        self._handshake = ClientHandshake(self._token)
        self._socket = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        self._socket.setblocking(False)
        error = self._socket.connect_ex((self._address, self._port))
        if error not in (0, errno.EINPROGRESS):
            self._retry(os.strerror(error), error == errno.ECONNREFUSED)
            return
        self._loop.watch(self._socket, self._on_connected)
        self._loop.watch_writable(self._socket)
        self._loop.set_timer("connect", CONNECT_TIMEOUT_S, partial(self._fail, "timed out"))

    def _on_connected(self) -> None:
        """Begin the handshake if the connection is made."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(os.strerror(error), error == errno.ECONNREFUSED)
            return
        self._loop.unwatch(self._socket)
        self._loop.watch(self._socket, self._read)
        self._loop.set_timer("connect", SERVER_PROOF_TIMEOUT_S, partial(self._fail, "no answer"))
        with contextlib.suppress(OSError):  # the next read fails, too
            self._socket.send(self._handshake.nonce)

    def _read(self) -> None:
        """Check the server's proof, and send ours."""
        try:
            proof = self._handshake.feed(self._socket.recv(self._handshake.missing_bytes))
            if proof:
                self._socket.send(proof)
        except BlockingIOError:
            return
        except EOFError:  # unauthenticated connections may have crowded this one out
            self._fail("it closed the connection")
            return
        except OSError as error:
            self._fail(error.strerror or str(error), isinstance(error, PermissionError))
            return
        if proof:
            self._loop.unwatch(self._socket)
            self._loop.cancel_timers("connect")
            self._on_result(self._socket, "")

    def _fail(self, error: str, is_final: bool = False) -> None:
        self._loop.unwatch(self._socket)
        self._loop.cancel_timers("connect")
        self._left_s -= CONNECT_TIMEOUT_S
        self._retry(error, is_final)

    def _retry(self, error: str, is_final: bool) -> None:
        self._socket.close()
        self._left_s -= RETRY_INTERVAL_S
        if self._left_s > 0 and not is_final:
            self._loop.set_timer("connect", RETRY_INTERVAL_S, self.connect)
        else:
            endpoint = format_address(self._address, self._port)
            self._on_result(None, f"cannot connect to {self._server} at {endpoint}: {error}")
