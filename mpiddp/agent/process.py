"""The agent: passes events to its logic, and carries out the actions.

It loads neither MPI nor torch, and sleeps while the rank works. An error in one action or event is printed, and the
agent continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections import deque
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ..base.errors import assert_never
from ..base.process import set_process_title
from ..base.stderr import set_writer, write_all, write_line
from ..base.text import fold_hosts, truncate_middle
from ..discovery.process import WatchedProcess
from ..failure.postmortem import extract_crash_stack
from ..failure.report import format_error_file, print_failure
from ..ipc.event_loop import EventLoop
from ..output.forwarder import RankOutput
from ..output.protocol import ForwardConfig, OutputConfigured, ShowText
from ..output.writer import WriterThread
from ..where import progress
from ..where.protocol import END, InspectFds, SampleRequest, ThreadsRequest
from . import events, protocol
from .connections import Connections, RankChannel
from .events import AgentCommand
from .process_cleanup import (
    Segment,
    cancel_slurm_step,
    end_descendants,
    end_launcher,
    find_waiting_launcher,
    kill_group,
    mapped_segments,
    remove_unmapped,
)
from .tasks import Tasks
from .timeouts import (
    DESCENDANTS_TIMEOUT_S,
    FINAL_OUTPUT_TIMEOUT_S,
    FINAL_TASKS_TIMEOUT_S,
    OUTPUT_TIMEOUT_S,
    PEERS_TIMEOUT_S,
    PMI_TIMEOUT_S,
    TASK_TIMEOUT_S,
)
from .watcher import Watcher

if TYPE_CHECKING:
    from ..where.sampler import ProcessSampler

PR_SET_CHILD_SUBREAPER = 36  # (linux/prctl.h)
# Those by which users, launchers and schedulers stop or ask a job.
OUTSIDE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
                   signal.SIGALRM, signal.SIGXCPU)
MAX_CRASH_BYTES = 2**20  # that faulthandler may write


class RankProcess(NamedTuple):
    """The rank of this agent: its process, and this agent's ends of the connections that were made before the fork."""

    pid: int
    channel: RankChannel
    crash_pipe: int  # from faulthandler
    inspect_fds: InspectFds
    streams: dict[int, int]  # pipes from its stdout, 1, and stderr, 2; none if it has the launcher's


def run_agent(rank: RankProcess, config: protocol.AgentConfig, began_s: float) -> NoReturn:
    """Be the agent of a rank, which began at `began_s` of time.monotonic(), until both have ended."""
    agent = Agent(rank, config, began_s)
    agent.loop.run()
    os._exit(agent.status)


class Agent:
    """Connects the logic of a watcher with the rank's process, the connections and the clock."""

    def __init__(self, rank: RankProcess, config: protocol.AgentConfig, began_s: float) -> None:
        self.loop = EventLoop(self.report_error)
        self.status = 1
        self._rank, self._config = rank, config
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._signals = self._receive_signals()
        self._process = WatchedProcess(rank.pid)
        self._watcher = Watcher(config, began_s)
        self._tasks = Tasks(self.loop)
        self._connections = Connections(self.loop, rank.channel, config, self.post, began_s, self._tasks)
        self._lines = WriterThread(self.loop)  # of this process, on stderr
        set_writer(lambda stderr, data: self._lines.submit(partial(write_all, stderr, data), len(data)))
        os.register_at_fork(after_in_child=partial(set_writer, write_all))
        self._output = RankOutput(self.loop, rank.streams, config.name)
        self._segments: set[Segment] = set()
        self._sampler: ProcessSampler | None = None
        self._wait_status: int | None = None
        self._waiting_launcher = 0
        self._events: deque[events.AgentEvent] = deque()
        self._reported_errors: set[str] = set()
        self._crash = bytearray()  # what faulthandler has written
        os.set_blocking(rank.crash_pipe, False)
        self.loop.watch(rank.crash_pipe, self._read_crash)
        if config.step_daemon:
            self.loop.watch_process(config.step_daemon, lambda: self.post(events.StepDaemonGone()))
        if config.launcher_pid:
            self.loop.watch_process(config.launcher_pid, lambda: self.post(events.LauncherGone()))
        self._carry_out(self._watcher.take_actions())
        self._reap()  # it may have ended before its SIGCHLD could come

    def _receive_signals(self) -> int:
        """Receive signals from now on, and return the descriptor on which their numbers come."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *OUTSIDE_SIGNALS):
            signal.signal(number, ignore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, *OUTSIDE_SIGNALS))  # as who started us has left it
        self.loop.watch(reading, self._read_signals)
        return reading

    def _read_signals(self) -> None:
        numbers = os.read(self._signals, 4096)
        for number in filter(OUTSIDE_SIGNALS.__contains__, dict.fromkeys(numbers)):
            self.post(events.Signalled(number, bool(progress.find_unasked_signal([number]))))
        if signal.SIGCHLD in numbers:
            self._reap()

    def _reap(self) -> None:
        """Take the status of each child that has ended: of the rank, and of what has lost its parent."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._rank.pid:
                    self._wait_status = status
                    self._connections.read_rest()
                    self._read_crash()
                    stack = self._crash.decode(errors="replace")
                    if stack:
                        self._output.log_text(extract_crash_stack(stack.splitlines()))
                    self.post(events.RankGone(status, self._process.was_out_of_memory(), stack))

    def _read_crash(self) -> None:
        """Read what faulthandler writes while the rank crashes, which waits until it is read; too much is dropped."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._rank.crash_pipe, MAX_CRASH_BYTES):
                self._crash += data[:MAX_CRASH_BYTES - len(self._crash)]
            with contextlib.suppress(KeyError):  # it is not watched any more
                self.loop.unwatch(self._rank.crash_pipe)  # nobody holds the other end

    def report_error(self, error: Exception) -> None:
        """Print an error of the agent itself, once."""
        text = f"{type(error).__name__}: {error}"
        line = f"mpiddp: error in the agent of {self._config.name}: {truncate_middle(text)} ({location_of(error)})"
        if line not in self._reported_errors:
            self._reported_errors.add(line)
            write_line(line)

    def post(self, event: events.AgentEvent) -> None:
        """Pass an event to the logic and carry out the actions; events that come meanwhile are queued."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                self.loop.call_safely(partial(self._handle, self._events[0]))
                self._events.popleft()

    def _handle(self, event: events.AgentEvent) -> None:
        try:
            actions = self._watcher.handle(event, time.monotonic())
        except Exception as error:
            self.report_error(error)
            actions = self._watcher.take_actions()
        self._carry_out(actions)

    def _carry_out(self, actions: list[events.AgentAction]) -> None:
        for action in actions:
            self.loop.call_safely(partial(self._do, action))

    def _do(self, action: events.AgentAction) -> None:
        """Carry out one action."""
        match action:
            case events.SetTimer(name, after_s):
                self.loop.set_timer(name, after_s, partial(self.post, events.Due(name)))
            case events.CancelTimer(name):
                self.loop.cancel_timers(name)
            case events.PrintLine(text):
                write_line(text)
            case events.PrintReport():
                self._print_report(action)
            case events.ProbeHosts(line, timeout_s):
                self._probe_hosts(line, timeout_s)
            case events.ToRank(message):
                self._rank.channel.send(message)
            case events.ToCoordinator(report):
                self._connections.send_to_coordinator(report)
            case events.CarryOut(rank_request):
                self._carry_out_request(rank_request)
            case events.ObserveRank(request, ended):
                self._observe_rank(request, ended)
            case events.SignalRank(number):
                self._signal_rank(number)
            case events.KillGroup(group):
                kill_group(group)
            case events.Exit(status):
                self._end(status)
            case AgentCommand():
                self._command(action)
            case _:
                assert_never(action)

    def _command(self, command: AgentCommand) -> None:
        match command:
            case AgentCommand.REQUEST_END:
                with contextlib.suppress(OSError):
                    os.write(self._sampler.socket if self._sampler else self._rank.inspect_fds.socket, END)
            case AgentCommand.END_RANK:
                handles = self._process.has_handler(signal.SIGTERM) and not progress.is_noted(signal.SIGTERM)
                self._signal_rank(signal.SIGTERM if handles else signal.SIGKILL)
            case AgentCommand.END_DESCENDANTS:
                self._tasks.run(self._clean_up, lambda _: self.post(events.DescendantsGone()), "late",
                                DESCENDANTS_TIMEOUT_S + TASK_TIMEOUT_S, is_required=False)
            case AgentCommand.FINISH_OUTPUT:
                self._finish_output()
            case AgentCommand.CANCEL_STEP:
                self._tasks.run(partial(cancel_slurm_step, self._config.step))
            case AgentCommand.END_LAUNCHER:
                self._waiting_launcher = find_waiting_launcher(self._config.launcher)
            case AgentCommand.RECORD_SEGMENTS:
                self._segments |= mapped_segments(self._rank.pid)
            case _:
                assert_never(command)

    def _finish_output(self) -> None:
        def report() -> None:
            output = self._output
            self.post(events.OutputFinished(output.has_lost_output, output.lost_from, output.last_line))

        if self._wait_status is None:  # the rank waits for `Abort`
            self._output.flush(report, OUTPUT_TIMEOUT_S)
        else:
            self._output.finish(report)

    def _clean_up(self) -> str:
        end_descendants(self._rank.pid)
        remove_unmapped(self._segments)
        return "done"

    def _signal_rank(self, number: int) -> None:
        if self._wait_status is None:  # else its number may be another process's
            os.kill(self._rank.pid, number)
            if number in (signal.SIGTERM, signal.SIGKILL):
                os.kill(self._rank.pid, signal.SIGCONT)

    def _print_report(self, report: events.PrintReport) -> None:
        """Print the report after all output, which it may wait for."""
        self._output.flush(partial(self._print_report_now, report), OUTPUT_TIMEOUT_S)

    def _print_report_now(self, report: events.PrintReport) -> None:
        member, reason = report.member, report.root_cause
        rank = member if reason.first.rank == member.rank else None
        if report.stack and not self._output.is_shown:
            write_line(report.stack)
        text = print_failure(reason, rank, report.after_s, self._output.lost_from)
        if member.error_file:
            record = format_error_file(reason, rank, progress.step_count(), report.stack)
            self._tasks.write(member.error_file, record)
        if rank is not None:
            self._output.log_text(text)
        self.post(events.Printed())

    def _carry_out_request(self, request: events.RankRequest) -> None:
        match request:
            case protocol.MpiSocket():
                self._connections.hold_socket()
            case ForwardConfig(folding=folding):
                listener = self._rank.channel.take_descriptor() if folding is not None and folding.gathers else -1
                self._output.configure(request, listener)
                self._rank.channel.send(OutputConfigured())
            case ShowText(text):
                self._output.show_text(text)
            case protocol.ServeProbes():
                self._connections.serve_probes(request)
            case protocol.StartCoordinator():
                self._connections.start_coordinator(request)
            case protocol.RegisterRank():
                self._connections.connect_to_coordinator(request)
                set_process_title(f"mpiddp: agent of {self._config.name}")  # pkill -f SCRIPT finds ranks alone
                self.loop.set_timer("warm up", events.WARMUP_DELAY_S, self._warm_up)
            case _:
                assert_never(request)

    def _warm_up(self) -> None:
        """Import now what a sample needs: a later import could hang on a dead file system."""
        self._segments |= mapped_segments(self._rank.pid)
        with contextlib.suppress(OSError, ImportError):  # no descriptor is left: imported again when needed
            import_module("mpiddp.where.sampler")

    def _observe_rank(self, request: protocol.QueryStopped | SampleRequest | ThreadsRequest, ended: bool) -> None:
        send = self._connections.send_to_coordinator
        match request:
            case protocol.QueryStopped():
                send(protocol.StoppedStatus(self._process.is_stopped()))
            case SampleRequest():
                if self._sampler is None:
                    from ..where.sampler import ProcessSampler  # not while the rank starts

                    port = self._watcher.member.store_port if self._watcher.member else 0
                    self._sampler = ProcessSampler(self.loop, self._rank.pid, self._rank.inspect_fds, port, send)
                self._sampler.sample(request, ended)
            case ThreadsRequest():
                from ..where.sampler import inspect_threads

                inspect_threads(self.loop, self._rank.pid, request, send)
            case _:
                assert_never(request)

    def _probe_hosts(self, line: str, timeout_s: float) -> None:
        def probe() -> str:
            from ..discovery.reachability import find_unreachable

            silent = find_unreachable(self._config.hosts(), timeout_s)
            return line + (f"; no answer from {fold_hosts(silent)}" if silent else "")

        self._tasks.run(probe, write_line, late=line, timeout_s=timeout_s + TASK_TIMEOUT_S, is_required=False)

    def _end(self, status: int) -> None:
        """End this process with a status, once the last output is shown, but not later than its time limit."""
        self.loop.set_timer("last output", FINAL_OUTPUT_TIMEOUT_S, partial(self._stop, status))
        self._output.finish(partial(self._stop, status))

    def _stop(self, status: int) -> None:
        """End this process with a status, once the last messages and files are written."""
        if self.loop.stopped:
            return
        self.status = status
        if self._connections.server is not None:
            self._connections.server.close()
        self._tasks.finish(FINAL_TASKS_TIMEOUT_S)
        self._lines.wait(FINAL_TASKS_TIMEOUT_S)
        # Else only mpiexec can end the others: those that have not joined, or that cannot be reached.
        is_agreed = self._connections.is_over or (
            self._connections.server is not None and self._connections.server.is_complete)
        if is_agreed and not self._config.by_srun and say_goodbye():
            if self._connections.server is not None:
                self._connections.server.await_peers(PEERS_TIMEOUT_S)
            else:
                self.status = 0
        server = self._connections.server
        if launcher := self._waiting_launcher or (server.waiting_launcher if server is not None else 0):
            end_launcher(launcher)
        self.loop.stop()


def say_goodbye() -> bool:
    """Finalise PMI for the rank, if the launcher speaks PMI-1's wire protocol, as Hydra does; return whether it does.

    Else mpiexec kills the other agents as soon as this one ends, before they can end with the job's status, and returns
    another one. Even so it may kill those of other nodes when one ends with a status: so the coordinator alone has it,
    and ends last.
    """
    connection = os.environ.get("PMI_FD", "")
    if not connection.isdecimal():
        return False
    with contextlib.suppress(OSError):  # the rank has finalised it
        os.write(int(connection), b"cmd=finalize\n")
        if select.select([int(connection)], [], [], PMI_TIMEOUT_S)[0]:
            os.read(int(connection), 1000)  # the answer: Intel's mpiexec fails if nobody reads it
    return True


def ignore(*_: object) -> None:
    """Handle a signal by doing nothing: its number comes through the wake-up descriptor."""


def location_of(error: BaseException) -> str:
    """Return the innermost line of an error's traceback, without imports: no descriptor may be left."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return "unknown line"
    code = traceback.tb_frame.f_code
    return f"{code.co_filename}:{traceback.tb_lineno} {code.co_name}"
