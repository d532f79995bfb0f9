"""The rank's end of its relay."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from ..beside.detached import fork_detached, reap
from ..beside.messages import Message
from ..beside.outflow import AskLost, Forward, Forwarded, Lost, Outflow, OutputSettled, SettleOutput
from ..beside.wire import Wire
from ..say import say
from .process import FOREVER_S, relay

SETTLING_S = 1.5  # for all that ranks have written to be shown


class Relay:
    """A process that passes a rank's output on; it gets all of it even if the rank crashes."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        reading, self._writing = zip(os.pipe(), os.pipe(), strict=True)
        forking = fork_detached(lambda: relay(Wire(its), *reading), kept=(its.fileno(), *reading))
        reap(forking)
        its.close()
        for descriptor in reading:
            os.close(descriptor)
        self._control = Wire(self._socket)
        self._inbox: dict[type[Message], Message] = {}
        self._who = ""

    def dismiss(self) -> None:
        """End the relay, which is not needed."""
        self._control.close()
        for pipe in self._writing:
            os.close(pipe)

    def begin(self, forward: Forward, listener: int = -1) -> int:
        """Take over stdout and stderr, and a descriptor that listens for other relays, if there is one.

        Return a socket by which the sentinel can ask for what is folded, -1 if nothing is.
        """
        self._who = forward.who
        self._control.send(forward, listener)
        if listener >= 0:
            os.close(listener)
        outflow = -1
        if forward.folding is not None:
            ours, its = socket.socketpair()
            self._control.send(Outflow(), its.fileno())
            its.close()
            outflow = ours.detach()
        for descriptor, pipe in enumerate(self._writing, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)
        return outflow

    def settle(self) -> None:
        """Wait, not for long, until all is shown that ranks have written."""
        self._control.send(SettleOutput())
        with contextlib.suppress(EOFError, OSError):
            self._await(OutputSettled, SETTLING_S)

    def log_lost(self, timeout_s: float) -> int:
        """Return the first byte that the log has lost of what was written so far.

        Returns -1 for none, and where the relay does not answer in time: it may wait for a slow reader.
        """
        self._control.send(AskLost())
        try:
            message = self._await(Lost, timeout_s)
        except (EOFError, OSError):
            return -1
        assert isinstance(message, Lost)
        return message.at

    def end(self) -> bool:
        """Wait until the relay has passed on what this rank wrote, and tell whether stdout lost some of it.

        A slow reader is waited for, as without a relay. Other processes may still write to the relay.
        """
        try:
            self._socket.shutdown(socket.SHUT_WR)
            message = self._await(Forwarded, FOREVER_S)
            assert isinstance(message, Forwarded)
            return message.lost
        except (EOFError, OSError):
            say(f"mpiddp: {self._who}: the process that passed its output on is gone, and output perhaps lost")
            return True

    def _await(self, kind: type[Message], timeout_s: float) -> Message:
        """Return the next message of a kind, and keep others; raise as Wire.receive() does where none comes in time."""
        deadline = time.monotonic() + timeout_s
        while kind not in self._inbox:
            for message in self._control.receive(max(0.001, deadline - time.monotonic())):
                self._inbox[type(message)] = message
        return self._inbox.pop(kind)
