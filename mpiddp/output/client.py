"""The rank's side of its output relay."""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..base.stderr import write_all
from ..ipc.channel import Codec, Unreadable
from ..ipc.helper_process import THREAD_BLOCKED_SIGNALS, HelperProcess, OwnedDescriptors
from .forwarder import NO_TIMEOUT_S, PIPE_BYTES, forward_output
from .protocol import (
    Flush,
    Flushed,
    ForwardConfig,
    Forwarded,
    LossReply,
    QueryLoss,
    RankEnds,
    RankToRelay,
    RelaySocket,
    RelayToRank,
)

CODEC: Codec[RelayToRank] = Codec(RelayToRank)

Awaited = TypeVar("Awaited", Flushed, LossReply, Forwarded)

FLUSH_TIMEOUT_S = 1.5


class RelayClient:
    """Starts the output relay, a process that forwards all of a rank's output, even if the rank crashes.

    The rank keeps the read ends of the pipes as well: if the relay is killed, no write fails, and the rank forwards
    what is left in the pipes.
    """

    def __init__(self) -> None:
        """Fork the relay; if that fails, it counts as killed."""
        self._descriptors = OwnedDescriptors()
        self._read_ends, self._write_ends = zip(os.pipe(), os.pipe(), strict=True)
        for descriptor in self._read_ends:
            self._descriptors.add(descriptor)
        self._helper: HelperProcess[RankToRelay, RelayToRank] = HelperProcess(
            f"the output relay of process {os.getpid()}", lambda sock: forward_output(sock, *self._read_ends), CODEC,
            kept=self._read_ends)
        self._helper.reap_forking_child()
        self._channel = self._helper.channel
        self._inbox: dict[type[Any], RelayToRank | Unreadable] = {}

    def dismiss(self) -> None:
        """End a relay that is not needed."""
        self.close()
        for descriptor in self._write_ends:
            os.close(descriptor)

    def start(self, forward: ForwardConfig, listener: int = -1) -> int:
        """Redirect stdout and stderr to the relay; `listener` is a descriptor on which it accepts other relays, or -1.

        Return a socket for the agent if output is folded or logged, else -1.
        """
        self._channel.send(forward, listener)
        if listener >= 0:
            os.close(listener)
        relay_socket = -1
        if forward.folding is not None or forward.log.path:
            ours, its = socket.socketpair()
            self._channel.send(RelaySocket(), its.fileno())
            its.close()
            relay_socket = ours.detach()
        for descriptor, pipe in enumerate(self._write_ends, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)
        return relay_socket

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` once if the relay dies."""
        self._helper.monitor(on_death)

    def take_over(self, terminal: Sequence[int]) -> None:
        """Forward to two descriptors the output that a killed relay has not read.

        A thread forwards later output of other processes, such as DataLoader workers.
        """
        targets = {source: os.dup(target) for source, target in zip(self._read_ends, terminal, strict=True)
                   if self._descriptors.owns(source)}
        for source in targets:
            os.set_blocking(source, False)
        copy_available(targets)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _thread.start_new_thread(copy_until_closed, (targets,))

    def flush(self) -> None:
        """Wait, up to FLUSH_TIMEOUT_S, until all output that the ranks have written is shown."""
        self._channel.send(Flush())
        with contextlib.suppress(EOFError, OSError):
            self._await(Flushed, FLUSH_TIMEOUT_S)

    def query_log_loss(self, timeout_s: float) -> int:
        """Return the position of the first byte that the log has lost so far.

        Returns -1 if none is lost, or at the timeout: the relay may be waiting for a slow reader.
        """
        self._channel.send(QueryLoss())
        try:
            return self._await(LossReply, timeout_s).first_byte
        except (EOFError, OSError):
            return -1

    def finish(self) -> bool:
        """Wait until the relay has forwarded this rank's output; return whether stdout lost some of it.

        This waits for a slow reader, as without a relay. Other processes may still write to the relay. Raises EOFError
        or OSError if the relay was killed.
        """
        self._helper.stop_monitoring()
        self._channel.send(RankEnds())
        self._channel.shut_down()
        return self._await(Forwarded, NO_TIMEOUT_S).lost

    def abandon(self) -> None:
        """Close the relay's descriptors in a forked child."""
        self._helper.abandon()
        self._descriptors.close()

    def close(self) -> None:
        """Close this process's descriptors of the relay."""
        self._helper.close()
        self._descriptors.close()

    def _await(self, kind: type[Awaited], timeout_s: float) -> Awaited:
        """Return the next message of a kind, and keep others; at the timeout, raise what Channel.receive() raises."""
        deadline = time.monotonic() + timeout_s
        while not isinstance(message := self._inbox.pop(kind, None), kind):
            for received in self._channel.receive(max(0.001, deadline - time.monotonic())):
                self._inbox[type(received)] = received
        return message


def copy_available(targets: dict[int, int]) -> None:
    """Copy what can be read now from each descriptor to its target; remove descriptors without a writer."""
    for source, target in list(targets.items()):
        with contextlib.suppress(BlockingIOError):
            while data := os.read(source, PIPE_BYTES):
                with contextlib.suppress(OSError):
                    write_all(target, data)
            del targets[source]


def copy_until_closed(targets: dict[int, int]) -> None:
    """Copy until no descriptor has a writer; blocks signals in this thread, so that other threads handle them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, THREAD_BLOCKED_SIGNALS)
    with contextlib.suppress(OSError):  # the script has closed one
        while targets:
            poll = select.poll()
            for source in targets:
                poll.register(source, select.POLLIN)
            poll.poll()
            copy_available(targets)
