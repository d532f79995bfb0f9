"""Connections whose ends have proved to each other that they know the job's token: listener, connector, handshake."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from _operator import _compare_digest as compare_digest  # hmac's own, which would load OpenSSL too
from collections.abc import Callable
from functools import partial

from ..base.text import format_address
from .event_loop import EventLoop

NONCE_BYTES = 16
PROOF_BYTES = 32  # of SHA-256
HANDSHAKE_TIMEOUT_S = 5.0  # for each of the client's two messages
RETRY_INTERVAL_S = 0.2  # of connecting; of accepting, when no descriptor is left for one more connection
SPARE_CONNECTIONS = 64  # besides two for each rank
ACCEPTS_PER_EVENT = 64  # before other events are handled
KEEPALIVE_PROBES, KEEPALIVE_INTERVAL_S = 3, 15  # a silent peer is lost after INTERVAL_S * (PROBES + 1) (man 7 tcp)
CONNECT_TIMEOUT_S, MAX_ATTEMPTS = 2.0, 3
SERVER_PROOF_TIMEOUT_S = 60.0  # the server's node may be busy
CLIENT, SERVER = b"client", b"server"  # part of each side's proof, so that neither can be sent back


class ClientHandshake:
    """The client's side: `nonce` is sent first."""

    def __init__(self, token: str) -> None:
        self._token, self._received = token, b""
        self.nonce = os.urandom(NONCE_BYTES)

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the server's answer have not come yet."""
        return NONCE_BYTES + PROOF_BYTES - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Add a part of the answer, and return the client's proof when the answer is complete, nothing before.

        Raises EOFError if `data` is empty (the server has closed the connection), PermissionError if the server does
        not know the token.
        """
        if not data:
            raise EOFError
        self._received += data
        if self.missing_bytes:
            return b""
        server_nonce, server_proof = self._received[:NONCE_BYTES], self._received[NONCE_BYTES:]
        if not compare_digest(server_proof, make_proof(self._token, SERVER, self.nonce, server_nonce)):
            raise PermissionError("another program listens there (it does not know the job's token)")
        return make_proof(self._token, CLIENT, self.nonce, server_nonce)


class ServerHandshake:
    """The server's side. It stores at most a nonce and a proof of the client's bytes."""

    def __init__(self, token: str) -> None:
        self._token, self._nonce, self._received = token, b"", b""
        self.is_authenticated = False

    @property
    def missing_bytes(self) -> int:
        """How many bytes to read next."""
        return (PROOF_BYTES if self._nonce else NONCE_BYTES) - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Add a part of the client's message, and return the answer; raise PermissionError to reject it."""
        self._received += data
        if not data:
            raise PermissionError
        if self.missing_bytes:
            return b""
        if not self._nonce:
            self._client_nonce, self._nonce, self._received = self._received, os.urandom(NONCE_BYTES), b""
            return self._nonce + make_proof(self._token, SERVER, self._client_nonce, self._nonce)
        if not compare_digest(self._received, make_proof(self._token, CLIENT, self._client_nonce, self._nonce)):
            raise PermissionError
        self.is_authenticated = True
        return b""


def connect(address: tuple[str, int], token: str, connect_timeout_s: float, proof_timeout_s: float) -> socket.socket:
    """Return an authenticated connection to a server.

    Raises PermissionError if another program listens there, EOFError if it closes the connection, and another OSError
    if it cannot be reached or does not answer.
    """
    connection = socket.create_connection(address, timeout=connect_timeout_s)
    try:
        authenticate(connection, token, proof_timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def authenticate(connection: socket.socket, token: str, timeout_s: float) -> None:
    """Authenticate as the client on a new connection; raise what connect() does."""
    deadline = time.monotonic() + timeout_s
    handshake = ClientHandshake(token)
    connection.settimeout(timeout_s)
    connection.sendall(handshake.nonce)
    proof = b""
    while not proof:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        proof = handshake.feed(connection.recv(handshake.missing_bytes))
    connection.sendall(proof)


def make_proof(token: str, side: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof of one side."""
    import hmac  # not while the job starts: it loads OpenSSL

    return hmac.digest(token.encode(), side + client_nonce + server_nonce, "sha256")


class AuthListener:
    """Accepts connections, and hands over each one after authentication."""

    def __init__(self, loop: EventLoop, listener: socket.socket, token: str, ranks: int,
                 on_connection: Callable[[socket.socket], None]) -> None:
        """Accept at `listener`, for a job of `ranks`; `on_connection` gets each authenticated connection."""
        self._listener = listener
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop, self._token, self._on_connection = loop, token, on_connection
        self._max_pending = 2 * ranks + SPARE_CONNECTIONS
        self._pending: dict[socket.socket, ServerHandshake] = {}  # not authenticated yet, the longest silent first
        self._resume()

    def fileno(self) -> int:
        """Return the listening descriptor."""
        return self._listener.fileno()

    def close(self) -> None:
        """Stop accepting, and close pending connections."""
        self._loop.cancel_timers("accept")
        with contextlib.suppress(KeyError):  # while it pauses
            self._loop.unwatch(self._listener)
        for connection in list(self._pending):
            self._reject(connection)
        self._listener.close()

    def _resume(self) -> None:
        self._loop.watch(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(ACCEPTS_PER_EVENT):
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    raise
                except OSError:
                    if not self._pending:
                        self._pause()
                        return
                    self._make_room()
                else:
                    self._begin_handshake(connection)

    def _pause(self) -> None:
        """Wait until there may be a descriptor for one more connection."""
        self._loop.unwatch(self._listener)
        self._loop.set_timer("accept", RETRY_INTERVAL_S, self._resume)

    def _begin_handshake(self, connection: socket.socket) -> None:
        if len(self._pending) >= self._max_pending:
            self._make_room()
        connection.setblocking(False)
        self._pending[connection] = ServerHandshake(self._token)
        self._loop.watch(connection, partial(self._read, connection))
        self._set_timeout(connection)

    def _set_timeout(self, connection: socket.socket) -> None:
        self._loop.set_timer(timer_name(connection), HANDSHAKE_TIMEOUT_S, partial(self._reject, connection))

    def _make_room(self) -> None:
        """Reject the longest silent connection, unless reading completes the handshake of another one."""
        for connection in list(self._pending):
            if not self._read(connection):
                self._reject(connection)
            if connection not in self._pending:
                return
        self._reject(next(iter(self._pending)))

    def _read(self, connection: socket.socket) -> bool:
        """Continue a handshake; return whether data came, or the other end has closed."""
        handshake = self._pending[connection]
        try:
            if answer := handshake.feed(connection.recv(handshake.missing_bytes)):
                connection.send(answer)
                self._set_timeout(connection)  # restarted: this process may have been too busy to answer, or stopped
        except BlockingIOError:
            return False
        except OSError:
            self._reject(connection)
            return True
        if handshake.is_authenticated:
            self._forget(connection)
            self._on_connection(connection)
        else:
            self._pending[connection] = self._pending.pop(connection)  # now the least silent
        return True

    def _reject(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._loop.unwatch(connection)
        self._loop.cancel_timers(timer_name(connection))


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


def enable_keepalive(connection: socket.socket, may_stall: bool = False) -> None:
    """Make the kernels probe the connection from time to time, without waking a process.

    With `may_stall` the peer may read nothing for a long time, as an agent that is stopped: TCP_USER_TIMEOUT
    would end the connection, although the peer's kernel answers (tcp_probe_timer() in Linux).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, KEEPALIVE_INTERVAL_S), (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
                          (socket.TCP_KEEPCNT, KEEPALIVE_PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if not may_stall:
        timeout_ms = 1000 * KEEPALIVE_INTERVAL_S * (KEEPALIVE_PROBES + 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def timer_name(connection: socket.socket) -> str:
    """Return the name of a handshake's timer."""
    return f"handshake {connection.fileno()}"
