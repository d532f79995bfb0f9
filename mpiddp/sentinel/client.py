"""The rank's side of its sentinel, the process that watches it and reports for it when it cannot."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import fcntl
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..base.stderr import write_all
from ..failure.rank import RankIdentity
from ..failure.root_cause import Report, ReportKind, RootCause, truncate_report
from ..ipc.channel import Wire
from ..ipc.helper_process import HelperProcess, OwnDescriptors, check_helpers, send_no_signal_on, send_signal_on
from ..output.protocol import Outflow
from ..planning.environment import Endpoint
from ..where import progress  # noqa: F401 (shared with the sentinel, which is forked after that)
from ..where.dumper import Window, caught
from ..where.protocol import Answers, Stacks
from .protocol import (
    END_SIGNAL,
    LAST_S,
    LAUNCHER_S,
    Answer,
    AskMissing,
    Bye,
    Coordinate,
    End,
    Failed,
    Forked,
    Hello,
    JobEnds,
    Join,
    Message,
    Missing,
    Port,
    Ruling,
    ScriptEnded,
    Sent,
    Settled,
    Stage,
    Through,
    Told,
    Unwatched,
    Watched,
)
from .wakeup_fd import Wakeup

Awaited = TypeVar("Awaited", Port, Ruling, Missing, End)

END_S = 1.0  # for an `End`, which comes before its signal; another thread may be reading it
LATE_END_S = 0.01  # for one beside another reason for the signal
LISTENING_S = 30.0  # for the sentinel to listen: from a cold file system it may have to be loaded yet
ANSWER_S = 4.0  # for the sentinel to answer; its coordinator may take SEARCHING_S to rule
READING_S = 0.1  # for one read: another thread, or a signal's handler, may have read the answer
CONNECTING_S = 2.0  # to the coordinator, and for its proof


class SentinelHandle:
    """Forks the sentinel of this process and talks to it; where that is killed, to the coordinator."""

    def __init__(self, watched: Watched, watch: Callable[[Wire, socket.socket, int, Watched, float], None]) -> None:
        """Fork the sentinel that watches this process; `watch` is what it does, as in sentinel/process.py."""
        self.start = time.monotonic()
        self._signals, self._its_signals = socket.socketpair()  # open without a sentinel, too: a signal is no error
        pid = os.getpid()
        self._helper = HelperProcess(f"the sentinel of {watched.who}",
                                     lambda channel: watch(channel, self._its_signals, pid, watched, self.start),
                                     kept=(self._its_signals.fileno(),))
        self._channel = self._helper.channel  # the coordinator's, once the sentinel is dead
        self._descriptors = OwnDescriptors()
        self._stderr = 2  # as the launcher gave it
        with contextlib.suppress(OSError):
            self._stderr = self._descriptors.keep(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3))
        self._is_watched = True
        self._joined: Join | None = None
        self._inbox: dict[type[Message], Message] = {}
        self._hears_crashes = False
        self._wakeup: Wakeup | None = None
        self._window: Window | None = None
        self._stop_telling: Callable[[], object] = bool  # of programs that the script starts
        self._end: Callable[[int], object] = sys.exit
        self._script_ended: ScriptEnded | None = None
        self._reported = self._is_parked = False  # why this rank fails; the ruling lets it wait for the job's end
        self._is_ending = False  # the job ends, as the coordinator has told this rank

    def stage(self, name: str) -> None:
        """Tell the stage that begins."""
        self._channel.send(Stage(name))

    def answer(self, token: str, port: int = 0) -> int:
        """Let this sentinel answer whoever connects to this node, and return the port; 0 where it cannot.

        It listens on `port`, or on a free one if that is 0.
        """
        return self._listen(Answer(token, port))

    def coordinate(self, address: str, token: str, ranks: int, port: int = 0) -> int:
        """Let this sentinel coordinate those of so many ranks, and return the port of `address` on which it listens.

        That is `port`, or a free one if that is 0. Returns 0 where it cannot. It answers strangers no more. This
        process has the port, too: so the other sentinels see that it is alive when its own sentinel is not.
        """
        return self._listen(Coordinate(address, token, ranks, port))

    def _listen(self, request: Answer | Coordinate) -> int:
        self._channel.send(request)
        port = self._await(Port, LISTENING_S)
        while port is not None and port.asked != type(request).__name__:  # a late answer to another one
            port = self._await(Port, LISTENING_S)
        if port is None or not port.number:
            return 0
        if isinstance(request, Coordinate):
            self._descriptors.keep(self._channel.take_descriptor())
        return port.number

    def join(self, member: RankIdentity, endpoint: Endpoint, end: Callable[[int], object]) -> None:
        """Tell the sentinel who its rank is and where the coordinator listens.

        When the job ends, `end` is called with its exit status. From now on a script finds no trace of the fork, and
        a sentinel that is killed is missed.
        """
        self._end = end
        signal.signal(END_SIGNAL, self._on_end_signal)
        self._joined = Join(member, endpoint.address, endpoint.watch_port, endpoint.watch_token)
        self._channel.send(self._joined)
        self._helper.watch(self._go_on_unwatched)

    def watch_script(self, outflow: int = -1) -> None:
        """Let the sentinel know of the script's crashes, forks and signals; what others handle already is theirs.

        By the socket `outflow`, unless it is -1, it reaches the relay of the rank's output.
        """
        self._channel.send(Stage(""))
        os.register_at_fork(after_in_child=self._in_child)
        if not self._is_watched:
            return
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._channel.fileno())
                self._hears_crashes = True
        with contextlib.suppress(OSError):
            self._window = Window()
            ends: list[tuple[Stacks | Answers | Outflow, int]] = [
                (Stacks(self._window.writing), self._window.reading), (Answers(), self._window.its),
                *([(Outflow(), outflow)] if outflow >= 0 else [])]
            for told, descriptor in ends:
                self._channel.send(told, descriptor)
        self._signals.setblocking(False)
        self._wakeup = Wakeup(self._signals.fileno())
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL and not caught([signal.SIGQUIT]):
            signal.signal(signal.SIGQUIT, leave_to_sentinel)
        self._stop_telling = tell_of_programs(lambda pid: self._channel.send(Forked(pid)))

    def release(self) -> None:
        """Let the sentinel know of nothing any more; the process goes on."""
        self._helper.stop_watching()
        if not self._is_watched:
            with contextlib.suppress(OSError):  # the script has closed it
                send_no_signal_on(self._channel.fileno())
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
        """Report why this rank fails, and return what follows from it.

        Where nobody answers, this rank is the first one, unless it has lost another one: then the launcher, which that
        one has asked to end the job, has LAUNCHER_S for it.
        """
        if self._wakeup is not None and self._wakeup.simulated:
            report = report._replace(signal="")
        elif report.signal and (self._wakeup is None or self._wakeup.lent):
            with contextlib.suppress(OSError):
                self._signals.send(bytes([signal.SIGINT]))  # nobody else tells of it
        self._reported = True
        report = truncate_report(report)
        channel = self._channel
        self._channel.send(Failed(report))
        ruling = self._await(Ruling)
        self._helper.check()
        if ruling is None and self._channel is not channel:
            self._channel.send(Failed(report))
            ruling = self._await(Ruling)
        self._helper.stop_watching()
        if ruling is None:
            if report.kind == ReportKind.SECONDARY and not self._is_watched:
                time.sleep(LAUNCHER_S)
            ruling = Ruling(RootCause(report), report.status, True)
        self._is_parked = not ruling.abort
        return ruling

    def told(self, record: str = "") -> bool:
        """Tell that the reason is printed: the other ranks may be ended. The sentinel writes `record` to --error-file.

        This process could not end while a file system holds it up. Return whether there is a sentinel.
        """
        return self._channel.send(Told(record=record if self._is_watched else "")) and self._is_watched

    def through(self) -> None:
        """Tell that this rank, which has failed, has nothing more to do."""
        self._channel.send(Through())

    def script_ended(self, by_exit: Report | None = None) -> None:
        """Tell that the script has come to its end; `by_exit` as in ScriptEnded."""
        self._script_ended = ScriptEnded(by_exit)
        self._channel.send(self._script_ended)

    def missing(self) -> str:
        """Return in words which ranks' scripts have not come to their end, empty where nobody answers."""
        self._channel.send(AskMissing())
        answer = self._await(Missing)
        return answer.names if answer is not None else ""

    def settle(self) -> None:
        """Tell that this rank knows why it ends, and says so itself."""
        self._helper.stop_watching()
        self._channel.send(Settled())

    def dismiss(self) -> None:
        """End the sentinel, and return when it is gone."""
        self._helper.stop_watching()
        self._channel.send(Bye())
        if self._is_watched:
            self._helper.await_end()
            self._say_goodbye()
        self._close()
        self._hear_no_signals()
        self._signals.close()
        self._its_signals.close()
        if self._window is not None:
            self._window.forget()

    def _say_goodbye(self) -> None:
        """Tell the coordinator that this rank leaves in order; a sentinel that was killed may not have passed it on."""
        if (connection := self._channel.take_descriptor()) >= 0:
            coordinator = Wire(socket.socket(fileno=connection))
            coordinator.send(Bye())
            coordinator.close()

    def _close(self) -> None:
        self._descriptors.close()
        self._helper.close()
        self._channel.close()

    def _await(self, kind: type[Awaited], timeout_s: float = ANSWER_S) -> Awaited | None:
        """Return the next message of a kind, None where none comes; those of other kinds are kept.

        A signal's handler may wait for one while the script's thread waits for another.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError, OSError):
            while kind not in self._inbox and (left_s := deadline - time.monotonic()) > 0:
                self._read(min(left_s, READING_S))
        found = self._inbox.pop(kind, None)
        return found if isinstance(found, kind) else None

    def _read(self, timeout_s: float) -> None:
        """Put the messages of one read into the inbox; raise EOFError or OSError where the other end is gone."""
        with contextlib.suppress(TimeoutError):
            for message in self._channel.receive(timeout_s):
                self._inbox[type(message)] = message

    def _drain(self) -> None:
        """Put into the inbox what has come by now."""
        with contextlib.suppress(EOFError, OSError):
            while messages := self._channel.receive(0):
                self._inbox.update((type(message), message) for message in messages)

    def _on_end_signal(self, *_: object) -> None:
        """End as the sentinel has told before, or as the coordinator tells; if a helper is gone, do without it."""
        is_late = check_helpers()
        if self._is_watched:
            if (end := self._await(End, LATE_END_S if is_late else END_S)) is not None:
                self._end(end.status)
        else:
            self._obey_coordinator()

    def _go_on_unwatched(self) -> None:
        """Do without the sentinel, which was killed, and let the coordinator know."""
        assert self._joined
        self._is_watched = False
        self._drain()  # what it has said last
        connection = self._channel.take_descriptor()
        self._stop_telling()
        if self._hears_crashes:
            show_crashes()
            self._hears_crashes = False
        if self._window is not None:
            self._window.end()
            self._window.forget()
            self._window = None
        if self._joined.member.rank == 0:
            self._say("the rank goes on unwatched, and nobody decides which rank fails first: each reports by itself; "
                      "nobody can be asked where the ranks are, and --stall sees no hang")
            return
        self._say("the rank goes on unwatched: if it is killed, nobody sees how, and nobody can ask where it is")
        try:
            self._meet_coordinator(connection)
        except (EOFError, OSError) as error:
            self._say(f"and the coordinator does not answer ({error or 'it has hung up'})")

    def _meet_coordinator(self, connection: int) -> None:
        """Speak with the coordinator from now on, over the sentinel's connection, or a new one if that is -1."""
        assert self._joined
        member, address, port, token = self._joined
        if connection >= 0:
            sock = socket.socket(fileno=connection)
        elif port:
            from ..ipc.listener import connect

            sock = connect((address, port), token, CONNECTING_S, CONNECTING_S)
        else:
            return
        self._channel = Wire(sock)
        greeting: list[Sent] = [Hello(member.rank, member.host, member.pid, member.namespace), Unwatched()]
        for message in [*greeting, self._script_ended] if self._script_ended is not None else greeting:
            self._channel.send(message)
        send_signal_on(self._channel.fileno())
        os.kill(os.getpid(), END_SIGNAL)  # something may have come before

    def _obey_coordinator(self) -> None:
        """Do what the coordinator has told this rank, which has no sentinel that would do it."""
        self._drain()
        end, ends = self._inbox.pop(End, None), self._inbox.pop(JobEnds, None)
        if isinstance(end, End):  # of the sentinel's, before it was killed
            self._end(end.status)
        if isinstance(ends, JobEnds):
            if not self._is_ending and self._joined is not None:
                self._is_ending = True
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    _thread.start_new_thread(kill_in, (self._joined.member.grace_s + LAST_S,))
            if ends.abort and (ends.waits or self._is_parked or not self._reported):
                self._end(ends.status)

    def _say(self, words: str) -> None:
        """Print where the launcher reads, whatever the script has made of its own stderr."""
        with contextlib.suppress(OSError):
            stderr = self._stderr if self._descriptors.has(self._stderr) else 2
            write_all(stderr, f"mpiddp: {self._helper.name} exited unexpectedly: {words}\n".encode(errors="replace"))

    def _hear_no_signals(self) -> None:
        if self._wakeup is not None:
            self._wakeup.end()
            self._wakeup = None

    def _in_child(self) -> None:
        """Tell of a child that the script has forked, which then has nothing to do with the sentinel any more."""
        if self._channel.fileno() < 0:
            return
        if self._is_watched:
            self._channel.send(Forked(os.getpid()))
        self._descriptors.close()
        self._helper.forget()
        self._channel.close()
        self._hear_no_signals()
        if self._hears_crashes:  # the stack would go into whatever file gets the number of our end of the channel
            show_crashes()


def kill_in(seconds: float) -> None:
    """Kill this process after a while, in a thread: nobody else does."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def show_crashes() -> None:
    """Let faulthandler print to stderr."""
    faulthandler.disable()
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(file=2)


def leave_to_sentinel(*_: object) -> None:
    """Be the handler of SIGQUIT: the sentinel hears of it, and asks where the ranks are."""


def tell_of_programs(tell: Callable[[int], object]) -> Callable[[], None]:
    """Call `tell` with the process of each program that subprocess or multiprocessing starts; return what undoes this.

    os.register_at_fork() does not see them: both start programs by the same function of C.
    """
    import _posixsubprocess

    start = _posixsubprocess.fork_exec

    @functools.wraps(start)
    def started(*arguments: Any) -> int:
        pid: int = start(*arguments)
        tell(pid)
        return pid

    # subprocess may have imported the function by name
    places = [(_posixsubprocess, "fork_exec"), (sys.modules.get("subprocess"), "_fork_exec")]
    replace(places, start, started)
    return functools.partial(replace, places, started, start)


def replace(places: list[tuple[Any, str]], former: object, new: object) -> None:
    """Put a function in the place of another one, wherever that still is."""
    for module, name in places:
        if getattr(module, name, None) is former:
            setattr(module, name, new)
