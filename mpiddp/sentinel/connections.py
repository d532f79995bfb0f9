"""The connections of a sentinel: to its rank, to the processes of its node, and to the coordinator."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..beside import messages
from ..beside.asking import Ask
from ..beside.entrance import SHOWING_S
from ..beside.loop import Loop
from ..beside.wire import Wire
from . import events
from .calls import Answering, Dialling
from .errands import Errands

if TYPE_CHECKING:
    from .office import Office

MOST_CUT_OFF = 3  # connections in a row that end soon after they were made


class Connections:
    """Sends and receives what a sentinel has to say and to hear; it decides nothing."""

    def __init__(
        self, loop: Loop, rank_wire: Wire, signals: socket.socket, watched: messages.Watched,
        post: Callable[[events.WatcherEvent], None], on_rank_closed: Callable[[], None], began_s: float,
        is_first: bool, errands: Errands,
    ) -> None:
        """Connect to the rank alone; `post` gets the events, `on_rank_closed` is called when it hangs up.

        `began_s` is when the rank's watch began, on time.monotonic()'s clock. Where this sentinel is not the first one,
        another has met the coordinator.
        """
        self._began_s, self._errands = began_s, errands
        self._loop, self._rank_wire, self._signals = loop, rank_wire, signals
        self._watched, self._post, self._on_rank_closed = watched, post, on_rank_closed
        self._answering: Answering | None = None  # in rank 0's sentinel
        self._office: Office | None = None  # there, too
        self._coordinator: Wire | None = None  # in others
        self._unsent: list[messages.Sent] | None = None  # to the coordinator, while it is called
        self._request: messages.Join | None = None  # by which it is called
        self._called_s = 0.0
        self._met = not is_first  # it was there once
        self._cut_off = 0  # how often a connection ended soon after it was made
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
        from .office import Office  # which rank 0's sentinel alone needs

        if self._answering is not None:
            self._answering.close()  # by now every node has tried
        listener = self._rank_wire.take_descriptor()
        try:
            self._office = Office(self._loop, request, self._watched, self._post, self._began_s, self._errands,
                                  listener)
        except OSError:
            self.tell_rank(messages.Port(0, "Coordinate"))
        else:
            self._rank_wire.send(messages.Port(self._office.port, "Coordinate"), self._office.fileno())

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
        Dialling(self._loop, request, self._met, self._on_answer).dial()

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
            self._office.close()

    def _on_answer(self, wire: Wire | None, error: str) -> None:
        """Take the connection to the coordinator; None if it could not be made."""
        unsent, self._unsent = self._unsent or [], None
        self._coordinator = wire
        if wire is None:
            self._post(events.CoordinatorGone(closed=True) if self._met else events.NoCoordinator(error))
            return
        self._loop.listen(wire, self._read_coordinator)
        self._rank_wire.send(messages.Reached(), wire.fileno())
        if self._met:
            self._post(events.CoordinatorBack())
        self._met = True
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
            closed = isinstance(error, EOFError)
            if closed and self._request is not None and self._may_call_again():
                self._call(self._request)
            else:
                self._post(events.CoordinatorGone(closed))
            return
        for message in received:
            if isinstance(message, messages.Over):
                self._request = None  # it will not be there again
            self._post(events.FromCoordinator(message))

    def _may_call_again(self) -> bool:
        """Tell whether it is worth while: strangers may have crowded this one out, or another coordinator be there.

        As long as rank 0 lives, its port is open, also while nobody listens there.
        """
        early = time.monotonic() - self._called_s < SHOWING_S
        self._cut_off = self._cut_off + 1 if early else 0
        return self._cut_off <= MOST_CUT_OFF

    def _read_signals(self) -> None:
        """Tell of a SIGINT, which a rank in a collective notices only when that ends, and ask at a SIGQUIT."""
        numbers = self._signals.recv(4096)
        if not numbers:
            self._loop.forget(self._signals)
        elif signal.SIGINT in numbers:
            self._post(events.Noticed(messages.Interrupted()))
        elif signal.SIGQUIT in numbers:
            self._post(events.Noticed(Ask()))
