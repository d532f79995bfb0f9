"""The rank's handle of its sentinel, the process that watches it and reports for it where it cannot.

MPI_Init holds the interpreter, and a rank may be stuck in native code or killed: no thread of the rank can
tell of that. The sentinel is forked before MPI and torch are there. The rank tells it what it does, and ends
it when it leaves the job in order. `process.py` is the sentinel's own side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from ..plan.environment import Endpoint
from ..plan.member import Member
from ..plan.verdict import Report, Verdict, brief
from .detached import fork_detached, reap
from .messages import (
    END_SIGNAL,
    Bye,
    Coordinate,
    End,
    Failed,
    Forked,
    Join,
    Message,
    Port,
    Ruling,
    ScriptEnded,
    Settled,
    Stage,
    Through,
    Told,
    Watched,
)
from .wire import Wire

Awaited = TypeVar("Awaited", Port, Ruling, End)

ANSWER_S = 4.0  # for the sentinel to answer; its coordinator may take SEARCHING_S to rule


class SentinelHandle:
    """Forks the sentinel of this process and talks to it; a sentinel that is gone is not missed."""

    def __init__(self, watched: Watched) -> None:
        """Fork the sentinel that watches this process."""
        self.start = time.monotonic()
        ours, its = socket.socketpair()
        self._signals, its_signals = socket.socketpair()
        pid = os.getpid()

        def main() -> None:
            from .process import watch  # the rank itself does not wait for what this needs

            watch(Wire(its), its_signals, pid, watched)

        self._forking = fork_detached(main, kept=(its.fileno(), its_signals.fileno()))
        its.close()
        its_signals.close()
        self._wire = Wire(ours)
        self._inbox: dict[type[Message], Message] = {}
        self._hears_crashes = False

    def stage(self, name: str) -> None:
        """Tell the stage that begins."""
        self._wire.send(Stage(name))

    def coordinate(self, address: str, token: str, ranks: int) -> int:
        """Let this sentinel coordinate those of so many ranks, and return the port of `address` on which it listens.

        Returns 0 where it cannot.
        """
        self._wire.send(Coordinate(address, token, ranks))
        port = self._await(Port)
        return port.number if port is not None else 0

    def join(self, member: Member, endpoint: Endpoint, end: Callable[[int], object]) -> None:
        """Tell the sentinel who its rank is and where the coordinator listens.

        When the job ends, `end` is called with its exit status. From now on a script finds no trace of the fork.
        """
        reap(self._forking)

        def end_as_told(*_: object) -> None:
            message = self._await(End)
            end(message.status if message is not None else 1)

        signal.signal(END_SIGNAL, end_as_told)
        self._wire.send(Join(member, endpoint.address, endpoint.watch_port, endpoint.watch_token))

    def watch_script(self) -> None:
        """Let the sentinel know of the script's crashes, forks and signals; what others handle already is theirs."""
        self._wire.send(Stage(""))
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._wire.fileno())
                self._hears_crashes = True
        self._signals.setblocking(False)
        if (other := signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)) >= 0:
            signal.set_wakeup_fd(other)
        os.register_at_fork(after_in_child=self._in_child)

    def release(self) -> None:
        """Let the sentinel know of nothing any more; the process goes on."""
        if self._hears_crashes:
            faulthandler.disable()
        with contextlib.suppress(ValueError):  # not in the main thread
            self._hear_no_signals()
            signal.signal(END_SIGNAL, signal.SIG_DFL)

    def report(self, report: Report) -> Ruling:
        """Report why this rank fails, and return what follows from it."""
        report = brief(report)
        self._wire.send(Failed(report))
        ruling = self._await(Ruling)
        return ruling if ruling is not None else Ruling(Verdict(report), report.status, True)

    def told(self) -> None:
        """Tell that the reason is printed: the other ranks may be ended."""
        self._wire.send(Told())

    def through(self) -> None:
        """Tell that this rank, which has failed, has nothing more to do."""
        self._wire.send(Through())

    def script_ended(self) -> None:
        """Tell that the script has come to its end."""
        self._wire.send(ScriptEnded())

    def settle(self) -> None:
        """Tell that this rank knows why it ends, and says so itself."""
        self._wire.send(Settled())

    def dismiss(self) -> None:
        """End the sentinel, and return when it is gone."""
        self._wire.send(Bye())
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._wire.receive()
        with contextlib.suppress(ValueError):
            self._hear_no_signals()
            self._signals.close()
        self._wire.close()

    def _await(self, kind: type[Awaited]) -> Awaited | None:
        """Return the next message of a kind, None where none comes; those of other kinds are kept.

        A signal's handler may wait for one while the script's thread waits for another.
        """
        deadline = time.monotonic() + ANSWER_S
        with contextlib.suppress(EOFError, OSError):
            while kind not in self._inbox and (left_s := deadline - time.monotonic()) > 0:
                for message in self._wire.receive(left_s):
                    self._inbox[type(message)] = message
        found = self._inbox.pop(kind) if kind in self._inbox else None
        return found if isinstance(found, kind) else None

    def _hear_no_signals(self) -> None:
        if (descriptor := signal.set_wakeup_fd(-1)) != self._signals.fileno():  # the script's own
            signal.set_wakeup_fd(descriptor)

    def _in_child(self) -> None:
        """Tell of a child that the script has forked, which then has nothing to do with the sentinel any more."""
        if self._wire.fileno() < 0:
            return
        self._wire.send(Forked(os.getpid()))
        with contextlib.suppress(ValueError):
            self._hear_no_signals()
        if self._hears_crashes:  # the stack would go into whatever file gets the number of our end of the wire
            faulthandler.disable()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=2)
        self._wire.close()
