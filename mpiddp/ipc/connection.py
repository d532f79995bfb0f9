"""A channel in an event loop, which never waits for the other end."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Generic

from .channel import Channel, Codec, Received, Sent, Unreadable
from .event_loop import EventLoop


class Connection(Generic[Sent, Received]):
    """Calls `on_messages` with the messages of each read, and `on_loss` once when the connection is lost.

    `on_loss` gets the reason, empty if the other end has closed.
    """

    def __init__(
        self, loop: EventLoop, sock: socket.socket, codec: Codec[Received],
        on_messages: Callable[[list[Received | Unreadable]], object], on_loss: Callable[[str], object],
    ) -> None:
        self._loop, self._on_messages, self._on_loss = loop, on_messages, on_loss
        self._channel: Channel[Sent, Received] = Channel(sock, codec)
        self._after_sending: Callable[[], object] | None = None
        self.on_drain: Callable[[], object] = bool  # when all is sent after send() has returned False
        self._is_paused = False
        loop.watch(self._channel, self._on_event)

    @property
    def is_open(self) -> bool:
        """Whether it was neither closed nor lost."""
        return self._channel.fileno() >= 0

    def send(self, message: Sent) -> bool:
        """Send a message now or later; return whether all is sent. A failure is a loss."""
        is_sent = not self.is_open or self._channel.enqueue(message)
        if not is_sent and not self._is_paused:
            self._loop.watch_writable(self._channel)
        return is_sent

    def pause(self, is_paused: bool) -> None:
        """Receive nothing for a while, so that the other end waits, or receive again."""
        if self.is_open and is_paused != self._is_paused:
            self._is_paused = is_paused
            if is_paused:
                self._loop.unwatch(self._channel)
            else:
                self._loop.watch(self._channel, self._on_event)
                self._end_if_sent()

    def close(self) -> None:
        """Close at once, without `on_loss`."""
        if self.is_open:
            if not self._is_paused:
                self._loop.unwatch(self._channel)
            self._channel.close()

    def finish(self, then: Callable[[], object]) -> None:
        """Close as soon as all is sent, and call `then`; it is called after a loss, too."""
        self._after_sending = then
        self._end_if_sent()

    def _on_event(self) -> None:
        self._end_if_sent()
        if not self.is_open:
            return
        try:
            messages = self._channel.receive(0)
        except (EOFError, OSError) as error:
            self.close()
            self._loop.call_safely(partial(self._on_loss, (error.strerror or "") if isinstance(error, OSError) else ""))
            self._end_if_sent()
        else:
            if messages:
                self._loop.call_safely(partial(self._on_messages, messages))

    def _end_if_sent(self) -> None:
        """Send what the socket accepts; if nothing is left, or the connection is lost, carry out a finish()."""
        if self.is_open:
            if not self._channel.flush():
                return
            if not self._is_paused:
                self._loop.watch_writable(self._channel, enabled=False)
            self.on_drain()
        if self._after_sending is not None:
            self.close()
            then, self._after_sending = self._after_sending, None
            then()
