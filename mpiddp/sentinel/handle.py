"""A rank's end of its sentinel: a small process that speaks for the rank where it cannot itself.

MPI_Init holds the interpreter, a rank may be stuck in native code or killed: no thread of it can tell
then. The sentinel is forked before MPI and torch are there, learns from the rank what it does, and is
gone when the rank leaves the job in order (`watcher.py` is the process itself).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from ..plan.environment import Endpoint
from ..plan.member import Member
from ..plan.verdict import Report, Verdict, brief
from .detached import fork_detached, reap
from .wire import END, Message, Wire, read_verdict

RULING_S = 4.0  # the coordinator needs SEARCHING_S, and a way to it


class Ruling(NamedTuple):
    """What a rank that failed has to do: `verdict` is for it to print, None where another was first.

    `status` is the job's exit status. `abort` tells that the rank has to end the others.
    """

    verdict: Verdict | None
    status: int
    abort: bool


class Sentinel:
    """Forks the sentinel of this process and talks to it; a sentinel that is gone is not missed."""

    def __init__(
        self, who: str, speaks: bool, step: str | None, hosts: Callable[[], list[str]], timeout_s: float
    ) -> None:
        """Fork the sentinel of rank `who`; it speaks of what a whole node waits for only where `speaks`.

        `step` is the Slurm step of the rank, which is cancelled if it comes to the worst. `hosts` gives
        those that are asked whether they answer when the rank waits for others; none on most ranks.
        """
        self.start = time.monotonic()
        ours, its = socket.socketpair()
        self._signals, its_signals = socket.socketpair()
        rank = os.getpid()

        def main() -> None:
            from .watcher import watch  # the rank itself does not wait for what this needs

            watch(Wire(its), its_signals, rank, who, speaks, step, hosts, timeout_s)

        self._forking = fork_detached(main, kept=(its.fileno(), its_signals.fileno()))
        its.close()
        its_signals.close()
        self._wire = Wire(ours)
        self._inbox: dict[str, Message] = {}
        self._hears_crashes = False

    def stage(self, name: str) -> None:
        """Tell the stage that begins."""
        self._wire.send(stage=name)

    def serve(self, address: str, token: str) -> int:
        """Let this sentinel coordinate the job's, and return the port of `address` on which it listens.

        Returns 0 where it cannot.
        """
        self._wire.send(serve=address, token=token)
        return int(self._await("port").get("port", 0))

    def join(self, member: Member, endpoint: Endpoint, end: Callable[[int], object]) -> None:
        """Tell the sentinel who its rank is and where the coordinator listens; when the job ends `end` is called.

        What a script might find of the fork is gone then.
        """
        reap(self._forking)
        signal.signal(END, lambda *_: end(int(self._await("end").get("end", 1))))
        self._wire.send(join=member._asdict(), address=endpoint.address, port=endpoint.watch_port, token=endpoint.token)

    def watch_script(self) -> None:
        """Begin with the script: let crashes, forks and signals be told, where nobody else wants to be told."""
        self._wire.send(stage="")
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._wire.fileno())
                self._hears_crashes = True
        self._signals.setblocking(False)
        if (other := signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)) >= 0:
            signal.set_wakeup_fd(other)
        os.register_at_fork(after_in_child=self._in_child)

    def release(self) -> None:
        """Be told nothing any more; the process goes on."""
        if self._hears_crashes:
            faulthandler.disable()
        with contextlib.suppress(ValueError):  # not in the main thread
            self._hear_no_signals()
            signal.signal(END, signal.SIG_DFL)

    def _hear_no_signals(self) -> None:
        if (descriptor := signal.set_wakeup_fd(-1)) != self._signals.fileno():  # the script's own
            signal.set_wakeup_fd(descriptor)

    def ask(self, report: Report) -> Ruling:
        """Return what follows from the failure of this rank."""
        report = brief(report)
        self._wire.send(failed=report._asdict())
        answer = self._await("ruling")
        if not answer:
            return Ruling(Verdict(report), report.status, True)
        verdict = read_verdict(answer["ruling"]) if answer["ruling"] else None
        return Ruling(verdict, verdict.first.status if verdict else answer["status"], answer["abort"])

    def spoken(self) -> None:
        """Tell that the reason is on the screen: the other ranks may be ended."""
        self._wire.send(spoken=True)

    def through(self) -> None:
        """Tell that this rank, which has failed, has nothing more to do."""
        self._wire.send(through=True)

    def left(self) -> None:
        """Tell that the script has come to its end."""
        self._wire.send(left=True)

    def settle(self) -> None:
        """Tell that this rank knows why it ends, and says so itself."""
        self._wire.send(settled=True)

    def dismiss(self) -> None:
        """End the sentinel, and return when it is gone."""
        self._wire.send(bye=True)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._wire.receive()
        with contextlib.suppress(ValueError):
            self._hear_no_signals()
            self._signals.close()
        self._wire.close()

    def _await(self, key: str) -> Message:
        """Return the next message that has a key, an empty one where none comes; others wait for their turn.

        A signal's handler may ask for one while the script's thread waits for another.
        """
        deadline = time.monotonic() + RULING_S
        with contextlib.suppress(EOFError, OSError):
            while key not in self._inbox and (left_s := deadline - time.monotonic()) > 0:
                for message in self._wire.receive(left_s):
                    self._inbox.update(dict.fromkeys(message, message))
        return self._inbox.pop(key, {})

    def _in_child(self) -> None:
        if self._wire.fileno() < 0:
            return
        self._wire.send(forked=os.getpid())
        with contextlib.suppress(ValueError):
            self._hear_no_signals()
        if self._hears_crashes:  # the stack would go into whatever file gets the number of our end of the wire
            faulthandler.disable()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=2)
        self._wire.close()
