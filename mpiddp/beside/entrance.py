"""A port of a process beside a rank: who proves to know the job's token comes in.

Nothing that a stranger sends is parsed, nobody waits for a stranger, and many of them don't keep others out: the one
that has been silent for longest goes when there are too many.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from functools import partial

from .handshake import Response
from .loop import Loop
from .messages import Coordinate
from .wire import listen

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
