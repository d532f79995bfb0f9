"""The connections of an agent: to its rank, to the coordinator, and from nodes that probe its node's addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..ipc.authentication import Connector, enable_keepalive
from ..ipc.channel import Channel, Codec, Unreadable
from ..ipc.connection import Connection
from ..ipc.event_loop import EventLoop
from ..ipc.probe_responder import ProbeResponder
from . import events, protocol
from .protocol import AgentToCoordinator, AgentToRank, CoordinatorToAgent, RankToAgent
from .tasks import Tasks

if TYPE_CHECKING:
    from .coordinator_server import CoordinatorServer

RankChannel = Channel[AgentToRank, RankToAgent]
RANK_CODEC: Codec[RankToAgent] = Codec(RankToAgent)
COORDINATOR_CODEC: Codec[CoordinatorToAgent] = Codec(CoordinatorToAgent)

MAX_RECONNECTS = 3  # after connections that the coordinator closed before it admitted this rank: crowded out


class Connections:
    """Sends and receives an agent's messages, without any decisions."""

    def __init__(
        self, loop: EventLoop, rank: RankChannel, config: protocol.AgentConfig,
        post: Callable[[events.AgentEvent], None], began_s: float, tasks: Tasks,
    ) -> None:
        """Connect to the rank alone; `post` gets the events.

        `began_s` is when the rank began, on time.monotonic()'s clock.
        """
        self._began_s, self._tasks = began_s, tasks
        self._loop, self._rank = loop, rank
        self._config, self._post = config, post
        self._held: list[int] = []  # duplicates of MPI's sockets
        self._probe_responder: ProbeResponder | None = None  # in rank 0's agent
        self.server: CoordinatorServer | None = None  # there, too
        self._coordinator: Connection[AgentToCoordinator, CoordinatorToAgent] | None = None  # in others
        self._early: list[AgentToCoordinator] | None = None  # to the coordinator, until it admits this rank
        self._registration: protocol.RegisterRank | None = None
        self._reconnects = 0
        self.is_over = False  # the coordinator ends
        loop.watch(rank, self._read_rank)

    def hold_socket(self) -> None:
        """Keep the socket that has come with a message of the rank."""
        self._held.append(self._rank.take_descriptor())

    def serve_probes(self, request: protocol.ServeProbes) -> None:
        """Answer other nodes that probe the addresses of this one, and send the rank the port, 0 for a failure."""
        port = 0
        with contextlib.suppress(OSError):
            self._probe_responder = ProbeResponder(request.token, request.port)
            self._loop.watch(self._probe_responder, self._probe_responder.respond)
            port = self._probe_responder.port
        self._rank.send(protocol.ListenPort(port, "ServeProbes"))

    def start_coordinator(self, request: protocol.StartCoordinator) -> None:
        """Make this process the coordinator, and send the rank its port, 0 for a failure."""
        from .coordinator_server import CoordinatorServer  # which rank 0's agent alone needs

        if self._probe_responder is not None:
            self._loop.unwatch(self._probe_responder)
            self._probe_responder.close()  # all nodes have probed by now
        port = 0
        with contextlib.suppress(OSError):
            self.server = CoordinatorServer(
                self._loop, request, self._config, self._post, self._began_s, self._tasks)
            port = self.server.port
        self._rank.send(protocol.ListenPort(port, "StartCoordinator"))

    def connect_to_coordinator(self, registration: protocol.RegisterRank) -> None:
        """Connect to the coordinator."""
        if self.server is not None:
            self.server.register_own_rank(registration.member)
        else:
            self._registration, self._early = registration, []
            self._connect()

    def _connect(self) -> None:
        assert self._registration
        _, address, port, token = self._registration
        Connector(self._loop, address, port, token, "rank 0's agent", self._on_connected).connect()

    def send_to_coordinator(self, message: AgentToCoordinator) -> None:
        """Send a message to the coordinator, if there is one; a failure shows as an event."""
        if self.server is not None:
            self.server.handle_own_message(message)
            return
        if self._early is not None:
            self._early.append(message)
        if self._coordinator is not None:
            self._coordinator.send(message)

    def _on_connected(self, connection: socket.socket | None, error: str) -> None:
        """Use the connection to the coordinator; None if it could not be made."""
        assert self._registration
        if connection is None:
            self._early = None
            self._post(events.CoordinatorLost(error))
            return
        with contextlib.suppress(OSError):  # the next read fails, too
            enable_keepalive(connection)
        member = self._registration.member
        self._coordinator = Connection(
            self._loop, connection, COORDINATOR_CODEC, self._receive, self._on_connection_lost)
        self._coordinator.send(protocol.Hello(member.rank, member.host, member.pid, member.namespace))
        for message in self._early or []:
            self._coordinator.send(message)

    def _read_rank(self) -> None:
        try:
            messages = self._rank.receive(0)
        except (EOFError, OSError):
            self._loop.unwatch(self._rank)
            self._post(events.RankClosed())
            return
        for message in messages:
            self._post(events.FromRank(message))

    def read_rest(self) -> None:
        """Read what a rank that has ended has sent."""
        with contextlib.suppress(EOFError, OSError):
            while messages := self._rank.receive(0):
                for message in messages:
                    self._post(events.FromRank(message))

    def _receive(self, messages: list[CoordinatorToAgent | Unreadable]) -> None:
        for message in messages:
            if isinstance(message, protocol.Admitted):
                self._early = None
            self.is_over |= isinstance(message, protocol.JobOver)
            self._post(events.FromCoordinator(message))

    def _on_connection_lost(self, reason: str) -> None:
        """Connect again if this connection was crowded out; else post that the coordinator is lost."""
        self._coordinator = None
        if self._early is not None and self._reconnects < MAX_RECONNECTS:
            self._reconnects += 1
            self._connect()
        elif not self.is_over:
            self._post(events.CoordinatorLost(reason))
