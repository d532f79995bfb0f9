"""A connection that carries messages, over a stream socket.

A message is a line of JSON, its name and its fields: {"Stage": {"name": "MPI_Init"}}.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

SEND_TIMEOUT_S = 2.0
MAX_LINE_BYTES = 2**20
DESCRIPTORS_BYTES = socket.CMSG_SPACE(16 * 4)  # for the descriptors that come with one read

Message = TypeVar("Message")
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Text(NamedTuple):
    """A line that is no message of the channel."""

    line: str


class Unreadable(NamedTuple):
    """A message whose fields have wrong types."""

    error: str


class Codec(Generic[Message]):
    """Decodes the messages of a union of NamedTuples; their fields may be NamedTuples, too."""

    def __init__(self, union: Any) -> None:
        """Resolve all types now: a script may unload our modules later."""
        self._messages: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(union) or (union,)}
        self._fields: dict[type[Any], dict[str, tuple[Any, ...]]] = {}  # the types that each field may have
        for kind in self._messages.values():
            self._resolve(kind)

    def _resolve(self, kind: type[Any]) -> None:
        if kind in self._fields:
            return
        fields = self._fields[kind] = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
        for field_types in fields.values():
            for field_type in field_types:
                if hasattr(field_type, "_fields"):
                    self._resolve(field_type)

    def decode(self, line: bytes) -> Message | Text | Unreadable:
        """Return the message of a line; it never raises."""
        if line.startswith(b"{"):
            try:
                (name, fields), = json.loads(line).items()
                kind = self._messages[name]
            except (ValueError, KeyError, RecursionError):
                pass
            else:
                try:
                    message: Message = self._rebuild(fields, (kind,))
                    return message
                except (TypeError, KeyError) as error:
                    return Unreadable(f"{name}: {error}")
        return Text(line.decode(errors="replace"))

    def _rebuild(self, value: object, types: tuple[Any, ...]) -> Any:
        """Return what to_json() made `value` of, if that has one of `types`; else raise TypeError or KeyError."""
        for kind in types:
            if hasattr(kind, "_fields") and isinstance(value, dict):
                fields = self._fields[kind]
                return kind(**{name: self._rebuild(item, fields[name]) for name, item in value.items()})
            if isinstance(value, (int, float) if kind is float else kind):
                return value
        raise TypeError(f"expected {' or '.join(kind.__name__ for kind in types)}, got {type(value).__name__}")


def encode(message: Any) -> bytes:
    """Return a NamedTuple as a line, without its newline."""
    return json.dumps({type(message).__name__: to_json(message)}).encode()


def to_json(value: Any) -> Any:
    """Return a field's value as JSON has it: NamedTuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: to_json(field) for name, field in value._asdict().items()}
    return value


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
