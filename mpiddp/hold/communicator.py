"""The communicator of a run's ranks (base/communicator.py), over sockets: every rank is connected to rank 0.

Rank 0 makes progress with what the others wait for only in its own calls, as MPI does.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..base.errors import LocalLaunchError
from ..base.termination import hard_exit
from ..base.text import format_ranges
from ..ipc.authentication import (
    CONNECT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    SERVER_PROOF_TIMEOUT_S,
    ServerHandshake,
    connect,
)

HEADER = struct.Struct("!I")
RANK = struct.Struct("!I")
READ_BYTES = 2**18
SEND_TIMEOUT_S = 60.0  # for a rank to read what it waits for
POLL_S = 0.002  # of a look for messages, for which a rank waits


class Meeting(NamedTuple):
    """Where the ranks of a run meet, and what the hold knows of this one: `lowest` is the lowest rank on its node."""

    rank: int
    size: int
    lowest: int
    is_one_node: bool
    library: str
    address: str
    port: int
    token: str


class Pending:
    """A request: complete when its function says so."""

    def __init__(self, is_complete: Callable[[], bool]) -> None:
        self._is_complete = is_complete

    def Test(self) -> bool:  # noqa: N802 (mpi4py's name)
        """Return whether it is complete."""
        return self._is_complete()

    def wait(self) -> None:
        """Return when it is complete."""
        while not self._is_complete():
            time.sleep(POLL_S / 10)


class Links:
    """The connections of this rank: rank 0's to all others, or another rank's to rank 0."""

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self.groups = 0  # communicators made so far
        self.messages: dict[int, list[tuple[int, Any]]] = {}  # by communicator: senders and contents
        self.results: dict[tuple[int, int], int] = {}  # of reductions, by communicator and number
        self._values: dict[tuple[int, int], list[int]] = {}  # which rank 0 has received
        self._sockets = sockets
        self._received = {peer: bytearray() for peer in sockets}
        self._poll = select.poll()
        for sock in sockets.values():
            sock.settimeout(SEND_TIMEOUT_S)
            self._poll.register(sock, select.POLLIN)
        self._peers = {sock.fileno(): peer for peer, sock in sockets.items()}

    @property
    def is_connected(self) -> bool:
        """Whether any other rank can still be reached, if there is one."""
        return bool(self._sockets) or self.size == 1

    def send(self, rank: int, item: object) -> None:
        """Send an item to a rank; one that has ended, or takes nothing within SEND_TIMEOUT_S, gets nothing more."""
        data = pickle.dumps(item)
        try:
            self._sockets[rank].sendall(HEADER.pack(len(data)) + data, socket.MSG_NOSIGNAL)
        except OSError:
            self._drop(rank)

    def advance(self, wait_s: float = 0.0) -> None:
        """Take what has come; wait for something."""
        for descriptor, _ in self._poll.poll(1000 * wait_s):
            peer = self._peers[descriptor]
            try:
                data = self._sockets[peer].recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:  # it has ended, and the agents will say so
                self._drop(peer)
                continue
            received = self._received[peer]
            received += data
            while (end := frame_end(received)) <= len(received):
                item = pickle.loads(received[HEADER.size:end])  # noqa: S301 (of a rank that knows the token)
                del received[:end]
                self._take(peer, *item)

    def reduce(self, group: int, number: int, value: int) -> None:
        """Give this rank's value to a reduction."""
        if self.rank:
            self.send(0, (group, number, value))
        else:
            self._take_value(group, number, value)

    def close(self) -> None:
        """Close all connections."""
        for peer in list(self._sockets):
            self._drop(peer)

    def _take(self, peer: int, group: int, number: int, content: Any) -> None:
        if number < 0:
            self.messages.setdefault(group, []).append((peer, content))
        elif self.rank:
            self.results[group, number] = content
        else:
            self._take_value(group, number, content)

    def _take_value(self, group: int, number: int, value: int) -> None:
        values = self._values.setdefault((group, number), [])
        values.append(value)
        if len(values) == self.size:
            self.results[group, number] = max(self._values.pop((group, number)))
            for peer in list(self._sockets):
                self.send(peer, (group, number, self.results[group, number]))

    def _drop(self, peer: int) -> None:
        if (sock := self._sockets.pop(peer, None)) is not None:
            self._poll.unregister(sock)
            sock.close()


def frame_end(received: bytearray) -> int:
    """Return where the first frame ends of what has come, also if that is not all of it."""
    return HEADER.size + (HEADER.unpack_from(received)[0] if len(received) >= HEADER.size else 0)


class SocketCommunicator:
    """The ranks of a run, and messages between them."""

    def __init__(self, links: Links, meeting: Meeting) -> None:
        self.rank, self.size, self.library = meeting.rank, meeting.size, meeting.library
        self.is_finalized = False
        self._links, self._meeting = links, meeting
        self._group, links.groups = links.groups, links.groups + 1
        self._reductions = 0

    def duplicate(self) -> SocketCommunicator:
        """Return a communicator with the same ranks, whose messages never meet this one's. Collective."""
        return SocketCommunicator(self._links, self._meeting)

    def send(self, content: object, rank: int, until_received: bool = False) -> Pending:  # noqa: ARG002
        """Send an object to a rank; it is on its way then, and nothing tells when it is received."""
        self._links.send(rank, (self._group, -1, content))
        return Pending(lambda: True)

    def receive(self, rank: int | None = None) -> tuple[int, Any] | None:
        """Return the sender and the content of a message from a rank, or from any; None if none has come."""
        waiting = self._links.messages.setdefault(self._group, [])
        if not waiting:
            self._links.advance(POLL_S)
        first = next((message for message in waiting if rank in (None, message[0])), None)
        if first is not None:
            waiting.remove(first)
        return first

    def start_barrier(self) -> Pending:
        """Return what is complete when all ranks have called this."""
        return self._start_reduction(0)[1]

    def make_reduction(self) -> SocketReduction:
        """Return reductions over the ranks."""
        return SocketReduction(self.duplicate())

    def find_node(self) -> tuple[int, bool]:
        """Return the lowest rank on this node, and whether all ranks are on it."""
        return self._meeting.lowest, self._meeting.is_one_node

    def free(self) -> None:
        """Free nothing."""

    def finalize(self) -> None:
        """End the communication of all ranks. Collective."""
        self.start_barrier().wait()
        self._links.close()
        self.is_finalized = True

    def abort(self, status: int, reason_printed: bool = True) -> NoReturn:  # noqa: ARG002
        """End this rank; its agent, and the hold, end the others."""
        hard_exit(status)

    def _start_reduction(self, value: int) -> tuple[int, Pending]:
        number, self._reductions = self._reductions, self._reductions + 1
        self._links.reduce(self._group, number, value)

        def is_complete() -> bool:
            if (self._group, number) not in self._links.results:
                self._links.advance()
                if not self._links.is_connected:
                    raise ConnectionError("lost the connection to the other ranks of the run")
            return (self._group, number) in self._links.results

        return number, Pending(is_complete)


class SocketReduction:
    """Reductions over the ranks of a run."""

    def __init__(self, ranks: SocketCommunicator) -> None:
        self._ranks, self._number = ranks, -1

    @property
    def result(self) -> int:
        """The largest of the ranks' values, once the request is complete."""
        return self._ranks._links.results[self._ranks._group, self._number]

    def start(self, value: int) -> Pending:
        """Start the next one with this rank's value, at least 0. Collective, but it does not wait."""
        self._ranks._links.results.pop((self._ranks._group, self._number), None)
        self._number, request = self._ranks._start_reduction(value)
        return request

    def free(self) -> None:
        """Free nothing."""


def meet(meeting: Meeting, listener: socket.socket | None, timeout_s: float) -> SocketCommunicator:
    """Return the communicator of a run's ranks; rank 0 has the listener. Raises LocalLaunchError."""
    deadline = time.monotonic() + timeout_s
    sockets: dict[int, socket.socket] = {}
    try:
        if listener is None:
            server = meeting.address, meeting.port
            sockets[0] = connect(server, meeting.token, CONNECT_TIMEOUT_S, SERVER_PROOF_TIMEOUT_S)
            sockets[0].sendall(RANK.pack(meeting.rank))
        while listener is not None and len(sockets) < meeting.size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            connection, _ = listener.accept()
            rank = admit(connection, meeting.token)
            if 0 < rank < meeting.size and rank not in sockets:
                sockets[rank] = connection
            else:
                connection.close()
    except (OSError, EOFError) as error:
        absent = format_ranges(sorted(range(1, meeting.size) - sockets.keys())) if listener is not None else "0"
        raise LocalLaunchError(
            "startup-timeout",
            actual=f"rank {meeting.rank} of the run did not meet rank {absent}: {error or 'it has ended'}",
            needed="all ranks of the run", do="start the script again; if that fails, end the hold and start another",
        ) from None
    if listener is not None:
        listener.close()
    for sock in sockets.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return SocketCommunicator(Links(meeting.rank, meeting.size, sockets), meeting)


def admit(connection: socket.socket, token: str) -> int:
    """Return the rank that has connected, -1 for a stranger."""
    handshake, deadline = ServerHandshake(token), time.monotonic() + HANDSHAKE_TIMEOUT_S
    try:
        while not handshake.is_authenticated:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            if answer := handshake.feed(connection.recv(handshake.missing_bytes)):
                connection.sendall(answer)
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        return int(RANK.unpack(connection.recv(RANK.size, socket.MSG_WAITALL))[0])
    except (OSError, struct.error):
        return -1
