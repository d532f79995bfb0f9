"""A connection that carries messages, over a stream socket."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Generic, TypeVar

from .codec import Codec, Text, Unreadable, encode

SEND_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 2**20
DESCRIPTORS_BYTES = socket.CMSG_SPACE(16 * 4)  # for the descriptors that come with one read

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Channel(Generic[Sent, Received]):
    """One end of a connection."""

    def __init__(self, sock: socket.socket, codec: Codec[Received]) -> None:
        self._socket, self._codec = sock, codec
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._partial_line = b""
        self._unsent = b""
        self._descriptors: list[int] = []  # received with messages

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Sent, descriptor: int = -1) -> bool:
        """Send a message, between processes with a descriptor; return whether the other end received it in time.

        The other end always gets whole lines: the rest of a line is sent before the next one.
        """
        line = encode(message) + b"\n"
        try:
            if not self._send_rest():
                return False
            sent_bytes = self._send(line) if descriptor < 0 else socket.send_fds(
                self._socket, [line], [descriptor], socket.MSG_NOSIGNAL)
            self._unsent = line[sent_bytes:]
            return self._send_rest()
        except OSError:
            return False

    def _send_rest(self) -> bool:
        """Send the rest, and return whether the other end received it in time; raise OSError if it has closed."""
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while self._unsent and time.monotonic() < deadline:
            self._unsent = self._unsent[self._send(self._unsent):]
        return not self._unsent

    def _send(self, data: bytes) -> int:
        """Send some of the data, without SIGPIPE: it would end a script that does not ignore it."""
        return self._socket.send(data, socket.MSG_NOSIGNAL)

    def enqueue(self, message: Sent) -> bool:
        """Send a message without waiting; return False if flush() has to send the rest."""
        self._unsent += encode(message) + b"\n"
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent at once; return whether nothing is left, or the other end has closed."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.fileno(), self._unsent):]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent = b""
        return True

    def receive(self, timeout_s: float = SEND_TIMEOUT_S) -> list[Received | Text | Unreadable]:
        """Return the messages of one read, which may be none.

        With `timeout_s` 0 it does not wait. Raises TimeoutError if nothing came in time, EOFError if the other end has
        closed, and another OSError if it cannot be reached any more.
        """
        self._socket.settimeout(timeout_s)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(65536, DESCRIPTORS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data, ancillary = b"", []
        finally:
            self._socket.settimeout(SEND_TIMEOUT_S)
        for _, _, packed in ancillary:
            self._descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
        if not data:
            raise EOFError
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:
            raise EOFError
        return [self._codec.decode(line) for line in lines]

    def take_descriptor(self) -> int:
        """Return the last received descriptor, for the caller to close, and close others; -1 if there is none."""
        descriptor = self._descriptors.pop() if self._descriptors else -1
        self._close_descriptors()
        return descriptor

    def shut_down(self) -> None:
        """Send no more; raise OSError if the other end has closed."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, and received descriptors that were not taken."""
        self._socket.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port of an address, 0 for a free port; raise OSError if that is impossible.

    With an empty address it listens on all addresses of this node.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    try:
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    except (OSError, ValueError):  # a node without IPv6
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
