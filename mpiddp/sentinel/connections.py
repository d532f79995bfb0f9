"""The connections of a sentinel: to its rank, to the processes of its node, and to the coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import events, messages
from .entrance import SHOWING_S, Dialling
from .loop import Loop
from .wire import Wire

if TYPE_CHECKING:
    from .office import Office


class Connections:
    """Sends and receives what a sentinel has to say and to hear; it decides nothing."""

    def __init__(
        self, loop: Loop, rank_wire: Wire, signals: socket.socket, watched: messages.Watched,
        post: Callable[[events.WatcherEvent], None], on_rank_closed: Callable[[], None],
    ) -> None:
        """Connect to the rank alone; `post` gets the events, `on_rank_closed` is called when it hangs up."""
        self._began_s = time.monotonic()
        self._loop, self._rank_wire, self._signals = loop, rank_wire, signals
        self._watched, self._post, self._on_rank_closed = watched, post, on_rank_closed
        self._office: Office | None = None  # in rank 0's sentinel
        self._coordinator: Wire | None = None  # in others
        self._unsent: list[messages.Sent] | None = None  # to the coordinator, while it is called
        self._request: messages.Join | None = None  # until the coordinator has said something, or cannot have
        self._called_s = 0.0
        self._again = False  # it was called a second time
        loop.listen(rank_wire, self._read_rank)
        loop.listen(signals, self._read_signals)

    def coordinate(self, request: messages.Coordinate) -> None:
        """Let this process be the coordinator, and tell the rank its port, 0 where it can't listen."""
        from .office import Office  # which rank 0's sentinel alone needs

        port = 0
        with contextlib.suppress(OSError):
            self._office = Office(self._loop, request, self._watched, self._post, self._began_s)
            port = self._office.port
        self.tell_rank(messages.Port(port))

    def meet(self, request: messages.Join) -> None:
        """Connect to the coordinator, if there is one."""
        if self._office is not None:
            self._office.join(request.member)
        elif request.port:
            self._request = request
            self._call(request)
        else:
            self._post(events.NoCoordinator())

    def _call(self, request: messages.Join) -> None:
        self._unsent, self._called_s = [], time.monotonic()
        Dialling(self._loop, request, self._on_answer).dial()

    def watch_neighbour(self, rank: int, pid: int) -> None:
        """Tell when a process of this node ends: one sentinel sees in which order several do."""

        def tell_end() -> None:
            self._loop.forget(descriptor)
            os.close(descriptor)
            self._post(events.NeighbourGone(rank))

        with contextlib.suppress(OSError):  # before Linux 5.3
            descriptor = os.pidfd_open(pid)
            self._loop.listen(descriptor, tell_end)

    def tell_rank(self, message: messages.Sent) -> None:
        """Send a message to the rank."""
        self._rank_wire.send(message)

    def tell_coordinator(self, message: messages.Sent) -> None:
        """Send a message to the coordinator, if there is one; what comes of that is an event."""
        if self._office is not None:
            self._office.hear_own(message)
        elif self._unsent is not None:
            self._unsent.append(message)
        elif self._coordinator is not None:
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

    def _on_answer(self, wire: Wire | None, error: str) -> None:
        """Take the connection to the coordinator; None if it could not be made."""
        unsent, self._unsent = self._unsent or [], None
        self._coordinator = wire
        if wire is None:
            self._post(events.CoordinatorGone(closed=True) if self._again else events.NoCoordinator(error))
            return
        self._loop.listen(wire, self._read_coordinator)
        for message in unsent:
            wire.send(message)

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
            self._coordinator = None
            early = time.monotonic() - self._called_s < SHOWING_S
            if self._request is not None and early and not self._again:
                self._again = True  # strangers may have crowded this one out
                self._call(self._request)
            else:
                self._post(events.CoordinatorGone(isinstance(error, EOFError)))
            return
        self._request = None
        for message in received:
            self._post(events.FromCoordinator(message))

    def _read_signals(self) -> None:
        """Tell of a SIGINT; a rank in a collective notices it only when that ends."""
        numbers = self._signals.recv(4096)
        if not numbers:
            self._loop.forget(self._signals)
        elif signal.SIGINT in numbers:
            self._post(events.RankInterrupted())
