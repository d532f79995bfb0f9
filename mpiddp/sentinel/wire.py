"""A connection that carries messages, over a stream socket."""

from __future__ import annotations

import os
import socket

from .messages import Message, Sent, decode, encode

PATIENCE_S = 2.0  # for the other end to take a message
LONGEST_LINE = 2**20  # bytes


class Wire:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(PATIENCE_S)
        self._begun = b""
        self._unsent = b""

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Sent) -> bool:
        """Send a message and tell whether the other end is there to take it."""
        try:
            self._socket.sendall(encode(message) + b"\n")
        except OSError:
            return False
        return True

    def post(self, message: Sent) -> bool:
        """Send a message without waiting for the other end, and tell whether it is off; flush() sends what is not."""
        self._unsent += encode(message) + b"\n"
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent at once of what was posted, and tell whether nothing is left, or nobody there."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.fileno(), self._unsent):]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent = b""
        return True

    def receive(self, timeout_s: float = PATIENCE_S) -> list[Message]:
        """Return the messages of one read, which may be none.

        With `timeout_s` 0 it waits for nothing. Raises TimeoutError when nothing has come by then, EOFError when
        the other end is gone, and another OSError when it cannot be reached any more.
        """
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""
        finally:
            self._socket.settimeout(PATIENCE_S)
        if not data:
            raise EOFError
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST_LINE:
            raise EOFError
        return [decode(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
