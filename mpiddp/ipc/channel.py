"""A connection that carries messages, over a stream socket.

A message is a frame: a header with two lengths, the message in JSON, its name and its fields,
{"Stage": {"name": "MPI_Init"}}, and a payload, the message's field of bytes if it has one. A file descriptor may come
beside a frame.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

SEND_TIMEOUT_S = 2.0
HEADER = struct.Struct("!II")  # the lengths of the JSON and of the payload
MAX_FRAME_BYTES = 2**24  # a snapshot of 10,000 ranks has some million
MAX_UNSENT_BYTES = MAX_FRAME_BYTES  # which enqueue() stores for a slow reader
IO_BYTES = 2**16  # of one read or write
DESCRIPTORS_BYTES = socket.CMSG_SPACE(16 * 4)  # for the descriptors that come with one read

Message = TypeVar("Message")
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class Unreadable(NamedTuple):
    """A frame that is no message of the channel, or one whose fields have wrong types."""

    error: str


class FieldTypes(NamedTuple):
    """The types that a field may have: those of plain values, and NamedTuples."""

    plain: tuple[type[Any], ...]
    nested: tuple[type[Any], ...]


class Codec(Generic[Message]):
    """Decodes the messages of a union of NamedTuples; their fields may be NamedTuples, too, and one may be bytes."""

    def __init__(self, union: Any) -> None:
        """Resolve all types now: a script may unload our modules later."""
        self._messages: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(union) or (union,)}
        self._fields: dict[type[Any], dict[str, FieldTypes]] = {}
        self._payloads: dict[type[Any], str] = {}  # the messages with a field of bytes
        for kind in self._messages.values():
            self._resolve(kind)

    def _resolve(self, kind: type[Any]) -> None:
        if kind in self._fields:
            return
        fields = self._fields[kind] = {}
        for name, hint in get_type_hints(kind).items():
            types = get_args(hint) or (hint,)
            nested = tuple(field_type for field_type in types if hasattr(field_type, "_fields"))
            plain = tuple(field_type for field_type in types if field_type not in nested)
            fields[name] = FieldTypes((*plain, int) if float in plain else plain, nested)
            if bytes in plain:
                self._payloads[kind] = name
            for field_type in nested:
                self._resolve(field_type)

    def decode(self, text: bytes, payload: bytes = b"") -> Message | Unreadable:
        """Return the message of a frame's JSON and payload; it never raises."""
        try:
            (name, fields), = json.loads(text.decode()).items()
            kind = self._messages[name]
        except (ValueError, KeyError, AttributeError, RecursionError):
            return Unreadable(f"unknown message {text[:100]!r}")
        try:
            if kind in self._payloads:
                fields[self._payloads[kind]] = payload
            message: Message = self._rebuild(fields, FieldTypes((), (kind,)))
        except (TypeError, KeyError) as error:
            return Unreadable(f"{name}: {error}")
        return message

    def _rebuild(self, value: object, types: FieldTypes) -> Any:
        """Return what to_json() made `value` of, if that has one of `types`; else raise TypeError or KeyError."""
        if isinstance(value, types.plain):
            return value
        if isinstance(value, dict):
            for kind in types.nested:
                fields = self._fields[kind]
                return kind(**{name: self._rebuild(item, fields[name]) for name, item in value.items()})
        expected = " or ".join(kind.__name__ for kind in (*types.nested, *types.plain))
        raise TypeError(f"expected {expected}, got {type(value).__name__}")


def encode(message: Any) -> bytes:
    """Return a NamedTuple as a frame."""
    fields = to_json(message)
    payload = b"".join([fields.pop(name) for name, value in message._asdict().items() if isinstance(value, bytes)])
    text = json.dumps({type(message).__name__: fields}).encode()
    return HEADER.pack(len(text), len(payload)) + text + payload


def to_json(value: Any) -> Any:
    """Return a field's value as JSON has it: NamedTuples as objects."""
    if hasattr(value, "_asdict"):
        return {name: to_json(field) for name, field in value._asdict().items()}
    return value


class FrameReader(Generic[Message]):
    """Puts the bytes of a stream together to messages."""

    def __init__(self, codec: Codec[Message]) -> None:
        self._codec = codec
        self._received = bytearray()  # of a frame that is not complete

    def feed(self, data: bytes) -> list[Message | Unreadable]:
        """Return the messages that `data` completes; raise OSError if a frame is too long."""
        self._received += data
        messages: list[Message | Unreadable] = []
        start = 0
        with memoryview(self._received) as received:
            while len(received) - start >= HEADER.size:
                text_bytes, payload_bytes = HEADER.unpack_from(received, start)
                text = start + HEADER.size
                payload = text + text_bytes
                end = payload + payload_bytes
                if end - start > MAX_FRAME_BYTES:
                    raise OSError(errno.EMSGSIZE, f"received a message of {end - start} bytes, more than the "
                                  f"{MAX_FRAME_BYTES} allowed")
                if end > len(received):
                    break
                messages.append(self._codec.decode(bytes(received[text:payload]), bytes(received[payload:end])))
                start = end
        del self._received[:start]
        return messages


class Channel(Generic[Sent, Received]):
    """One end of a connection.

    Any thread may send and receive, and so may the handler of a signal, also one that interrupts send(). If it
    interrupts receive(), it receives nothing before that returns.
    """

    def __init__(self, sock: socket.socket, codec: Codec[Received]) -> None:
        self._socket, self._reader = sock, FrameReader(codec)
        self._socket.setblocking(False)
        self._sending, self._receiving = threading.RLock(), threading.Lock()
        self._unsent = bytearray()
        self._descriptors: deque[int] = deque()  # received with messages
        self._error: OSError | None = None  # by which the connection was lost
        self._unreachable: OSError | None = None  # the same, as a send has found it

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Sent, descriptor: int = -1) -> bool:
        """Send a message, between processes with a descriptor; return whether the socket has accepted it in time.

        The other end always gets whole messages: the rest of one is sent before the next one.
        """
        frame, deadline = encode(message), time.monotonic() + SEND_TIMEOUT_S
        if len(frame) > MAX_FRAME_BYTES or not self._sending.acquire(timeout=SEND_TIMEOUT_S):
            return False
        try:
            return (self._send_unsent(deadline)
                    and self._await_room(lambda: self._send_frame(frame, descriptor), deadline)
                    and self._send_unsent(deadline))
        except OSError:
            return False
        finally:
            self._sending.release()

    def _send_unsent(self, deadline: float) -> bool:
        """Send the rest of earlier messages; return False at the deadline."""
        while self._unsent:
            if not self._await_room(self._send_some, deadline):
                return False
        return True

    def _await_room(self, send: Callable[[], object], deadline: float) -> bool:
        """Call `send` as soon as the socket has room; return False at the deadline."""
        while True:
            try:
                send()
            except BlockingIOError:
                if not self._poll(select.POLLOUT, deadline):
                    return False
            else:
                return True

    def _poll(self, event: int, deadline: float) -> bool:
        """Wait for an event of the socket; return False at the deadline."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))

    def _send_frame(self, frame: bytes, descriptor: int) -> None:
        """Send what the socket accepts, without SIGPIPE: it would end a script that does not ignore it."""
        sent_bytes = (self._socket.send(frame, socket.MSG_NOSIGNAL) if descriptor < 0 else
                      socket.send_fds(self._socket, [frame], [descriptor], socket.MSG_NOSIGNAL))
        self._unsent += frame[sent_bytes:]

    def _send_some(self) -> None:
        """Send some of what is unsent."""
        sent_bytes = self._socket.send(self._unsent[:IO_BYTES], socket.MSG_NOSIGNAL)
        del self._unsent[:sent_bytes]

    def enqueue(self, message: Sent) -> bool:
        """Send a message without waiting; return False if flush() has to send the rest.

        If the other end reads too slowly for MAX_UNSENT_BYTES, the connection is lost: the next receive() raises that.
        """
        frame = encode(message)
        unsent_bytes = len(self._unsent) + len(frame)
        if unsent_bytes > MAX_UNSENT_BYTES:
            self._error = OSError(errno.ENOBUFS, f"it reads too slowly: {unsent_bytes} bytes are unsent, more than the "
                                  f"{MAX_UNSENT_BYTES} allowed")
            self._unsent.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which an event loop notices
            return True
        self._unsent += frame
        return self.flush()

    def flush(self) -> bool:
        """Send what can be sent at once; return whether nothing is left, or the other end has closed."""
        try:
            while self._unsent:
                self._send_some()
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):  # the next receive() raises, too
            self._unsent.clear()
        except OSError as error:  # which the kernel reports once
            self._unsent.clear()
            self._unreachable = error
        return True

    def receive(self, timeout_s: float = SEND_TIMEOUT_S) -> list[Received | Unreadable]:
        """Return the messages that have come, at least one; with `timeout_s` 0 it does not wait, and may return none.

        Raises TimeoutError if none came in time, EOFError if the other end has closed, and another OSError if it cannot
        be reached any more, or a message is too long.
        """
        deadline = time.monotonic() + timeout_s
        while self._receiving.acquire(timeout=max(0.0, deadline - time.monotonic())):
            try:
                while not (messages := self._read()):
                    pass
                return messages
            except BlockingIOError:
                pass
            finally:
                self._receiving.release()
            if not self._poll(select.POLLIN, deadline):
                break
        if timeout_s:
            raise TimeoutError
        return []

    def _read(self) -> list[Received | Unreadable]:
        """Return the messages of one read; raise BlockingIOError if there is nothing to read."""
        if self._error is not None:
            raise self._error
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(IO_BYTES, DESCRIPTORS_BYTES, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            raise EOFError from None
        for _, _, packed in ancillary:
            self._descriptors += struct.unpack(f"{len(packed) // 4}i", packed)
        if flags & socket.MSG_CTRUNC:  # this process has no descriptor left
            self._descriptors.append(-1)
        if not data:
            raise self._unreachable or EOFError
        return self._reader.feed(data)

    def take_descriptor(self) -> int:
        """Return the next received descriptor, for the caller to close; -1 if there is none.

        They come in the order of their messages; the receiver of a message that carries one has to take it.
        """
        return self._descriptors.popleft() if self._descriptors else -1

    def close(self) -> None:
        """Close the connection, and received descriptors that were not taken."""
        self._socket.close()
        while self._descriptors:
            if (descriptor := self._descriptors.popleft()) >= 0:
                os.close(descriptor)


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
