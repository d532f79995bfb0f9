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
from ..ipc.codec import Codec, Text, Unreadable
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

FLUSH_TIMEOUT_S = 1.5  # for all that ranks have written to be shown


class RelayClient:
    """Starts the output relay, a process that forwards a rank's output: all of it, even if the rank crashes.

    The rank keeps the read ends of the pipes, too: if the relay is killed, no write fails, and the rank forwards what
    is in them.
    """

    def __init__(self) -> None:
        """Fork the relay; if that fails, it counts as gone."""
        self._descriptors = OwnedDescriptors()
        self._read_ends, self._write_ends = zip(os.pipe(), os.pipe(), strict=True)
        for descriptor in self._read_ends:
            self._descriptors.add(descriptor)
        self._helper: HelperProcess[RankToRelay, RelayToRank] = HelperProcess(
            f"the output relay of process {os.getpid()}", lambda sock: forward_output(sock, *self._read_ends), CODEC,
            kept=self._read_ends)
        self._helper.reap_forking_child()
        self._channel = self._helper.channel
        self._inbox: dict[type[Any], RelayToRank | Text | Unreadable] = {}

    def dismiss(self) -> None:
        """End the relay, which is not needed."""
        self.close()
        for descriptor in self._write_ends:
            os.close(descriptor)

    def start(self, forward: ForwardConfig, listener: int = -1) -> int:
        """Redirect stdout and stderr to the relay; `listener` is a descriptor that listens for other relays, if any.

        Return a socket for the sentinel, where output is folded or goes to a log; else -1.
        """
        self._channel.send(forward, listener)
        if listener >= 0:
            os.close(listener)
        outflow = -1
        if forward.folding is not None or forward.log.path:
            ours, its = socket.socketpair()
            self._channel.send(RelaySocket(), its.fileno())
            its.close()
            outflow = ours.detach()
        for descriptor, pipe in enumerate(self._write_ends, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)
        return outflow

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` once if the relay dies."""
        self._helper.monitor(on_death)

    def take_over(self, terminal: Sequence[int]) -> None:
        """Forward to two descriptors what a relay that is gone has not read.

        A thread forwards what other processes, such as the workers of a DataLoader, write later.
        """
        targets = {source: os.dup(target) for source, target in zip(self._read_ends, terminal, strict=True)
                   if self._descriptors.owns(source)}
        for source in targets:
            os.set_blocking(source, False)
        copy_available(targets)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _thread.start_new_thread(copy_until_closed, (targets,))

    def flush(self) -> None:
        """Wait, up to FLUSH_TIMEOUT_S, until all that ranks have written is shown."""
        self._channel.send(Flush())
        with contextlib.suppress(EOFError, OSError):
            self._await(Flushed, FLUSH_TIMEOUT_S)

    def query_log_loss(self, timeout_s: float) -> int:
        """Return the first byte that the log has lost of what was written so far.

        Returns -1 for none, and at the timeout: the relay may wait for a slow reader.
        """
        self._channel.send(QueryLoss())
        try:
            return self._await(LossReply, timeout_s).first_byte
        except (EOFError, OSError):
            return -1

    def finish(self, in_order: bool) -> bool:
        """Wait until the relay has forwarded what this rank wrote, and return whether stdout lost some of it.

        A slow reader is waited for, as without a relay, and if the rank ends `in_order` the log is compressed, where
        that is wanted. Other processes may still write to the relay. Raises EOFError, or another OSError, if the relay
        is gone.
        """
        self._helper.stop_monitoring()
        self._channel.send(RankEnds(in_order))
        self._channel.shut_down()
        return self._await(Forwarded, NO_TIMEOUT_S).lost

    def close(self) -> None:
        """Close this process's descriptors of the relay."""
        self._helper.close()
        self._descriptors.close()

    def _await(self, kind: type[Awaited], timeout_s: float) -> Awaited:
        """Return the next message of a kind, and keep others; raise as Channel.receive() does if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while not isinstance(message := self._inbox.pop(kind, None), kind):
            for received in self._channel.receive(max(0.001, deadline - time.monotonic())):
                self._inbox[type(received)] = received
        return message


def copy_available(targets: dict[int, int]) -> None:
    """Copy what can be read from descriptors now, each to its target; remove those that nobody can write to."""
    for source, target in list(targets.items()):
        with contextlib.suppress(BlockingIOError):
            while data := os.read(source, PIPE_BYTES):
                with contextlib.suppress(OSError):
                    write_all(target, data)
            del targets[source]


def copy_until_closed(targets: dict[int, int]) -> None:
    """Copy until nobody can write to any of the descriptors, in a thread that leaves signals to others."""
    signal.pthread_sigmask(signal.SIG_BLOCK, THREAD_BLOCKED_SIGNALS)
    with contextlib.suppress(OSError):  # the script has closed one
        while targets:
            poll = select.poll()
            for source in targets:
                poll.register(source, select.POLLIN)
            poll.poll()
            copy_available(targets)
