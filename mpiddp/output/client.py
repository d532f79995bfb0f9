"""The rank's end of its relay."""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence

from ..base.stderr import write_all
from ..ipc.helper_process import HelperProcess, OwnDescriptors
from ..sentinel.protocol import Message
from ..where.dumper import NON_FAULT_SIGNALS
from .forwarder import FOREVER_S, PIPE_BYTES, relay
from .protocol import AskLost, Forward, Forwarded, Lost, Outflow, OutputSettled, RankEnds, SettleOutput

SETTLING_S = 1.5  # for all that ranks have written to be shown


class Relay:
    """A process that passes a rank's output on; it gets all of it even if the rank crashes.

    This process can read what is written to the relay, too: so nobody's output fails if that is killed, but waits.
    """

    def __init__(self) -> None:
        """Fork it; where that fails it is gone from the beginning."""
        self._descriptors = OwnDescriptors()
        self._reading, self._writing = zip(os.pipe(), os.pipe(), strict=True)
        for descriptor in self._reading:
            self._descriptors.keep(descriptor)
        self._helper = HelperProcess(f"the output relay of process {os.getpid()}",
                                     lambda channel: relay(channel, *self._reading), kept=self._reading)
        self._helper.reap_forker()
        self._channel = self._helper.channel
        self._inbox: dict[type[Message], Message] = {}

    def dismiss(self) -> None:
        """End the relay, which is not needed."""
        self._helper.close()
        self._descriptors.close()
        for descriptor in self._writing:
            os.close(descriptor)

    def begin(self, forward: Forward, listener: int = -1) -> int:
        """Take over stdout and stderr, and a descriptor that listens for other relays, if there is one.

        Return a socket for the sentinel, where output is folded or goes to a log; else -1.
        """
        self._channel.send(forward, listener)
        if listener >= 0:
            os.close(listener)
        outflow = -1
        if forward.folding is not None or forward.log.path:
            ours, its = socket.socketpair()
            self._channel.send(Outflow(), its.fileno())
            its.close()
            outflow = ours.detach()
        for descriptor, pipe in enumerate(self._writing, start=1):
            os.dup2(pipe, descriptor)
            os.close(pipe)
        return outflow

    def watch(self, on_death: Callable[[], object]) -> None:
        """Call `on_death` once if the relay dies."""
        self._helper.watch(on_death)

    def replace(self, terminal: Sequence[int]) -> None:
        """Pass on in the place of a relay that is gone, to two descriptors, what it has not read.

        So does a thread with what other processes write, as the workers of a DataLoader.
        """
        left = {one: os.dup(to) for one, to in zip(self._reading, terminal, strict=True) if self._descriptors.has(one)}
        for source in left:
            os.set_blocking(source, False)
        pass_on(left)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            _thread.start_new_thread(pass_on_forever, (left,))

    def settle(self) -> None:
        """Wait, not for long, until all is shown that ranks have written."""
        self._channel.send(SettleOutput())
        with contextlib.suppress(EOFError, OSError):
            self._await(OutputSettled, SETTLING_S)

    def log_lost(self, timeout_s: float) -> int:
        """Return the first byte that the log has lost of what was written so far.

        Returns -1 for none, and where the relay does not answer in time: it may wait for a slow reader.
        """
        self._channel.send(AskLost())
        try:
            message = self._await(Lost, timeout_s)
        except (EOFError, OSError):
            return -1
        assert isinstance(message, Lost)
        return message.at

    def end(self, in_order: bool) -> bool:
        """Wait until the relay has passed on what this rank wrote, and tell whether stdout lost some of it.

        A slow reader is waited for, as without a relay, and if the rank ends `in_order` the log is compressed, where
        that is wanted. Other processes may still write to the relay. Raises EOFError, or another OSError, where it is
        gone.
        """
        self._helper.stop_watching()
        self._channel.send(RankEnds(in_order))
        self._channel.shut_down()
        message = self._await(Forwarded, FOREVER_S)
        assert isinstance(message, Forwarded)
        return message.lost

    def close(self) -> None:
        """Close what this process has of it, after end()."""
        self._helper.close()
        self._descriptors.close()

    def _await(self, kind: type[Message], timeout_s: float) -> Message:
        """Return the next message of a kind, and keep others; raise as Wire.receive() does where none comes in time."""
        deadline = time.monotonic() + timeout_s
        while kind not in self._inbox:
            for message in self._channel.receive(max(0.001, deadline - time.monotonic())):
                self._inbox[type(message)] = message
        return self._inbox.pop(kind)


def pass_on(ways: dict[int, int]) -> None:
    """Write what can be read from descriptors now, each to another one; forget those that nobody can write to."""
    for source, target in list(ways.items()):
        with contextlib.suppress(BlockingIOError):
            while data := os.read(source, PIPE_BYTES):
                with contextlib.suppress(OSError):
                    write_all(target, data)
            del ways[source]


def pass_on_forever(ways: dict[int, int]) -> None:
    """Do so until nobody can write to any of them, in a thread that leaves signals to others."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NON_FAULT_SIGNALS)
    with contextlib.suppress(OSError):  # the script has closed one
        while ways:
            awaited = select.poll()
            for source in ways:
                awaited.register(source, select.POLLIN)
            awaited.poll()
            pass_on(ways)
