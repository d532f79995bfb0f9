"""A port of a helper process. A connection is let in when both ends have proved that they know the job's token."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from _operator import _compare_digest as compare_digest  # hmac's own, which would load OpenSSL too
from collections.abc import Callable
from functools import partial

from ..sentinel.protocol import Coordinate
from .channel import listen
from .event_loop import Loop

NONCE_BYTES = 16
PROOF_BYTES = 32  # of SHA-256
CLIENT, SERVER = b"client", b"server"  # whose proof it is: nobody can send one back that it has got


class Challenge:
    """The client's side: `nonce` is sent first."""

    def __init__(self, token: str) -> None:
        self._token, self._read = token, b""
        self.nonce = os.urandom(NONCE_BYTES)

    @property
    def missing(self) -> int:
        """How many bytes of the server's answer have not come yet."""
        return NONCE_BYTES + PROOF_BYTES - len(self._read)

    def take(self, data: bytes) -> bytes:
        """Take a part of the answer, and return the client's proof when it is whole, nothing before.

        Raises EOFError where the server has hung up, which `data` without bytes says, PermissionError where it does not
        know the token.
        """
        if not data:
            raise EOFError
        self._read += data
        if self.missing:
            return b""
        other, shown = self._read[:NONCE_BYTES], self._read[NONCE_BYTES:]
        if not compare_digest(shown, proof(self._token, SERVER, self.nonce, other)):
            raise PermissionError("another program listens there: it does not know the job's token")
        return proof(self._token, CLIENT, self.nonce, other)


class Response:
    """The server's side. It keeps as many bytes of the client's as a nonce and a proof have."""

    def __init__(self, token: str) -> None:
        self._token, self._nonce, self._read = token, b"", b""
        self.passed = False  # the client knows the token

    @property
    def missing(self) -> int:
        """How many bytes are to be read next."""
        return (PROOF_BYTES if self._nonce else NONCE_BYTES) - len(self._read)

    def take(self, data: bytes) -> bytes:
        """Take a part of what the client sends, and return what to answer; raise PermissionError for a stranger."""
        self._read += data
        if not data:
            raise PermissionError
        if self.missing:
            return b""
        if not self._nonce:
            self._client, self._nonce, self._read = self._read, os.urandom(NONCE_BYTES), b""
            return self._nonce + proof(self._token, SERVER, self._client, self._nonce)
        if not compare_digest(self._read, proof(self._token, CLIENT, self._client, self._nonce)):
            raise PermissionError
        self.passed = True
        return b""


def connect(address: tuple[str, int], token: str, connecting_s: float, proving_s: float) -> socket.socket:
    """Return a connection to a server that has proved to know the token.

    Raises PermissionError where another program listens there, EOFError where it hangs up, and another OSError where it
    cannot be reached or does not answer.
    """
    connection = socket.create_connection(address, timeout=connecting_s)
    try:
        prove(connection, token, proving_s)
    except BaseException:
        connection.close()
        raise
    return connection


def prove(connection: socket.socket, token: str, timeout_s: float) -> None:
    """Be the client on a new connection; raise what connect() does."""
    deadline = time.monotonic() + timeout_s
    challenge = Challenge(token)
    connection.settimeout(timeout_s)
    connection.sendall(challenge.nonce)
    shown = b""
    while not shown:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        shown = challenge.take(connection.recv(challenge.missing))
    connection.sendall(shown)


def proof(token: str, side: bytes, client: bytes, server: bytes) -> bytes:
    """Return the proof of one side, for the nonces of both."""
    import hmac  # not while the job starts: it loads OpenSSL

    return hmac.digest(token.encode(), side + client + server, "sha256")


SHOWING_S = 5.0  # for a stranger to say something, and to prove that it knows the token when it has got an answer
PAUSE_S = 0.2  # where there is no descriptor for one more connection
SPARE = 64  # connections besides two for each rank
AT_ONCE = 64  # connections that are taken before others are heard again
PROBES, PROBE_S = 3, 15  # a peer of which nothing is heard for PROBE_S * (PROBES + 1) is lost (man 7 tcp)


class Entrance:
    """Listens on a port, and hands over each connection whose other end knows the token, as handshake.py has it."""

    def __init__(
        self, loop: Loop, request: Coordinate, admit: Callable[[socket.socket], None], listener: int = -1
    ) -> None:
        """Listen where it is requested; `admit` is called with each connection that is let in.

        `listener` is a descriptor that listens there already, -1 for none.
        """
        self._listener = socket.socket(fileno=listener) if listener >= 0 else listen(request.address, request.port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop, self._token, self._admit = loop, request.token, admit
        self._most = 2 * request.ranks + SPARE
        self._strangers: dict[socket.socket, Response] = {}  # the one that has been silent for longest first
        self._open()

    def fileno(self) -> int:
        """Return the descriptor that listens."""
        return self._listener.fileno()

    def close(self) -> None:
        """Let nobody in any more."""
        self._loop.drop_timers("entrance")
        with contextlib.suppress(KeyError):  # while it pauses
            self._loop.forget(self._listener)
        for stranger in list(self._strangers):
            self._turn_away(stranger)
        self._listener.close()

    def _open(self) -> None:
        self._loop.listen(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                try:
                    stranger, _ = self._listener.accept()
                except BlockingIOError:
                    raise
                except OSError:
                    if not self._strangers:
                        self._pause()
                        return
                    self._make_room()
                else:
                    self._receive(stranger)

    def _pause(self) -> None:
        """Wait until there may be a descriptor for one more connection."""
        self._loop.forget(self._listener)
        self._loop.set_timer("entrance", PAUSE_S, self._open)

    def _receive(self, stranger: socket.socket) -> None:
        if len(self._strangers) >= self._most:
            self._make_room()
        stranger.setblocking(False)
        self._strangers[stranger] = Response(self._token)
        self._loop.listen(stranger, partial(self._look_at, stranger))
        self._await(stranger)

    def _await(self, stranger: socket.socket) -> None:
        """Turn a stranger away if it has not come in after SHOWING_S from now."""
        self._loop.set_timer(timer(stranger), SHOWING_S, partial(self._turn_away, stranger))

    def _make_room(self) -> None:
        """Let the stranger go that has been silent for longest, unless one of them comes in or is turned away now."""
        for stranger in list(self._strangers):
            if not self._look_at(stranger):
                self._turn_away(stranger)
            if stranger not in self._strangers:
                return
        self._turn_away(next(iter(self._strangers)))

    def _look_at(self, stranger: socket.socket) -> bool:
        """Go on with a stranger's handshake; tell whether it has said something, or has hung up."""
        response = self._strangers[stranger]
        try:
            if answer := response.take(stranger.recv(response.missing)):
                stranger.send(answer)
                self._await(stranger)  # which could not go on while this process was too busy to answer, or stopped
        except BlockingIOError:
            return False
        except OSError:
            self._turn_away(stranger)
            return True
        if response.passed:
            self._forget(stranger)
            self._admit(stranger)
        else:
            self._strangers[stranger] = self._strangers.pop(stranger)  # the last one that has spoken
        return True

    def _turn_away(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._loop.forget(stranger)
        self._loop.drop_timers(timer(stranger))


def keep_alive(connection: socket.socket) -> None:
    """Let the kernels ask each other from time to time whether they are there; no process wakes for it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, PROBE_S), (socket.TCP_KEEPINTVL, PROBE_S),
                          (socket.TCP_KEEPCNT, PROBES), (socket.TCP_USER_TIMEOUT, 1000 * PROBE_S * (PROBES + 1))):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def timer(stranger: socket.socket) -> str:
    """Return the name of a stranger's timer."""
    return f"stranger {stranger.fileno()}"
