"""The connections of a sentinel: to its rank, to the processes of its node, and to the coordinator."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..ipc.channel import Wire
from ..ipc.connector import Answering, Dialling, greet, watch_rank_0
from ..ipc.event_loop import Loop
from ..where.protocol import Ask
from . import events
from . import protocol as messages
from .errands import Errands

if TYPE_CHECKING:
    from .coordinator_server import Office

MOST_CUT_OFF = 3  # connections to the coordinator that end before it knows this rank: strangers crowd them out


class Connections:
    """Sends and receives what a sentinel has to say and to hear; it decides nothing."""

    def __init__(
        self, loop: Loop, rank_wire: Wire, signals: socket.socket, watched: messages.Watched,
        post: Callable[[events.WatcherEvent], None], on_rank_closed: Callable[[], None], began_s: float,
        errands: Errands,
    ) -> None:
        """Connect to the rank alone; `post` gets the events, `on_rank_closed` is called when it hangs up.

        `began_s` is when the rank's watch began, on time.monotonic()'s clock.
        """
        self._began_s, self._errands = began_s, errands
        self._loop, self._rank_wire, self._signals = loop, rank_wire, signals
        self._watched, self._post, self._on_rank_closed = watched, post, on_rank_closed
        self._answering: Answering | None = None  # in rank 0's sentinel
        self._office: Office | None = None  # there, too
        self._coordinator: Wire | None = None  # in others
        self._early: list[messages.Sent] | None = None  # to the coordinator, until it knows this rank
        self._request: messages.Join | None = None  # by which it is called
        self._cut_off = 0  # how often a connection ended before that
        loop.listen(rank_wire, self._read_rank)
        loop.listen(signals, self._read_signals)

    def answer(self, request: messages.Answer) -> None:
        """Answer other nodes that try the addresses of this one, and tell the rank the port, 0 where that can't be."""
        port = 0
        with contextlib.suppress(OSError):
            self._answering = Answering(self._loop, request.token, request.port)
            port = self._answering.port
        self.tell_rank(messages.Port(port, "Answer"))

    def coordinate(self, request: messages.Coordinate) -> None:
        """Let this process be the coordinator, and tell the rank its port, 0 where it can't listen."""
        from .coordinator_server import Office  # which rank 0's sentinel alone needs

        if self._answering is not None:
            self._answering.close()  # by now every node has tried
        try:
            self._office = Office(self._loop, request, self._watched, self._post, self._began_s, self._errands)
        except OSError:
            self.tell_rank(messages.Port(0, "Coordinate"))
        else:
            self._rank_wire.send(messages.Port(self._office.port, "Coordinate"), self._office.fileno())

    def meet(self, request: messages.Join) -> None:
        """Connect to the coordinator, if there is one."""
        if self._office is not None:
            self._office.join(request.member)
        elif request.port:
            self._request, self._early = request, []
            self._call()
        else:
            self._post(events.NoCoordinator())

    def _call(self) -> None:
        assert self._request
        Dialling(self._loop, self._request, self._on_answer).dial()

    def watch_neighbour(self, rank: int, pid: int) -> None:
        """Tell when a process of this node ends: one sentinel sees in which order several do."""
        self._loop.await_end(pid, lambda: self._post(events.Noticed(messages.Ended(rank))))

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the rank's last message, -1 where none did."""
        return self._rank_wire.take_descriptor()

    def tell_rank(self, message: messages.Sent) -> None:
        """Send a message to the rank."""
        self._rank_wire.send(message)

    def tell_coordinator(self, message: messages.Sent) -> None:
        """Send a message to the coordinator, if there is one; what comes of that is an event."""
        if self._office is not None:
            self._office.hear_own(message)
            return
        if self._early is not None:
            self._early.append(message)
        if self._coordinator is not None:
            self._coordinator.send(message)

    def let_all_end(self) -> None:
        """Let the job end on all ranks, where this process is the coordinator."""
        if self._office is not None:
            self._office.let_all_end()

    def take_leave(self) -> None:
        """Tell that the rank leaves the job in order; if it is rank 0, tell all that the job is over."""
        if self._office is not None:
            self._office.close_down()
        else:
            self.tell_coordinator(messages.Bye())

    @property
    def busy(self) -> bool:
        """Whether this process still has to do something for others."""
        return self._office is not None and self._office.busy

    def flush(self) -> None:
        """Return when all is sent that others are to hear."""
        if self._office is not None:
            self._office.flush()
            self._office.close()

    def _on_answer(self, connection: socket.socket | None, error: str) -> None:
        """Take the connection to the coordinator; None if it could not be made.

        The rank has it before the coordinator knows of the rank: it does not end with this process then.
        """
        assert self._request
        if connection is None:
            self._early = None
            self._post(events.NoCoordinator(error))
            return
        self._rank_wire.send(messages.Reached(), connection.fileno())
        self._coordinator = greet(connection, self._request)
        self._loop.listen(self._coordinator, self._read_coordinator)
        for message in self._early or []:
            self._coordinator.send(message)

    def _read_rank(self) -> None:
        try:
            messages = self._rank_wire.receive()
        except (EOFError, OSError):
            self._loop.forget(self._rank_wire)
            self._on_rank_closed()
            return
        for message in messages:
            self._post(events.FromRank(message))

    def _read_coordinator(self) -> None:
        assert self._coordinator
        try:
            received = self._coordinator.receive()
        except (EOFError, OSError) as error:
            self._loop.forget(self._coordinator)
            self._coordinator.close()
            self._coordinator = None
            self._on_lost(isinstance(error, EOFError))
            return
        for message in received:
            if isinstance(message, messages.Admitted):
                self._early = None
            elif isinstance(message, messages.Over):
                self._request = None  # the coordinator ends
            self._post(events.FromCoordinator(message))

    def _on_lost(self, closed: bool) -> None:
        """Call again where strangers have crowded this sentinel out; else tell that the coordinator is gone."""
        if self._early is not None and closed and self._cut_off < MOST_CUT_OFF:
            self._cut_off += 1
            self._call()
        elif closed and self._request is not None:
            self._post(events.CoordinatorKilled())
            watch_rank_0(self._loop, self._request, lambda closed: self._post(events.CoordinatorGone(closed)))
        else:
            self._post(events.CoordinatorGone(closed))

    def _read_signals(self) -> None:
        """Tell of a SIGINT, which a rank in a collective notices only when that ends, and ask at a SIGQUIT."""
        numbers = self._signals.recv(4096)
        if not numbers:
            self._loop.forget(self._signals)
        elif signal.SIGINT in numbers:
            self._post(events.Noticed(messages.Interrupted()))
        elif signal.SIGQUIT in numbers:
            self._post(events.Noticed(Ask()))
