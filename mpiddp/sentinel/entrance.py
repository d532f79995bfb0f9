"""The ports of rank 0's sentinel. At the coordinator's, who shows the job's token comes in.

Nothing that a stranger sends is parsed or kept, nobody waits for a stranger, and many of them don't keep others out:
the one that has been silent for longest goes when there are too many.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from _operator import _compare_digest as compare_digest  # hmac's own, which would load OpenSSL too
from collections.abc import Callable
from functools import partial

from ..beside.messages import Coordinate, Hello, Join
from ..beside.ports import listen
from ..beside.wire import Wire
from ..plan.words import at_port
from .loop import Loop

SHOWING_S = 5.0  # for a stranger to show the token
PAUSE_S = 0.2  # where there is no descriptor for one more connection
CONNECTING_S, ATTEMPTS = 2.0, 3
CALLING_S = 60.0  # for another coordinator to take a call
SPARE = 64  # connections besides two for each rank
AT_ONCE = 64  # connections that are taken before others are heard again
PROBES, PROBE_S = 3, 15  # a peer of which nothing is heard for PROBE_S * (PROBES + 1) is lost (man 7 tcp)


class Entrance:
    """Listens on a port, and hands over each connection on which the token came first."""

    def __init__(
        self, loop: Loop, request: Coordinate, admit: Callable[[socket.socket], None], listener: int = -1
    ) -> None:
        """Listen where it is requested; `admit` is called with each connection from which the token was read.

        `listener` is a descriptor that listens there already, -1 for none.
        """
        self._listener = socket.socket(fileno=listener) if listener >= 0 else listen(request.address, request.port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop, self._token, self._admit = loop, request.token.encode(), admit
        self._most = 2 * request.ranks + SPARE
        self._strangers: dict[socket.socket, bytearray] = {}  # what they have shown, in the order in which they came
        self._open()

    def fileno(self) -> int:
        """Return the descriptor that listens."""
        return self._listener.fileno()

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
        self._strangers[stranger] = bytearray()
        self._loop.listen(stranger, partial(self._look_at, stranger))
        self._loop.set_timer(timer(stranger), SHOWING_S, partial(self._turn_away, stranger))

    def _make_room(self) -> None:
        """Let the stranger go that came first, unless it shows the token by now."""
        first = next(iter(self._strangers))
        self._look_at(first)
        if first in self._strangers:
            self._turn_away(first)

    def _look_at(self, stranger: socket.socket) -> None:
        """Read as many bytes as the token has, then compare them, in a time that does not depend on them."""
        shown = self._strangers[stranger]
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
        del self._strangers[stranger]
        self._loop.forget(stranger)
        self._loop.drop_timers(timer(stranger))


class Answering:
    """Listens on all addresses of this node, and answers each connection with a token, until it is closed."""

    def __init__(self, loop: Loop, token: str, port: int = 0) -> None:
        """Listen on `port`, 0 for a free one; raise OSError where that is not possible."""
        self._listener = listen("", port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop, self._token = loop, token.encode()
        loop.listen(self._listener, self._answer)

    def close(self) -> None:
        """Stop listening."""
        self._loop.forget(self._listener)
        self._listener.close()

    def _answer(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # nobody is there; or there is no descriptor for one more, or no network at the moment
                return
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(self._token)


class Dialling:
    """Connects a member's sentinel to the coordinator without waiting; who refuses is not there.

    At first there are three attempts. Where the coordinator was there before (`met`), it is called for a minute: its
    port may be full while rank 0 is too busy to start another one.
    """

    def __init__(self, loop: Loop, request: Join, met: bool, answer: Callable[[Wire | None, str], None]) -> None:
        """Call `answer` with the connection; with None, and the reason, where none could be made."""
        self._loop, self._request, self._answer = loop, request, answer
        self._left_s = CALLING_S if met else ATTEMPTS * (CONNECTING_S + PAUSE_S)
        self._connection: socket.socket | None = None

    def dial(self) -> None:
        """Try once, and later again if that fails."""
        address = self._request.address
        self._connection = one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        one.setblocking(False)
        error = one.connect_ex((address, self._request.port))
        if error not in (0, errno.EINPROGRESS):
            self._fail(os.strerror(error), error == errno.ECONNREFUSED)
            return
        self._loop.listen(one, self._look)
        self._loop.await_room(one)
        self._loop.set_timer("dial", CONNECTING_S, partial(self._give_up, "timed out"))

    def _look(self) -> None:
        """Take a connection that is made, or failed."""
        assert self._connection
        one, error = self._connection, self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._give_up(os.strerror(error), error == errno.ECONNREFUSED)
            return
        self._loop.forget(one)
        self._loop.drop_timers("dial")
        self._answer(greet(one, self._request), "")

    def _give_up(self, error: str, refused: bool = False) -> None:
        assert self._connection
        self._loop.forget(self._connection)
        self._loop.drop_timers("dial")
        self._left_s -= CONNECTING_S
        self._fail(error, refused)

    def _fail(self, error: str, refused: bool) -> None:
        assert self._connection
        self._connection.close()
        self._left_s -= PAUSE_S
        if self._left_s > 0 and not refused:
            self._loop.set_timer("dial", PAUSE_S, self.dial)
        else:
            where = at_port(self._request.address, self._request.port)
            self._answer(None, f"no connection to rank 0's sentinel at {where}: {error}")


def dial(request: Join) -> Wire:
    """Connect a member's sentinel to the coordinator; raise OSError if that fails."""
    return greet(socket.create_connection((request.address, request.port), timeout=CONNECTING_S), request)


def greet(connection: socket.socket, request: Join) -> Wire:
    """Say over a new connection whose sentinel this is."""
    keep_alive(connection)
    wire = Wire(connection)
    with contextlib.suppress(OSError):  # the next read tells
        connection.sendall(request.token.encode())  # before any message: it is compared before anything is parsed
    member = request.member
    wire.send(Hello(member.rank, member.host, member.pid, member.namespace))
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
