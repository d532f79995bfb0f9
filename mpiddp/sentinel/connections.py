"""The connections of a sentinel: to its rank, to the processes of its node, and to the coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .coordinator import Coordinator
from .entrance import dial
from .loop import Loop
from .messages import Bye, Ended, Interrupted, Join, Message, Sent, Watched
from .wire import Wire


class Listener(Protocol):
    """What is called when something comes over a connection."""

    def on_rank_message(self, message: Message) -> None:
        """Act on one message of the rank."""

    def on_rank_closed(self) -> None:
        """Act on the end of the connection to the rank."""

    def on_coordinator_message(self, message: Message) -> None:
        """Act on one message of the coordinator."""

    def on_coordinator_gone(self, closed: bool) -> None:
        """Act on the end of the connection to the coordinator, which is `closed` or leads nowhere any more."""


class Connections:
    """Sends and receives what a sentinel has to say and to hear; it decides nothing."""

    def __init__(self, loop: Loop, rank_wire: Wire, listener: Listener) -> None:
        """Connect to the rank alone, and call `listener` from the loop."""
        self._loop, self._rank_wire, self._listener = loop, rank_wire, listener
        self._coordinator: Coordinator | None = None  # in rank 0's sentinel
        self._coordinator_wire: Wire | None = None
        loop.listen(rank_wire, self._read_rank)

    def coordinate(self, address: str, token: str, start: float, watched: Watched) -> int:
        """Let this process be the coordinator, and return its port, 0 where it can't listen; see Coordinator."""
        try:
            self._coordinator = Coordinator(self._loop, start, address, token, watched)
        except OSError:
            return 0
        return self._coordinator.port

    def join(self, to: Join) -> None:
        """Connect to the coordinator, if there is one that can be reached."""
        if self._coordinator is not None:
            self._coordinator_wire = self._coordinator.own_member(to.member)
        elif to.port:
            self._coordinator_wire = dial(to.address, to.port, to.token, to.member)
        if self._coordinator_wire:
            self._loop.listen(self._coordinator_wire, self._read_coordinator)

    def listen_to_signals(self, signals: socket.socket) -> None:
        """Tell the coordinator of a SIGINT; a rank in a collective notices it only when that ends."""

        def read() -> None:
            numbers = signals.recv(4096)
            if not numbers:
                self._loop.forget(signals)
            elif signal.SIGINT in numbers:
                self.tell_coordinator(Interrupted())

        self._loop.listen(signals, read)

    def watch_neighbour(self, rank: int, pid: int) -> None:
        """Tell the coordinator when a process of this node ends: one sentinel sees in which order several do."""

        def tell_end() -> None:
            self._loop.forget(descriptor)
            os.close(descriptor)
            self.tell_coordinator(Ended(rank))

        with contextlib.suppress(OSError):  # before Linux 5.3
            descriptor = os.pidfd_open(pid)
            self._loop.listen(descriptor, tell_end)

    def tell_rank(self, message: Sent) -> None:
        """Send a message to the rank."""
        self._rank_wire.send(message)

    def tell_coordinator(self, message: Sent) -> bool:
        """Send a message to the coordinator, and tell whether it is there to take it."""
        return self._coordinator_wire is not None and self._coordinator_wire.send(message)

    def finish(self) -> None:
        """Let the job end on all ranks, where this process is the coordinator."""
        if self._coordinator is not None:
            self._coordinator.finish()

    def take_leave(self) -> None:
        """Tell that the rank leaves the job in order; if it is rank 0, tell all that the job is over."""
        if self._coordinator is not None:
            self._coordinator.tell_over()
        else:
            self.tell_coordinator(Bye())

    def _read_rank(self) -> None:
        try:
            messages = self._rank_wire.receive()
        except (EOFError, OSError):
            self._loop.forget(self._rank_wire)
            self._listener.on_rank_closed()
            return
        self._deliver(messages, self._listener.on_rank_message)

    def _read_coordinator(self) -> None:
        assert self._coordinator_wire
        try:
            messages = self._coordinator_wire.receive()
        except (EOFError, OSError) as error:
            self._loop.forget(self._coordinator_wire)
            self._coordinator_wire = None
            self._listener.on_coordinator_gone(isinstance(error, EOFError))
            return
        self._deliver(messages, self._listener.on_coordinator_message)

    def _deliver(self, messages: list[Message], act: Callable[[Message], None]) -> None:
        """Act on each message, whatever another one leads to."""
        for message in messages:
            self._loop.attempt(partial(act, message))
