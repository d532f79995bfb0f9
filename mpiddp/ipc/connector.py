"""Calls between nodes: rank 0's sentinel answers those that try its addresses, and the others call the coordinator."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from functools import partial

from ..base.text import format_address
from ..sentinel.protocol import Hello, Join
from .channel import Wire, listen
from .event_loop import Loop
from .listener import AT_ONCE, PAUSE_S, Challenge, keep_alive

CONNECTING_S, ATTEMPTS = 2.0, 3
ROOM_S = 30.0  # between two calls to a port that has no room
CALLING_S = 60.0  # for the coordinator to answer on a connection: its node may be busy


class Answering:
    """Listens on all addresses of this node, and answers each connection with a token, until it is closed.

    That token is a name by which rank 0's node is known, and opens nothing: the job's own is shown to nobody.
    """

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
    """Connects a member's sentinel to the coordinator without waiting, in three attempts; who refuses is not there."""

    def __init__(self, loop: Loop, request: Join, answer: Callable[[socket.socket | None, str], None]) -> None:
        """Call `answer` with the connection; with None, and the reason, where none could be made."""
        self._loop, self._request, self._answer = loop, request, answer
        self._left_s = ATTEMPTS * (CONNECTING_S + PAUSE_S)
        self._connection: socket.socket | None = None

    def dial(self) -> None:
        """Try once, and later again if that fails."""
        address, self._challenge = self._request.address, Challenge(self._request.token)
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
        self._loop.listen(one, self._read)
        self._loop.set_timer("dial", CALLING_S, partial(self._give_up, "no answer"))
        with contextlib.suppress(OSError):  # the next read tells
            one.send(self._challenge.nonce)

    def _read(self) -> None:
        """Take the coordinator's proof, and send ours."""
        assert self._connection
        try:
            shown = self._challenge.take(self._connection.recv(self._challenge.missing))
            if shown:
                self._connection.send(shown)
        except BlockingIOError:
            return
        except EOFError:  # strangers may have crowded this one out
            self._give_up("it has hung up")
            return
        except OSError as error:
            self._give_up(error.strerror or str(error), isinstance(error, PermissionError))
            return
        if shown:
            self._loop.forget(self._connection)
            self._loop.drop_timers("dial")
            self._answer(self._connection, "")

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
            where = format_address(self._request.address, self._request.port)
            self._answer(None, f"no connection to rank 0's sentinel at {where}: {error}")


def watch_rank_0(loop: Loop, request: Join, on_end: Callable[[bool], None]) -> None:
    """Call `on_end` when rank 0 has ended, whose sentinel was killed; with False where its node cannot be reached.

    Rank 0 has the coordinator's port, too. Its kernel makes a connection to that, which nobody takes, and ends it with
    rank 0.
    """
    def look() -> None:
        loop.forget(connection)
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        connection.close()
        on_end(error in (0, errno.ECONNRESET))

    try:
        connection = socket.create_connection((request.address, request.port), CONNECTING_S)
        keep_alive(connection)
    except TimeoutError:  # the port has no room for thousands
        loop.set_timer("rank 0", ROOM_S, partial(watch_rank_0, loop, request, on_end))
    except OSError as error:
        on_end(isinstance(error, ConnectionRefusedError))
    else:
        loop.listen(connection, look)


def greet(connection: socket.socket, request: Join) -> Wire:
    """Say over a new connection whose sentinel this is."""
    with contextlib.suppress(OSError):  # the next read tells
        keep_alive(connection)
    wire = Wire(connection)
    member = request.member
    wire.send(Hello(member.rank, member.host, member.pid, member.namespace))
    return wire
