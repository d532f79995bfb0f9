"""The connections of an agent: to its rank, to the coordinator, and from nodes that probe its node's addresses."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..ipc.authentication import CONNECT_TIMEOUT_S, Connector, enable_keepalive
from ..ipc.channel import Channel, Codec
from ..ipc.event_loop import EventLoop
from ..ipc.probe_responder import ProbeResponder
from ..where import progress
from ..where.protocol import SnapshotRequest
from . import events, protocol
from .background import BackgroundTasks
from .protocol import AgentToCoordinator, AgentToRank, CoordinatorToAgent, RankToAgent

if TYPE_CHECKING:
    from .coordinator_server import CoordinatorServer

RankChannel = Channel[AgentToRank, RankToAgent]
CoordinatorChannel = Channel[AgentToCoordinator, CoordinatorToAgent]
RANK_CODEC: Codec[RankToAgent] = Codec(RankToAgent)
COORDINATOR_CODEC: Codec[CoordinatorToAgent] = Codec(CoordinatorToAgent)

MAX_RECONNECTS = 3  # after connections that the coordinator closed before it admitted this rank: crowded out
FULL_BACKLOG_RETRY_S = 30.0  # for a connection to rank 0's port, which nobody accepts


class Connections:
    """Sends and receives an agent's messages, without any decisions."""

    def __init__(
        self, loop: EventLoop, rank: RankChannel, signals: socket.socket, watched: protocol.WatchedRank,
        post: Callable[[events.WatcherEvent], None], on_rank_closed: Callable[[], None], began_s: float,
        tasks: BackgroundTasks,
    ) -> None:
        """Connect to the rank alone; `post` gets the events; `on_rank_closed` is called when its connection closes.

        `began_s` is when the rank's watch began, on time.monotonic()'s clock.
        """
        self._began_s, self._tasks = began_s, tasks
        self._loop, self._rank, self._signals = loop, rank, signals
        self._watched, self._post, self._on_rank_closed = watched, post, on_rank_closed
        self._probe_responder: ProbeResponder | None = None  # in rank 0's agent
        self.server: CoordinatorServer | None = None  # there, too
        self._coordinator: CoordinatorChannel | None = None  # in others
        self._early: list[AgentToCoordinator] | None = None  # to the coordinator, until it admits this rank
        self._registration: protocol.RegisterRank | None = None
        self._reconnects = 0
        loop.watch(rank, self._read_rank)
        loop.watch(signals, self._read_signals)

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
        try:
            self.server = CoordinatorServer(
                self._loop, request, self._watched, self._post, self._began_s, self._tasks)
        except OSError:
            self._rank.send(protocol.ListenPort(0, "StartCoordinator"))
        else:
            self._rank.send(protocol.ListenPort(self.server.port, "StartCoordinator"), self.server.fileno())

    def connect_to_coordinator(self, registration: protocol.RegisterRank) -> None:
        """Connect to the coordinator, if there is one."""
        if self.server is not None:
            self.server.register_own_rank(registration.member)
        elif registration.port:
            self._registration, self._early = registration, []
            self._connect()
        else:
            self._post(events.NoCoordinator())

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

    def leave_job(self) -> None:
        """Report that the rank leaves the job in order; if it is rank 0, that the job is over."""
        if self.server is not None:
            self.server.finish_job()
        else:
            self.send_to_coordinator(protocol.Leave())

    def _on_connected(self, connection: socket.socket | None, error: str) -> None:
        """Use the connection to the coordinator; None if it could not be made.

        The rank gets a copy before the coordinator admits it: so the connection survives this process.
        """
        assert self._registration
        if connection is None:
            self._early = None
            self._post(events.NoCoordinator(error))
            return
        self._rank.send(protocol.CoordinatorConnected(), connection.fileno())
        self._coordinator = send_hello(connection, self._registration)
        self._loop.watch(self._coordinator, self._read_coordinator)
        for message in self._early or []:
            self._coordinator.send(message)

    def _read_rank(self) -> None:
        try:
            messages = self._rank.receive()
        except (EOFError, OSError):
            self._loop.unwatch(self._rank)
            self._on_rank_closed()
            return
        for message in messages:
            self._post(events.FromRank(message))

    def _read_coordinator(self) -> None:
        assert self._coordinator
        try:
            messages = self._coordinator.receive()
        except (EOFError, OSError) as error:
            self._loop.unwatch(self._coordinator)
            self._coordinator.close()
            self._coordinator = None
            self._on_connection_lost(isinstance(error, EOFError))
            return
        for message in messages:
            if isinstance(message, protocol.Admitted):
                self._early = None
            elif isinstance(message, protocol.JobFinished):
                self._registration = None  # the coordinator ends
            self._post(events.FromCoordinator(message))

    def _on_connection_lost(self, closed: bool) -> None:
        """Connect again if this connection was crowded out; else post that the coordinator is gone."""
        if self._early is not None and closed and self._reconnects < MAX_RECONNECTS:
            self._reconnects += 1
            self._connect()
        elif closed and self._registration is not None:
            self._post(events.CoordinatorLost())
            watch_rank_0(self._loop, self._registration, lambda closed: self._post(events.Rank0Lost(closed)))
        else:
            self._post(events.Rank0Lost(closed))

    def _read_signals(self) -> None:
        """Report a SIGINT, which a rank in a collective notices only at its end; at a SIGQUIT request a snapshot.

        Report a stop signal that the script has not asked about.
        """
        numbers = self._signals.recv(4096)
        if not numbers:
            self._loop.unwatch(self._signals)
        elif signal.SIGINT in numbers:
            self._post(events.Observed(protocol.Interrupted()))
        elif signal.SIGQUIT in numbers:
            self._post(events.Observed(SnapshotRequest()))
        elif number := progress.find_unasked_signal(numbers):
            self._post(events.Observed(protocol.UnaskedStop(number)))


def send_hello(connection: socket.socket, registration: protocol.RegisterRank) -> CoordinatorChannel:
    """Introduce this agent on a new connection."""
    with contextlib.suppress(OSError):  # the next read fails, too
        enable_keepalive(connection)
    channel: CoordinatorChannel = Channel(connection, COORDINATOR_CODEC)
    member = registration.member
    channel.send(protocol.Hello(member.rank, member.host, member.pid, member.namespace))
    return channel


def watch_rank_0(loop: EventLoop, registration: protocol.RegisterRank, on_end: Callable[[bool], None]) -> None:
    """Call `on_end` when rank 0 has ended, after its agent was killed; with False if its node is unreachable.

    Rank 0 holds the coordinator's port open. Its kernel completes a connection to that port, which nobody accepts, and
    closes it when rank 0 ends.
    """
    def on_closed() -> None:
        loop.unwatch(connection)
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        connection.close()
        on_end(error in (0, errno.ECONNRESET))

    try:
        connection = socket.create_connection((registration.address, registration.port), CONNECT_TIMEOUT_S)
        enable_keepalive(connection)
    except TimeoutError:  # the port's backlog has no room for thousands
        loop.set_timer("rank 0", FULL_BACKLOG_RETRY_S, partial(watch_rank_0, loop, registration, on_end))
    except OSError as error:
        on_end(isinstance(error, ConnectionRefusedError))
    else:
        loop.watch(connection, on_closed)
