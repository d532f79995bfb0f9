"""The sentinel process: it carries out what its logic wants, and tells it what happens.

It knows neither MPI nor torch. While the rank works it sleeps. What goes wrong in one action, or with one event, is
told in a line, and the sentinel goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ..base.stderr import write_line
from ..base.text import fold_hosts, truncate_middle
from ..discovery.process import WatchedProcess
from ..failure.report import format_error_file, print_failure
from ..ipc.channel import Wire
from ..ipc.event_loop import Loop
from ..ipc.helper_process import silence, take_title
from ..output import index
from ..output.protocol import CrashStack, Outflow, OutputSettled, SettleOutput
from ..where.protocol import FLUSH, TRACER, TRACER_END, Answers, Inspect, Sight, Stacks, Where
from . import events
from .connections import Connections
from .errands import PATIENCE_S, Errands, Voice, run_unheard
from .process_cleanup import Leftovers, cancel, unmap_inherited
from .protocol import END_SIGNAL, KILL_SIGNAL, Bye, Condition, Look, Settled, Watched
from .startup_timeout import OTHERS_S
from .watcher import State, Watcher

if TYPE_CHECKING:
    from ..where.sampler import Looking

ENDING_S = 5.0  # for the sentinel to come to its end after something went wrong
BUSY_S = 0.05  # between two looks whether this process is needed
SETTLING_S = 0.35  # for output to be shown: the coordinator waits half a second for the report
LOOKING_S = 1.0  # between two looks at a process that the kernel does not watch for us


def watch(rank_wire: Wire, signals: socket.socket, pid: int, watched: Watched, began_s: float) -> None:
    """Be the sentinel of process `pid` until that is gone; `signals` brings the number of each signal that it gets.

    `began_s` is when the rank's watch began, on time.monotonic()'s clock.
    """
    silence(0, 1)
    Voice().begin()
    unmap_inherited()
    try:
        process = WatchedProcess(pid)
    except ProcessLookupError:  # it is gone already
        if not knows_why(rank_wire):
            write_line(f"mpiddp: {watched.who} died as soon as it had started; its launcher may know how")
            time.sleep(OTHERS_S)
            run_unheard(partial(cancel, watched.step))
        return
    Sentinel(rank_wire, signals, process, watched, began_s).loop.run()


class Sentinel:
    """Joins the logic of a watcher to a rank's process, to connections and to the clock."""

    def __init__(
        self, rank_wire: Wire, signals: socket.socket, process: WatchedProcess, watched: Watched, began_s: float
    ) -> None:
        self.loop = Loop(self.excuse)
        self._watched, self._process = watched, process
        self._watcher = Watcher(watched, began_s)
        self._errands = Errands(self.loop)
        self._connections = Connections(self.loop, rank_wire, signals, watched, self.post, self._look_at_rank,
                                        began_s, self._errands)
        self._leftovers = Leftovers(process.pid)
        self._sight = Sight()
        self._looking: Looking | None = None
        self._wait_status: int | None = None
        self._outflow: Wire | None = None  # to the relay of the rank's output
        self._events: deque[events.WatcherEvent] = deque()
        self._excuses: set[str] = set()  # that were made
        if process.ended >= 0:  # after the rank's connection: what it has told comes first
            self.loop.listen(process.ended, self._look_at_rank)
        if watched.step_daemon:
            self.loop.await_end(watched.step_daemon, lambda: self.post(events.StepDaemonGone()))
        self._carry_out(self._watcher.taken())

    def excuse(self, error: Exception) -> None:
        """Say, once, what went wrong in the sentinel itself; if the rank is gone, end soon, whatever that broke off."""
        words = f"{type(error).__name__}: {error}"
        line = f"mpiddp: sentinel of {self._watched.who}: {truncate_middle(words)} ({place_of(error)})"
        if line not in self._excuses:
            self._excuses.add(line)
            write_line(line)
        over = self._watcher.gone or self._watcher.state is State.OVER
        if over and not self.loop.is_set("last"):
            self.loop.set_timer("last", ENDING_S, self._end)

    def post(self, event: events.WatcherEvent) -> None:
        """Tell the logic of an event and do what it wants; an event that comes meanwhile is told afterwards."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                self.loop.attempt(partial(self._tell, self._events[0]))
                self._events.popleft()

    def _tell(self, event: events.WatcherEvent) -> None:
        try:
            actions = self._watcher.handle(event, time.monotonic())
        except Exception as error:
            self.excuse(error)
            actions = self._watcher.taken()
        self._carry_out(actions)

    def _carry_out(self, actions: list[events.WatcherAction]) -> None:
        for action in actions:
            self.loop.attempt(partial(self._do, action))

    def _do(self, action: events.WatcherAction) -> None:
        """Carry out one action."""
        match action:
            case events.SetTimer(name, after_s):
                self.loop.set_timer(name, after_s, partial(self.post, events.Due(name)))
            case events.DropTimer(name):
                self.loop.drop_timers(name)
            case events.Say(text):
                write_line(text)
            case events.TellReason(verdict, who, after_s, error_file):
                self._settle_output()
                print_failure(verdict, who, after_s)
                if error_file:
                    self._errands.write(error_file, format_error_file(verdict, who))
                if who is not None:
                    self._errands.run(partial(index.note, who.log, is_first=True))
            case events.WriteRecord(error_file, text):
                self._errands.write(error_file, text)
            case events.AskHosts(line, timeout_s):
                self._ask_hosts(line, timeout_s)
            case events.ToRank(message):
                self._connections.tell_rank(message)
            case events.ToCoordinator(message):
                self._connections.tell_coordinator(message)
            case events.AnswerTrials(request):
                self._connections.answer(request)
            case events.BeCoordinator(request):
                self._connections.coordinate(request)
            case events.MeetCoordinator(request):
                self._leftovers.note_segments()
                self._connections.meet(request)
                self.loop.set_timer("ready", events.READY_AFTER_S, self._be_ready)
            case events.LookAtRank(request, ended):
                self._look(request, ended)
            case events.TakeWindow(Outflow()):
                self._outflow = Wire(socket.socket(fileno=self._connections.take_descriptor()))
            case events.TakeWindow(Stacks() | Answers() as request):
                self._sight = self._sight.with_end(request, self._connections.take_descriptor())
                self._looking = None
                if isinstance(request, Answers):
                    with contextlib.suppress(OSError):
                        os.write(self._sight.socket, b"%b%d%b" % (TRACER, os.getpid(), TRACER_END))
            case events.WatchNeighbour(rank, pid):
                self._connections.watch_neighbour(rank, pid)
            case _:
                self._do_to_rank(action)

    def _do_to_rank(self, action: events.WatcherAction) -> None:
        """Carry out what concerns the rank's process, and those that it started."""
        match action:
            case events.NoteChild(pid):
                self._leftovers.note(pid)
            case events.NoteDescendants():
                self._leftovers.note_descendants()
            case events.LogStack(text):
                if self._outflow is not None:
                    self._outflow.send(CrashStack(text))
            case events.Alert():
                self._send_signal(END_SIGNAL)
                if self._process.is_stopped():
                    self._send_signal(signal.SIGCONT)
            case events.AskToFlush():
                with contextlib.suppress(OSError):
                    os.write(self._looking.socket if self._looking else self._sight.socket, FLUSH)
            case events.AskToEnd():
                if self._process.has_handler(signal.SIGTERM):
                    self._send_signal(signal.SIGTERM)
            case events.Terminate():
                self._leftovers.note_segments()
                self._send_signal(signal.SIGTERM)
            case events.Kill():
                self._leftovers.note_segments()
                self._send_signal(signal.SIGKILL if self._process.pid != 1 else KILL_SIGNAL)
            case events.LeaveInOrder():
                self._connections.take_leave()
                self._end_when_idle()
            case events.LetAllEnd():
                self._connections.let_all_end()
            case events.CancelStep():
                self._errands.run(partial(cancel, self._watched.step))
            case events.CleanUp():
                self._clean_up()

    def _settle_output(self) -> None:
        """Wait, not for long, until what ranks have said is shown, where it is folded: the report comes after that."""
        deadline = time.monotonic() + SETTLING_S
        with contextlib.suppress(EOFError, OSError):
            if self._outflow is not None and self._outflow.send(SettleOutput()):
                while OutputSettled() not in self._outflow.receive(max(0.001, deadline - time.monotonic())):
                    pass

    def _be_ready(self) -> None:
        """Be named, and ready to look: also when a file system that Python imports from answers no more."""
        self._leftovers.note_segments()
        take_title(f"mpiddp: sentinel of {self._watched.who}")
        with contextlib.suppress(OSError, ImportError):  # no descriptor is left: it is tried again when it is needed
            import_module("mpiddp.where.sampler")

    def _look(self, request: Look | Where | Inspect, ended: bool) -> None:
        if isinstance(request, Inspect):
            from ..where.sampler import inspect_threads

            inspect_threads(self.loop, self._process.pid, request, lambda found: self.post(events.Noticed(found)))
        elif isinstance(request, Where):
            if self._looking is None:
                from ..where.sampler import Looking  # not while the rank starts

                sight = self._sight if self._sight.socket >= 0 else Sight()  # the window's second end is on its way
                port = self._watcher.member.store_port if self._watcher.member else 0
                self._looking = Looking(self.loop, self._process.pid, sight, port,
                                        lambda found: self.post(events.Noticed(found)))
            self._looking.look(request, ended)
        else:
            self._connections.tell_coordinator(Condition(self._process.is_stopped()))

    def _look_at_rank(self) -> None:
        """Tell if the rank is gone; its connection alone may be, if it became another program."""
        if self._watcher.gone:
            return
        try:
            status = self._process.wait_status()
        except ProcessLookupError:
            self._note_end(None)
            return
        if status is not None:
            self._note_end(status)
        elif self._process.ended < 0:
            self.loop.set_timer("look", LOOKING_S, self._look_at_rank)

    def _note_end(self, status: int | None) -> None:
        self.loop.drop_timers("look", "ready")
        if self._process.ended >= 0:
            self.loop.forget(self._process.ended)
        self._wait_status = status
        self.post(events.RankGone(status, self._process.was_out_of_memory()))

    def _ask_hosts(self, line: str, timeout_s: float) -> None:
        def ask() -> str:
            from ..discovery.reachability import find_unreachable

            silent = find_unreachable(self._watched.hosts(), timeout_s)
            return line + (f"; no answer from {fold_hosts(silent)}" if silent else "")

        self._errands.run(ask, write_line, late=line, patience_s=timeout_s + PATIENCE_S, needed=False)

    def _send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _clean_up(self) -> None:
        """End what the rank has left behind, and this process."""
        self._note_in_index()
        self._errands.run(partial(self._leftovers.end, self._watcher.member))
        self._end_when_idle()

    def _note_in_index(self) -> None:
        """Note how the rank has ended, where it has not done that."""
        if (member := self._watcher.member) is not None:
            status = index.exit_status(self._wait_status)
            self._errands.run(partial(index.note, member.log, status, again=False))

    def _end_when_idle(self) -> None:
        """End this process when nobody needs it any more."""
        if not self._connections.busy and not self._errands.speaking:
            with contextlib.suppress(OSError):  # no descriptor is left
                silence(2)  # a launcher waits until nobody holds it
        if self._connections.busy or self._errands.busy:
            self.loop.set_timer("idle", BUSY_S, self._end_when_idle)
        else:
            self._connections.flush()
            self._end()

    def _end(self) -> None:
        self.loop.over = True


def place_of(error: Exception) -> str:
    """Return the innermost line that an exception came through; import nothing, since files may be what is lacking."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return "unknown place"
    code = traceback.tb_frame.f_code
    return f"{code.co_filename}, line {traceback.tb_lineno}, in {code.co_name}"


def knows_why(rank_wire: Wire) -> bool:
    """Tell whether a rank that is gone has told that it knows why."""
    try:
        return any(isinstance(message, (Settled, Bye)) for message in rank_wire.receive())
    except (EOFError, OSError):
        return False
