"""The agent process: passes events to its logic, and carries out the actions.

It loads neither MPI nor torch, and sleeps while the rank works. An error in one action or event is printed, and the
agent continues.
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

from ..base.errors import assert_never
from ..base.stderr import write_line
from ..base.text import fold_hosts, truncate_middle
from ..discovery.process import WatchedProcess
from ..failure.report import format_error_file, print_failure
from ..ipc.channel import Channel, Codec
from ..ipc.event_loop import EventLoop
from ..ipc.helper_process import END_SIGNAL, redirect_to_devnull, set_process_title
from ..output import index
from ..output.protocol import AgentToRelay, CrashStack, Flush, Flushed, RelaySocket, RelayToAgent
from ..where import progress
from ..where.protocol import (
    FLUSH,
    TRACER,
    TRACER_END,
    InspectFds,
    QuerySocket,
    SampleRequest,
    StackPipe,
    ThreadsRequest,
)
from . import events, protocol
from .background import TASK_TIMEOUT_S, BackgroundTasks, NonblockingStderr, run_detached
from .connections import RANK_CODEC, Connections, RankChannel
from .events import WatcherCommand
from .process_cleanup import ProcessCleanup, cancel_slurm_step, unmap_inherited
from .startup_timeout import REPORTS_SPREAD_S
from .watcher import Over, Watcher

if TYPE_CHECKING:
    from ..where.sampler import ProcessSampler

RelayChannel = Channel[AgentToRelay, RelayToAgent]
RELAY_CODEC: Codec[RelayToAgent] = Codec(RelayToAgent)

ERROR_EXIT_DELAY_S = 5.0  # for the agent to come to its end after an error
IDLE_CHECK_INTERVAL_S = 0.05  # between checks whether this process is still needed
RELAY_FLUSH_TIMEOUT_S = 0.35  # the coordinator waits half a second for the report
PROCESS_CHECK_INTERVAL_S = 1.0  # for a process that the kernel does not watch for us


def watch(sock: socket.socket, signals: socket.socket, pid: int, watched: protocol.WatchedRank, began_s: float) -> None:
    """Run as the agent of process `pid` until that has ended; `signals` has the number of each signal that it gets.

    `sock` is the connection to the rank. `began_s` is when the rank's watch began, on time.monotonic()'s clock.
    """
    redirect_to_devnull(0, 1)
    NonblockingStderr().install()
    unmap_inherited()
    rank = RankChannel(sock, RANK_CODEC)
    try:
        process = WatchedProcess(pid)
    except ProcessLookupError:  # it has ended already
        if not is_handled_by(rank):
            write_line(f"mpiddp: {watched.name} exited immediately after starting; see the launcher's output for the "
                       "reason")
            time.sleep(REPORTS_SPREAD_S)
            run_detached(partial(cancel_slurm_step, watched.step))
        return
    Agent(rank, signals, process, watched, began_s).loop.run()


class Agent:
    """Connects the logic of a watcher with the rank's process, the connections and the clock."""

    def __init__(
        self, rank: RankChannel, signals: socket.socket, process: WatchedProcess, watched: protocol.WatchedRank,
        began_s: float,
    ) -> None:
        self.loop = EventLoop(self.report_error)
        self._rank, self._watched, self._process = rank, watched, process
        self._watcher = Watcher(watched, began_s)
        self._tasks = BackgroundTasks(self.loop)
        self._connections = Connections(
            self.loop, rank, signals, watched, self.post, self._check_process, began_s, self._tasks)
        self._cleanup = ProcessCleanup(process.pid)
        self._inspect_fds = InspectFds()
        self._sampler: ProcessSampler | None = None
        self._wait_status: int | None = None
        self._relay: RelayChannel | None = None
        self._events: deque[events.WatcherEvent] = deque()
        self._reported_errors: set[str] = set()
        if process.ended >= 0:  # after the rank's connection: its messages come first
            self.loop.watch(process.ended, self._check_process)
        if watched.step_daemon:
            self.loop.watch_process(watched.step_daemon, lambda: self.post(events.StepDaemonGone()))
        self._carry_out(self._watcher.take_actions())

    def report_error(self, error: Exception) -> None:
        """Print an error of the agent itself, once; if the rank has ended, end soon, even after this error."""
        text = f"{type(error).__name__}: {error}"
        line = f"mpiddp: error in the agent of {self._watched.name}: {truncate_middle(text)} ({location_of(error)})"
        if line not in self._reported_errors:
            self._reported_errors.add(line)
            write_line(line)
        is_over = self._watcher.gone or isinstance(self._watcher.phase, Over)
        if is_over and not self.loop.has_timer("exit"):
            self.loop.set_timer("exit", ERROR_EXIT_DELAY_S, self.loop.stop)

    def post(self, event: events.WatcherEvent) -> None:
        """Pass an event to the logic and carry out the actions; events that come meanwhile are queued."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                self.loop.call_safely(partial(self._handle, self._events[0]))
                self._events.popleft()

    def _handle(self, event: events.WatcherEvent) -> None:
        try:
            actions = self._watcher.handle(event, time.monotonic())
        except Exception as error:
            self.report_error(error)
            actions = self._watcher.take_actions()
        self._carry_out(actions)

    def _carry_out(self, actions: list[events.WatcherAction]) -> None:
        for action in actions:
            self.loop.call_safely(partial(self._do, action))

    def _do(self, action: events.WatcherAction) -> None:
        """Carry out one action."""
        match action:
            case events.SetTimer(name, after_s):
                self.loop.set_timer(name, after_s, partial(self.post, events.Due(name)))
            case events.CancelTimer(name):
                self.loop.cancel_timers(name)
            case events.PrintLine(text):
                write_line(text)
            case events.PrintReason(verdict, member, after_s, error_file):
                self._flush_relay()
                print_failure(verdict, member, after_s)
                if error_file:
                    self._tasks.write(error_file, format_error_file(verdict, member, progress.step_count()))
                if member is not None:
                    self._tasks.run(partial(index.update_record, member.log, is_first=True))
            case events.WriteRecord(error_file, text):
                self._tasks.write(error_file, text)
            case events.ProbeHosts(line, timeout_s):
                self._probe_hosts(line, timeout_s)
            case events.ToRank(message):
                self._rank.send(message)
            case events.ToCoordinator(report):
                self._connections.send_to_coordinator(report)
            case events.CarryOut(rank_request):
                self._carry_out_request(rank_request)
            case events.ObserveRank(request, ended):
                self._observe_rank(request, ended)
            case events.WatchProcess(rank, pid):
                process_ended = events.Observed(protocol.PeerProcessEnded(rank))
                self.loop.watch_process(pid, lambda: self.post(process_ended))
            case _:
                self._do_to_rank(action)

    def _do_to_rank(self, action: events.RankAction) -> None:
        """Carry out an action on the rank's process, or on those that it started."""
        match action:
            case events.RecordChild(pid):
                self._cleanup.record_child(pid)
            case WatcherCommand.RECORD_DESCENDANTS:
                self._cleanup.record_descendants()
            case events.SendCrashStack(text):
                if self._relay is not None:
                    self._relay.send(CrashStack(text))
            case WatcherCommand.SIGNAL_END:
                self._send_signal(END_SIGNAL)
                if self._process.is_stopped():
                    self._send_signal(signal.SIGCONT)
            case WatcherCommand.REQUEST_FLUSH:
                with contextlib.suppress(OSError):
                    os.write(self._sampler.socket if self._sampler else self._inspect_fds.socket, FLUSH)
            case WatcherCommand.REQUEST_TERMINATION:
                if self._process.has_handler(signal.SIGTERM):
                    self._send_signal(signal.SIGTERM)
            case WatcherCommand.TERMINATE:
                self._cleanup.record_segments()
                self._send_signal(signal.SIGTERM)
            case WatcherCommand.KILL:
                self._cleanup.record_segments()
                self._send_signal(signal.SIGKILL if self._process.pid != 1 else protocol.KILL_SIGNAL)
            case WatcherCommand.LEAVE_JOB:
                self._connections.leave_job()
                self._end_when_idle()
            case WatcherCommand.END_OTHERS:
                if self._connections.server is not None:
                    self._connections.server.handle(events.OwnRankEnded(in_order=False))
            case WatcherCommand.CANCEL_STEP:
                self._tasks.run(partial(cancel_slurm_step, self._watched.step))
            case WatcherCommand.CLEAN_UP:
                self._clean_up()
            case _:
                assert_never(action)

    def _carry_out_request(self, request: events.RankRequest) -> None:
        match request:
            case protocol.ServeProbes():
                self._connections.serve_probes(request)
            case protocol.StartCoordinator():
                self._connections.start_coordinator(request)
            case protocol.RegisterRank():
                self._cleanup.record_segments()
                self._connections.connect_to_coordinator(request)
                self.loop.set_timer("warm up", events.WARMUP_DELAY_S, self._warm_up)
            case RelaySocket():
                self._relay = RelayChannel(socket.socket(fileno=self._rank.take_descriptor()), RELAY_CODEC)
            case StackPipe() | QuerySocket():
                self._inspect_fds = self._inspect_fds.with_end(request, self._rank.take_descriptor())
                self._sampler = None
                if isinstance(request, QuerySocket):
                    with contextlib.suppress(OSError):
                        os.write(self._inspect_fds.socket, b"%b%d%b" % (TRACER, os.getpid(), TRACER_END))
            case _:
                assert_never(request)

    def _flush_relay(self) -> None:
        """Wait briefly until folded output has been shown: the report comes after it."""
        deadline = time.monotonic() + RELAY_FLUSH_TIMEOUT_S
        with contextlib.suppress(EOFError, OSError):
            if self._relay is not None and self._relay.send(Flush()):
                while Flushed() not in self._relay.receive(max(0.001, deadline - time.monotonic())):
                    pass

    def _warm_up(self) -> None:
        """Set the title, and import now what a sample needs: a later import could hang on a dead file system."""
        self._cleanup.record_segments()
        set_process_title(f"mpiddp: agent of {self._watched.name}")
        with contextlib.suppress(OSError, ImportError):  # no descriptor is left: imported again when needed
            import_module("mpiddp.where.sampler")

    def _observe_rank(self, request: protocol.QueryStopped | SampleRequest | ThreadsRequest, ended: bool) -> None:
        match request:
            case protocol.QueryStopped():
                self._connections.send_to_coordinator(protocol.StoppedStatus(self._process.is_stopped()))
            case SampleRequest():
                if self._sampler is None:
                    from ..where.sampler import ProcessSampler  # not while the rank starts

                    # The second descriptor may be on its way.
                    inspect_fds = self._inspect_fds if self._inspect_fds.socket >= 0 else InspectFds()
                    port = self._watcher.member.store_port if self._watcher.member else 0
                    self._sampler = ProcessSampler(self.loop, self._process.pid, inspect_fds, port,
                                            lambda sample: self.post(events.Observed(sample)))
                self._sampler.sample(request, ended)
            case ThreadsRequest():
                from ..where.sampler import inspect_threads

                inspect_threads(self.loop, self._process.pid, request,
                                lambda reply: self.post(events.Observed(reply)))
            case _:
                assert_never(request)

    def _check_process(self) -> None:
        """Post RankGone if the process has ended; after an exec only its connection is closed."""
        if self._watcher.gone:
            return
        try:
            status = self._process.wait_status()
        except ProcessLookupError:
            self._on_process_end(None)
            return
        if status is not None:
            self._on_process_end(status)
        elif self._process.ended < 0:
            self.loop.set_timer("check process", PROCESS_CHECK_INTERVAL_S, self._check_process)

    def _on_process_end(self, status: int | None) -> None:
        self.loop.cancel_timers("check process", "warm up")
        if self._process.ended >= 0:
            self.loop.unwatch(self._process.ended)
        self._wait_status = status
        self.post(events.RankGone(status, self._process.was_out_of_memory()))

    def _probe_hosts(self, line: str, timeout_s: float) -> None:
        def probe() -> str:
            from ..discovery.reachability import find_unreachable

            silent = find_unreachable(self._watched.hosts(), timeout_s)
            return line + (f"; no answer from {fold_hosts(silent)}" if silent else "")

        self._tasks.run(probe, write_line, late=line, timeout_s=timeout_s + TASK_TIMEOUT_S, is_required=False)

    def _send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _clean_up(self) -> None:
        """Write how the rank has ended to the logs' index, end its descendants, and then this process."""
        member = self._watcher.member
        if member is not None:
            status = index.shell_status(self._wait_status)
            self._tasks.run(partial(index.update_record, member.log, status, overwrite=False))
        self._tasks.run(partial(self._cleanup.run, member))
        self._end_when_idle()

    def _end_when_idle(self) -> None:
        """End this process when no task or other agent needs it."""
        server = self._connections.server
        serves_others = server is not None and server.is_busy
        if not serves_others and not self._tasks.may_print:
            with contextlib.suppress(OSError):  # no descriptor is left
                redirect_to_devnull(2)  # a launcher waits until nobody holds it
        if serves_others or self._tasks.is_busy:
            self.loop.set_timer("idle", IDLE_CHECK_INTERVAL_S, self._end_when_idle)
        else:
            if server is not None:
                server.close()
            self.loop.stop()


def location_of(error: Exception) -> str:
    """Return the innermost line of an exception's traceback, without imports: no file descriptor may be left."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return "unknown line"
    code = traceback.tb_frame.f_code
    return f"{code.co_filename}:{traceback.tb_lineno} {code.co_name}"


def is_handled_by(rank: RankChannel) -> bool:
    """Return whether a rank that has ended had reported that it prints the reason itself, or had left."""
    try:
        return any(isinstance(message, (protocol.LocallyHandled, protocol.Leave)) for message in rank.receive())
    except (EOFError, OSError):
        return False
