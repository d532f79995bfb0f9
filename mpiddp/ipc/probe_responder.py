"""Answers nodes that probe the addresses of this one."""

from __future__ import annotations

import contextlib

from .authentication import ACCEPTS_PER_EVENT
from .channel import listen


class ProbeResponder:
    """Listens on all addresses of this node, and sends a token to each connection, until it is closed.

    The token identifies this node, and opens nothing: the job's own is never sent.
    """

    def __init__(self, token: str, port: int = 0) -> None:
        """Listen on `port`, 0 for a free one; raise OSError if that is impossible."""
        self._listener, self._token = listen("", port), token.encode()
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    def fileno(self) -> int:
        """Return the descriptor that is readable when connections are pending."""
        return self._listener.fileno()

    def respond(self) -> None:
        """Answer the connections that are pending."""
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

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
