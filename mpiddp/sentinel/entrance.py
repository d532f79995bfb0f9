"""The coordinator's port: who shows the job's token comes in.

Nothing that a stranger sends is parsed or kept, and nobody waits for a stranger.
"""

from __future__ import annotations

import contextlib
import socket
from _operator import _compare_digest as compare_digest  # hmac's own, which would load OpenSSL too
from collections.abc import Callable
from functools import partial

from ..plan.member import Member
from .loop import Loop
from .messages import Hello
from .wire import Wire

SHOWING_S = 5.0  # for a stranger to show the token
PAUSE_S = 0.2  # where there is no descriptor for one more connection
CONNECTING_S = 5.0
PROBES, PROBE_S = 3, 15  # a peer of which nothing is heard for PROBE_S * (PROBES + 1) is lost (man 7 tcp)


class Entrance:
    """Listens on a port, and hands over each connection on which the token came first."""

    def __init__(self, loop: Loop, address: str, token: str, admit: Callable[[socket.socket], None]) -> None:
        """Listen on `address`; `admit` is called with each connection from which the token was read."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop, self._token, self._admit = loop, token.encode(), admit
        self._open()

    def _open(self) -> None:
        self._loop.listen(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            stranger, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            self._loop.forget(self._listener)
            self._loop.set_timer("entrance", PAUSE_S, self._open)
            return
        stranger.setblocking(False)
        self._loop.listen(stranger, partial(self._look_at, stranger, bytearray()))
        self._loop.set_timer(timer(stranger), SHOWING_S, partial(self._turn_away, stranger))

    def _look_at(self, stranger: socket.socket, shown: bytearray) -> None:
        """Read as many bytes as the token has, then compare them, in a time that does not depend on them."""
        try:
            data = stranger.recv(len(self._token) - len(shown))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        shown += data
        if data and len(shown) < len(self._token):
            return
        if compare_digest(shown, self._token):
            self._forget(stranger)
            self._admit(stranger)
        else:
            self._turn_away(stranger)

    def _turn_away(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        stranger.close()

    def _forget(self, stranger: socket.socket) -> None:
        self._loop.forget(stranger)
        self._loop.drop_timers(timer(stranger))


def dial(address: str, port: int, token: str, member: Member) -> Wire | None:
    """Connect a member's sentinel to the coordinator, and return None if that fails."""
    try:
        connection = socket.create_connection((address, port), timeout=CONNECTING_S)
    except OSError:
        return None
    keep_alive(connection)
    wire = Wire(connection)
    with contextlib.suppress(OSError):
        connection.sendall(token.encode())  # before any message: it is compared before anything is parsed
    wire.send(Hello(member.rank, member.host, member.pid))
    return wire


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
