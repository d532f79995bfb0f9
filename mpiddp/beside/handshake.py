"""How two processes of a job recognise each other on a connection: both prove that they know its token.

The client sends a nonce. The server answers with a nonce of its own and a proof; the client checks that before it
sends its own proof. So whoever has the port of a job that is over learns nothing. A proof is an HMAC of both nonces
(RFC 2104) with the token as its key. No I/O but in prove().
"""

from __future__ import annotations

import os
import socket
import time
from _operator import _compare_digest as compare_digest  # hmac's own, which would load OpenSSL too

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
