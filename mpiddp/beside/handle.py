"""The rank's handle of its sentinel, the process that watches it and reports for it where it cannot.

MPI_Init holds the interpreter, and a rank may be stuck in native code or killed: no thread of the rank can
tell of that. The sentinel is forked before MPI and torch are there. The rank tells it what it does, and ends
it when it leaves the job in order. `process.py` is the sentinel's own side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
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
from ..say import say
from .detached import fork_detached, reap
from .ends import Ends, has_ended, open_ends, spawn_sentinel
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
from .wakeup import Wakeup
from .wire import Wire

Awaited = TypeVar("Awaited", Port, Ruling, Missing, End)

F_SETSIG = 10  # (asm-generic/fcntl.h): which signal tells of a descriptor
SETTLING_S = 10.0  # between two sentinels that are killed; sooner than that, none takes their place
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
                                      kept=(its.wire.fileno(), its.life, self._its_signals.fileno()))
        its.close()
        self._watched = watched
        self._wire, self._life = Wire(ours.wire), ours.life
        self._inbox: dict[type[Message], Message] = {}
        self._hears_crashes = False
        self._wakeup: Wakeup | None = None
        self._end: Callable[[int], object] = sys.exit
        self._told_before: list[Coordinate | Join | ScriptEnded | Failed] = []  # what another sentinel has to know
        self._port = self._reached = -1  # descriptors that the sentinel has, too: see `Port` and `Reached`
        self._replaceable = False
        self._replaced_s = -1e9

    def stage(self, name: str) -> None:
        """Tell the stage that begins."""
        self._wire.send(Stage(name))

    def answer(self, token: str) -> int:
        """Let this sentinel answer whoever connects to this node, and return the port; 0 where it cannot."""
        return self._listen(Answer(token))

    def coordinate(self, address: str, token: str, ranks: int) -> int:
        """Let this sentinel coordinate those of so many ranks, and return the port of `address` on which it listens.

        Returns 0 where it cannot. It answers strangers no more.
        """
        return self._listen(Coordinate(address, token, ranks))

    def _listen(self, request: Answer | Coordinate) -> int:
        self._wire.send(request)
        port = self._await(Port)
        if port is None or not port.number:
            return 0
        if isinstance(request, Coordinate):
            self._told_before.append(request)
            self._port = self._wire.take_descriptor()
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
        self._told_before.append(joined)
        self._wire.send(joined)
        self._replaceable = True
        self._await_death()

    def watch_script(self) -> None:
        """Let the sentinel know of the script's crashes, forks and signals; what others handle already is theirs."""
        self._wire.send(Stage(""))
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._wire.fileno())
                self._hears_crashes = True
        self._signals.setblocking(False)
        self._wakeup = Wakeup(self._signals.fileno())
        os.register_at_fork(after_in_child=self._in_child)

    def release(self) -> None:
        """Let the sentinel know of nothing any more; the process goes on."""
        self._stay_alone()
        if self._hears_crashes:
            faulthandler.disable()
        self._hear_no_signals()
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(END_SIGNAL, signal.SIG_DFL)

    def report(self, report: Report) -> Ruling:
        """Report why this rank fails, and return what follows from it."""
        failed = Failed(brief(report))
        self._told_before.append(failed)
        self._wire.send(failed)
        before_s = self._replaced_s
        ruling = self._await(Ruling)
        if ruling is None:
            self._replace_if_gone()
            if self._replaced_s != before_s:
                ruling = self._await(Ruling)
        self._replaceable = False
        report = failed.report
        return ruling if ruling is not None else Ruling(Verdict(report), report.status, True)

    def told(self) -> None:
        """Tell that the reason is printed: the other ranks may be ended."""
        self._wire.send(Told())

    def through(self) -> None:
        """Tell that this rank, which has failed, has nothing more to do."""
        self._wire.send(Through())

    def script_ended(self) -> None:
        """Tell that the script has come to its end."""
        self._told_before.append(ScriptEnded())
        self._wire.send(ScriptEnded())

    def missing(self) -> str:
        """Return in words which ranks' scripts have not come to their end, empty where nobody answers."""
        self._wire.send(AskMissing())
        answer = self._await(Missing)
        return answer.names if answer is not None else ""

    def settle(self) -> None:
        """Tell that this rank knows why it ends, and says so itself."""
        self._replaceable = False
        self._wire.send(Settled())

    def dismiss(self) -> None:
        """End the sentinel, and return when it is gone."""
        self._stay_alone()
        is_there = self._wire.send(Bye())
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._wire.receive()
        if not is_there:
            self._take_leave()
        self._hear_no_signals()
        self._signals.close()
        self._its_signals.close()
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

    def _on_end_signal(self, *_: object) -> None:
        """End as the sentinel tells; if it is gone instead, let another take its place."""
        message = self._await(End)
        if message is not None or not has_ended(self._life):
            self._end(message.status if message is not None else 1)
        else:
            self._replace_if_gone()

    def _replace_if_gone(self) -> None:
        if self._replaceable and has_ended(self._life):
            self._replace()

    def _await_death(self) -> None:
        """Let END_SIGNAL come, too, when the sentinel is gone: the kernel closes its end of a pipe then."""
        fcntl.fcntl(self._life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._life, F_SETSIG, END_SIGNAL)
        fcntl.fcntl(self._life, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
        if has_ended(self._life):
            self._on_end_signal()

    def _stay_alone(self) -> None:
        """Miss the sentinel no more."""
        self._replaceable = False
        if self._life >= 0:
            os.close(self._life)
            self._life = -1

    def _replace(self) -> None:
        """Start another sentinel, and tell it what the one before knew.

        Meanwhile the connection to the coordinator, or its port, is open: this process has it, too.
        """
        self._keep_connection()
        who = self._watched.who
        try:
            ours = self._spawn()
        except OSError as error:
            self._replaceable = False
            say(f"mpiddp: the sentinel of {who} was killed, and no other is started ({error}): "
                "this rank is not watched any more")
            return
        self._wire.replace(ours.wire)
        os.close(self._life)
        self._life = ours.life
        self._wire.send(Stage(""))
        for message in self._told_before:
            self._wire.send(message, self._port if isinstance(message, Coordinate) else -1)
        say(f"mpiddp: the sentinel of {who} was killed; another one watches this rank now")
        self._replaced_s = time.monotonic()
        self._await_death()

    def _spawn(self) -> Ends:
        if time.monotonic() - self._replaced_s < SETTLING_S:
            raise OSError("so was the one before")
        ours, its = open_ends()
        try:
            spawn_sentinel(its, self._its_signals.fileno(), self._watched, self.start)
        except OSError:
            ours.close()
            raise
        finally:
            its.close()
        return ours

    def _keep_connection(self) -> None:
        if (descriptor := self._wire.take_descriptor()) >= 0:
            if self._reached >= 0:
                os.close(self._reached)
            self._reached = descriptor

    def _take_leave(self) -> None:
        """Tell the coordinator in the place of a sentinel that is gone that this rank leaves in order."""
        self._keep_connection()
        if self._reached >= 0:
            connection = Wire(socket.socket(fileno=self._reached))
            connection.send(Bye())
            connection.close()

    def _hear_no_signals(self) -> None:
        if self._wakeup is not None:
            self._wakeup.end()
            self._wakeup = None

    def _in_child(self) -> None:
        """Tell of a child that the script has forked, which then has nothing to do with the sentinel any more."""
        if self._wire.fileno() < 0:
            return
        self._wire.send(Forked(os.getpid()))
        self._stay_alone()
        for descriptor in (self._port, self._reached):
            if descriptor >= 0:
                os.close(descriptor)
        self._port = self._reached = -1
        self._hear_no_signals()
        if self._hears_crashes:  # the stack would go into whatever file gets the number of our end of the wire
            faulthandler.disable()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=2)
        self._wire.close()
