"""A connection that carries messages, over a stream socket."""

from __future__ import annotations

import os
import socket
import struct
import time

from ..sentinel.protocol import Message, Sent
from .codec import decode, encode

PATIENCE_S = 2.0  # for the other end to take a message
LONGEST_LINE = 2**20  # bytes
DESCRIPTORS = socket.CMSG_SPACE(16 * 4)  # bytes, for those that come with one read


class Wire:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._socket.settimeout(PATIENCE_S)
        self._begun = b""
        self._unsent = b""
        self._descriptors: list[int] = []  # that came with messages

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Sent, descriptor: int = -1) -> bool:
        """Send a message and tell whether the other end has taken it; between processes, with a descriptor.

        The other end always gets whole lines: the rest of one that it did not take in time is what is sent next.
        """
        line = encode(message) + b"\n"
        try:
            if not self._send_rest():
                return False
            sent = self._send(line) if descriptor < 0 else socket.send_fds(
                self._socket, [line], [descriptor], socket.MSG_NOSIGNAL)
            self._unsent = line[sent:]
            return self._send_rest()
        except OSError:
            return False

    def _send_rest(self) -> bool:
        """Send what is begun, and tell whether the other end has taken it in time; raise OSError if it is gone."""
        deadline = time.monotonic() + PATIENCE_S
        while self._unsent and time.monotonic() < deadline:
            self._unsent = self._unsent[self._send(self._unsent):]
        return not self._unsent

    def _send(self, data: bytes) -> int:
        """Send some of the data; where nobody is at the other end no signal comes: a script may let SIGPIPE end it."""
        return self._socket.send(data, socket.MSG_NOSIGNAL)

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
            data, others, _, _ = self._socket.recvmsg(65536, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data, others = b"", []
        finally:
            self._socket.settimeout(PATIENCE_S)
        for _, _, packed in others:
            self._descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
        if not data:
            raise EOFError
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > LONGEST_LINE:
            raise EOFError
        return [decode(line) for line in lines]

    def take_descriptor(self) -> int:
        """Return the descriptor that came last, which is the caller's then, and close others; -1 where none came."""
        found = self._descriptors.pop() if self._descriptors else -1
        self._close_descriptors()
        return found

    def shut_down(self) -> None:
        """Send no more; raise OSError if the other end is gone."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, and the descriptors that nobody took."""
        self._socket.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of an address, 0 for a free port; raise OSError where that can't be.

    With an empty address it listens on all that this node has.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    except (OSError, ValueError):  # a node without IPv6
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
