"""Answers other nodes that probe the addresses of rank 0's node."""

from __future__ import annotations

import contextlib

from ..ipc.authentication import ACCEPTS_PER_EVENT
from ..ipc.channel import listen
from ..ipc.event_loop import EventLoop


class ProbeResponder:
    """Listens on all addresses of this node, and sends each connection a token, until it is closed.

    That token identifies rank 0's node, and opens nothing: the job's own is never sent.
    """

    def __init__(self, loop: EventLoop, token: str, port: int = 0) -> None:
        """Listen on `port`, 0 for a free one; raise OSError if that is impossible."""
        self._listener = listen("", port)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._loop, self._token = loop, token.encode()
        loop.watch(self._listener, self._respond)

    def close(self) -> None:
        """Stop listening."""
        self._loop.unwatch(self._listener)
        self._listener.close()

    def _respond(self) -> None:
        for _ in range(ACCEPTS_PER_EVENT):
            try:
                connection, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError:  # no connection is pending, no descriptor is left, or the network is down
                return
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)
                connection.send(self._token)
