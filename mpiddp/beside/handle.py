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
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from ..plan.environment import Endpoint
from ..plan.member import Member
from ..plan.verdict import Report, Verdict, brief
from . import progress  # noqa: F401 (shared with the sentinel, which is forked after that)
from .asking import Answers, Stacks
from .detached import fork_detached, reap
from .ends import open_ends
from .messages import (
    END_SIGNAL,
    Answer,
    AskMissing,
    Bye,
    Coordinate,
    End,
    Failed,
    Forked,
    Join,
    Message,
    Missing,
    Port,
    Ruling,
    ScriptEnded,
    Settled,
    Stage,
    Through,
    Told,
    Watched,
)
from .outflow import Outflow
from .programs import tell_of_programs
from .succession import Succession
from .wakeup import Wakeup
from .window import Window, caught
from .wire import Wire

Awaited = TypeVar("Awaited", Port, Ruling, Missing, End)

END_S = 1.0  # for an `End`, which comes before its signal; another thread may be reading it
LATE_END_S = 0.01  # for one beside another reason for the signal
LISTENING_S = 30.0  # for the sentinel to listen: from a cold file system it may have to be loaded yet
ANSWER_S = 4.0  # for the sentinel to answer; its coordinator may take SEARCHING_S to rule


class SentinelHandle:
    """Forks the sentinel of this process and talks to it; another one takes the place of one that is killed."""

    def __init__(self, watched: Watched, watch: Callable[[Wire, socket.socket, int, Watched, float], None]) -> None:
        """Fork the sentinel that watches this process; `watch` is what it does, as in sentinel/process.py."""
        self.start = time.monotonic()
        ours, its = open_ends()
        self._signals, self._its_signals = socket.socketpair()  # open without a sentinel, too: a signal is no error
        pid = os.getpid()
        self._forking = fork_detached(lambda: watch(Wire(its.wire), self._its_signals, pid, watched, self.start),
                                      kept=(its.wire.fileno(), its.life, self._its_signals.fileno()),
                                      name=f"the sentinel of {watched.who}")
        its.close()
        self._wire = Wire(ours.wire)
        self._succession = Succession(self._wire, ours.life, self._its_signals.fileno(), watched, self.start)
        self._inbox: dict[type[Message], Message] = {}
        self._hears_crashes = False
        self._wakeup: Wakeup | None = None
        self._window: Window | None = None
        self._stop_telling: Callable[[], object] = bool  # of programs that the script starts
        self._end: Callable[[int], object] = sys.exit
        self._replace_relay: Callable[[], bool] = bool

    def stage(self, name: str) -> None:
        """Tell the stage that begins."""
        self._wire.send(Stage(name))

    def answer(self, token: str, port: int = 0) -> int:
        """Let this sentinel answer whoever connects to this node, and return the port; 0 where it cannot.

        It listens on `port`, or on a free one if that is 0.
        """
        return self._listen(Answer(token, port))

    def coordinate(self, address: str, token: str, ranks: int, port: int = 0) -> int:
        """Let this sentinel coordinate those of so many ranks, and return the port of `address` on which it listens.

        That is `port`, or a free one if that is 0. Returns 0 where it cannot. It answers strangers no more.
        """
        return self._listen(Coordinate(address, token, ranks, port))

    def _listen(self, request: Answer | Coordinate) -> int:
        self._wire.send(request)
        port = self._await(Port, LISTENING_S)
        while port is not None and port.asked != type(request).__name__:  # a late answer to another one
            port = self._await(Port, LISTENING_S)
        if port is None or not port.number:
            return 0
        if isinstance(request, Coordinate):
            self._succession.note(request, self._wire.take_descriptor())
        return port.number

    def join(self, member: Member, endpoint: Endpoint, end: Callable[[int], object]) -> None:
        """Tell the sentinel who its rank is and where the coordinator listens.

        When the job ends, `end` is called with its exit status. From now on a script finds no trace of the fork, and
        a sentinel that is killed is missed.
        """
        reap(self._forking)
        self._end = end
        signal.signal(END_SIGNAL, self._on_end_signal)
        joined = Join(member, endpoint.address, endpoint.watch_port, endpoint.watch_token)
        self._succession.note(joined)
        self._wire.send(joined)
        self._succession.begin()

    def watch_script(self, outflow: int = -1, replace_relay: Callable[[], bool] = bool) -> None:
        """Let the sentinel know of the script's crashes, forks and signals; what others handle already is theirs.

        By the socket `outflow`, unless it is -1, it reaches the relay of the rank's output. `replace_relay` is called
        when the sentinel or that relay may be gone, and tells whether it was the relay.
        """
        self._replace_relay = replace_relay
        self._replace_relay()  # no signal has told of one that has been gone since the start
        self._wire.send(Stage(""))
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._wire.fileno())
                self._hears_crashes = True
        with contextlib.suppress(OSError):
            self._window = Window()
            ends: list[tuple[Stacks | Answers | Outflow, int]] = [
                (Stacks(self._window.writing), self._window.reading), (Answers(), self._window.its),
                *([(Outflow(), outflow)] if outflow >= 0 else [])]
            for told, descriptor in ends:
                self._succession.note(told, descriptor)
                self._wire.send(told, descriptor)
        self._signals.setblocking(False)
        self._wakeup = Wakeup(self._signals.fileno())
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL and not caught([signal.SIGQUIT]):
            signal.signal(signal.SIGQUIT, leave_to_sentinel)
        os.register_at_fork(after_in_child=self._in_child)
        self._stop_telling = tell_of_programs(lambda pid: self._wire.send(Forked(pid)))

    def release(self) -> None:
        """Let the sentinel know of nothing any more; the process goes on."""
        self._succession.stop()
        self._stop_telling()
        if self._hears_crashes:
            faulthandler.disable()
        if self._window is not None:
            self._window.end()
        self._hear_no_signals()
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(END_SIGNAL) == self._on_end_signal:
                signal.signal(END_SIGNAL, signal.SIG_DFL)
            if signal.getsignal(signal.SIGQUIT) == leave_to_sentinel:
                signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    def report(self, report: Report) -> Ruling:
        """Report why this rank fails, and return what follows from it."""
        if self._wakeup is not None and self._wakeup.simulated:
            report = report._replace(signal="")
        elif report.signal and (self._wakeup is None or self._wakeup.lent):
            with contextlib.suppress(OSError):
                self._signals.send(bytes([signal.SIGINT]))  # nobody else tells of it
        failed = Failed(brief(report))
        self._succession.note(failed)
        self._wire.send(failed)
        before = self._succession.number
        ruling = self._await(Ruling)
        if ruling is None:
            self._succession.replace_if_gone()
            if self._succession.number != before:
                ruling = self._await(Ruling)
        self._succession.stop()
        report = failed.report
        return ruling if ruling is not None else Ruling(Verdict(report), report.status, True)

    def told(self, record: str = "") -> bool:
        """Tell that the reason is printed: the other ranks may be ended. The sentinel writes `record` to --error-file.

        This process could not end while a file system holds it up. Return whether there is a sentinel.
        """
        return self._wire.send(Told(record=record))

    def through(self) -> None:
        """Tell that this rank, which has failed, has nothing more to do."""
        self._wire.send(Through())

    def script_ended(self, by_exit: Report | None = None) -> None:
        """Tell that the script has come to its end; `by_exit` as in ScriptEnded."""
        ended = ScriptEnded(by_exit)
        self._succession.note(ended)
        self._wire.send(ended)

    def missing(self) -> str:
        """Return in words which ranks' scripts have not come to their end, empty where nobody answers."""
        self._wire.send(AskMissing())
        answer = self._await(Missing)
        return answer.names if answer is not None else ""

    def settle(self) -> None:
        """Tell that this rank knows why it ends, and says so itself."""
        self._succession.stop()
        self._wire.send(Settled())

    def dismiss(self) -> None:
        """End the sentinel, and return when it is gone."""
        self._succession.stop()
        is_there = self._wire.send(Bye())
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._wire.receive()
        if not is_there:
            self._succession.take_leave()
        self._succession.close()
        self._hear_no_signals()
        self._signals.close()
        self._its_signals.close()
        self._wire.close()
        if self._window is not None:
            self._window.forget()

    def _await(self, kind: type[Awaited], timeout_s: float = ANSWER_S) -> Awaited | None:
        """Return the next message of a kind, None where none comes; those of other kinds are kept.

        A signal's handler may wait for one while the script's thread waits for another.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError, OSError):
            while kind not in self._inbox and (left_s := deadline - time.monotonic()) > 0:
                for message in self._wire.receive(left_s):
                    self._inbox[type(message)] = message
        found = self._inbox.pop(kind) if kind in self._inbox else None
        return found if isinstance(found, kind) else None

    def _on_end_signal(self, *_: object) -> None:
        """End as the sentinel has told before; if it is gone instead, or the relay is, let something take its place."""
        patience_s = LATE_END_S if self._replace_relay() else END_S
        if (message := self._await(End, patience_s)) is not None:
            self._end(message.status)
        self._succession.replace_if_gone()

    def _hear_no_signals(self) -> None:
        if self._wakeup is not None:
            self._wakeup.end()
            self._wakeup = None

    def _in_child(self) -> None:
        """Tell of a child that the script has forked, which then has nothing to do with the sentinel any more."""
        if self._wire.fileno() < 0:
            return
        self._wire.send(Forked(os.getpid()))
        self._succession.close()
        self._hear_no_signals()
        if self._hears_crashes:  # the stack would go into whatever file gets the number of our end of the wire
            faulthandler.disable()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=2)
        with contextlib.suppress(OSError):
            self._wire.close()


def leave_to_sentinel(*_: object) -> None:
    """Be the handler of SIGQUIT: the sentinel hears of it, and asks where the ranks are."""
