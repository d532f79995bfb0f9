"""The rank's side of its agent, the process that watches it and reports for it when it cannot."""

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

from ..base.config import BLOCKED_EXIT_TIMEOUT_S, LaunchConfig
from ..base.ranks import RankIdentity
from ..base.stderr import write_all
from ..discovery import launchers, runtime, schedulers
from ..failure.root_cause import Report, ReportKind, RootCause, truncate_report
from ..ipc.channel import Channel, Codec, Text, Unreadable
from ..ipc.helper_process import (
    END_SIGNAL,
    HelperProcess,
    OwnedDescriptors,
    arm_end_signal,
    disarm_end_signal,
    handle_helper_deaths,
)
from ..output.protocol import RelaySocket
from ..planning.environment import Endpoint
from ..where import progress  # noqa: F401 (shared with the agent, which is forked after that)
from ..where.dumper import StackDumper, handled_signals
from ..where.protocol import QuerySocket, StackPipe
from . import protocol
from .protocol import EndDecision, EndRank, JobEnds, ListenPort, RegisterRank, RegistrationDone, UnfinishedRanks

# The coordinator takes the place of the agent once that is dead.
Sent = protocol.RankToAgent | protocol.AgentToCoordinator
Received = protocol.AgentToRank | protocol.CoordinatorToAgent
RankChannel = Channel[Sent, Received]
CODEC: Codec[Received] = Codec(Received)
Awaited = TypeVar("Awaited", RegistrationDone, ListenPort, EndDecision, UnfinishedRanks, EndRank)

END_TIMEOUT_S = 1.0  # for an `EndRank`, which comes before its signal; another thread may be reading it
LATE_END_TIMEOUT_S = 0.01  # if a helper's death explains the signal, too
LISTEN_TIMEOUT_S = 30.0  # for the agent to listen: it may have to be loaded from a cold file system
ANSWER_TIMEOUT_S = 4.0  # for the agent to answer; its watcher may take DECISION_TIMEOUT_S to decide
MAX_READ_S = 0.1  # for one read: another thread, or a signal's handler, may have read the answer
CONNECT_TIMEOUT_S = 2.0  # to the coordinator, and for its proof


def fork_agent(config: LaunchConfig, started_by: launchers.LaunchFacts | None) -> AgentClient:
    """Fork the process that watches this one; rank 0's can probe other hosts."""
    rank = started_by.rank if started_by else 0
    by_srun = started_by is not None and started_by.by_srun
    if os.getpid() == 1:
        make_killable()
    return AgentClient(protocol.WatchedRank(
        name=f"rank {rank} on {runtime.hostname()}",
        first_on_node=launchers.is_first_on_node(os.environ),
        step=runtime.find_slurm_step(os.environ, started_by),
        hosts=lambda: schedulers.list_slurm_hosts(os.environ) if rank == 0 else [],
        by_srun=by_srun,
        step_daemon=runtime.find_step_daemon(os.getpid()) if by_srun else 0,
        timeout_s=config.startup_timeout_s,
        stall_s=config.stall_s or 0.0,
        stall_abort=config.stall_abort,
        exit_timeout_s=config.exit_timeout_s or BLOCKED_EXIT_TIMEOUT_S,
    ))


def make_killable() -> None:
    """Make KILL_SIGNAL end this process, the first one of its container, even in native code.

    The kernel delivers to such a process neither signals without a handler nor SIGKILL (man 7 pid_namespaces).
    """
    import ctypes

    library = ctypes.CDLL(None)
    library.signal(protocol.KILL_SIGNAL, ctypes.cast(library._exit, ctypes.c_void_p))


class AgentClient:
    """Forks the agent of this process and talks to it; if that is killed, to the coordinator."""

    def __init__(self, watched: protocol.WatchedRank) -> None:
        """Fork the agent that watches this process."""
        self.start = time.monotonic()
        self._signals, self._its_signals = socket.socketpair()  # open even without an agent: a signal is no error
        pid = os.getpid()

        def run(sock: socket.socket) -> None:
            from . import process  # the rank does not wait for this import

            process.watch(sock, self._its_signals, pid, watched, self.start)

        self._helper: HelperProcess[Sent, Received] = HelperProcess(
            f"the agent of {watched.name}", run, CODEC, kept=(self._its_signals.fileno(),))
        self._channel = self._helper.channel  # the coordinator's, once the agent is dead
        self._descriptors = OwnedDescriptors()
        self._stderr = 2  # as the launcher gave it
        with contextlib.suppress(OSError):
            self._stderr = self._descriptors.add(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, 3))
        self._is_watched = True
        self._registration: RegisterRank | None = None
        self._inbox: dict[type[Any], Received | Text | Unreadable] = {}
        self._reports_crashes = False
        self._wakeup_fd: WakeupFd | None = None
        self._window: StackDumper | None = None
        self._stop_reporting_programs: Callable[[], object] = bool
        self._end: Callable[[int], object] = sys.exit
        self._script_ended: protocol.ScriptEnded | None = None
        self._has_failed = False
        self._waits_for_job_end = False  # the decision lets it wait for that
        self._is_ending = False  # the job ends, as the coordinator has sent this rank

    def report_stage(self, name: str) -> None:
        """Report the stage that begins."""
        self._channel.send(protocol.Stage(name))

    def serve_probes(self, token: str, port: int = 0) -> int:
        """Make the agent send `token` to all who connect to this node, and return the port; 0 if it cannot.

        It listens on `port`, or on a free one if that is 0.
        """
        return self._request_port(protocol.ServeProbes(token, port))

    def start_coordinator(self, address: str, token: str, ranks: int, port: int = 0) -> int:
        """Make this agent the coordinator of so many ranks, and return the port on which it listens at `address`.

        That is `port`, or a free one if that is 0. Returns 0 if it cannot. It serves no probes any more. This process
        holds the port, too: so the other agents can see that it lives when its own agent does not.
        """
        return self._request_port(protocol.StartCoordinator(address, token, ranks, port))

    def _request_port(self, request: protocol.ServeProbes | protocol.StartCoordinator) -> int:
        self._channel.send(request)
        port = self._await(ListenPort, LISTEN_TIMEOUT_S)
        while port is not None and port.request != type(request).__name__:  # a late answer to an earlier request
            port = self._await(ListenPort, LISTEN_TIMEOUT_S)
        if port is None or not port.number:
            return 0
        if isinstance(request, protocol.StartCoordinator):
            self._descriptors.add(self._channel.take_descriptor())
        return port.number

    def register(self, member: RankIdentity, endpoint: Endpoint, end: Callable[[int], object]) -> None:
        """Register the rank with its agent, with the coordinator's address.

        When the job ends, `end` is called with its exit status. From now on a script finds no trace of the fork, and
        the agent's death is noticed.
        """
        self._end = end
        signal.signal(END_SIGNAL, self._on_end_signal)
        self._registration = RegisterRank(member, endpoint.address, endpoint.watch_port, endpoint.watch_token)
        self._channel.send(self._registration)
        self._helper.monitor(self._on_agent_death)

    def await_registration(self) -> None:
        """Wait, but not for long, until the coordinator has admitted this rank: it then sees which rank ends first."""
        if self._registration is not None and self._registration.member.rank:  # rank 0's agent coordinates
            self._await(RegistrationDone)

    def watch_script(self, relay_socket: int = -1) -> None:
        """Report the script's crashes, forks and signals to the agent, except those that others handle already.

        Unless `relay_socket` is -1, the agent reaches the relay of the rank's output through it.
        """
        self._channel.send(protocol.Stage(""))
        os.register_at_fork(after_in_child=self._in_child)
        if not self._is_watched:
            return
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._channel.fileno())
                self._reports_crashes = True
        with contextlib.suppress(OSError):
            self._window = StackDumper()
            carriers: list[tuple[StackPipe | QuerySocket | RelaySocket, int]] = [
                (StackPipe(self._window.write_end), self._window.read_end),
                (QuerySocket(), self._window.agent_socket),
                *([(RelaySocket(), relay_socket)] if relay_socket >= 0 else [])]
            for message, descriptor in carriers:
                self._channel.send(message, descriptor)
        self._signals.setblocking(False)
        self._wakeup_fd = WakeupFd(self._signals.fileno())
        if signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL and not handled_signals([signal.SIGQUIT]):
            signal.signal(signal.SIGQUIT, leave_to_agent)
        self._stop_reporting_programs = report_programs(lambda pid: self._channel.send(protocol.ChildStarted(pid)))

    def detach(self) -> None:
        """Stop reporting to the agent; the process continues."""
        self._helper.stop_monitoring()
        if not self._is_watched:
            with contextlib.suppress(OSError):  # the script has closed it
                disarm_end_signal(self._channel.fileno())
        self._stop_reporting_programs()
        if self._reports_crashes:
            faulthandler.disable()
        if self._window is not None:
            self._window.close()
        self._stop_reporting_signals()
        with contextlib.suppress(ValueError):  # not in the main thread
            if signal.getsignal(END_SIGNAL) == self._on_end_signal:
                signal.signal(END_SIGNAL, signal.SIG_DFL)
            if signal.getsignal(signal.SIGQUIT) == leave_to_agent:
                signal.signal(signal.SIGQUIT, signal.SIG_DFL)

    def report_failure(self, report: Report) -> EndDecision:
        """Report why this rank fails, and return the decision.

        Without an answer, this rank counts as the first to fail. If it has lost another one, it first waits
        LAUNCHER_KILL_TIMEOUT_S for the launcher, which that rank has asked to end the job.
        """
        if self._wakeup_fd is not None and self._wakeup_fd.simulated:
            report = report._replace(signal="")
        elif report.signal and (self._wakeup_fd is None or self._wakeup_fd.lent):
            with contextlib.suppress(OSError):
                self._signals.send(bytes([signal.SIGINT]))  # the wake-up descriptor has not reported it
        self._has_failed = True
        report = truncate_report(report)
        channel = self._channel
        self._channel.send(protocol.Failed(report))
        decision = self._await(EndDecision)
        self._helper.handle_death()
        if decision is None and self._channel is not channel:
            self._channel.send(protocol.Failed(report))
            decision = self._await(EndDecision)
        self._helper.stop_monitoring()
        if decision is None:
            if report.kind == ReportKind.SECONDARY and not self._is_watched:
                time.sleep(protocol.LAUNCHER_KILL_TIMEOUT_S)
            decision = EndDecision(RootCause(report), report.status, True)
        self._waits_for_job_end = not decision.abort
        return decision

    def report_printed(self, record: str = "") -> bool:
        """Report that the reason is printed, so the other ranks may be ended. Return whether there is an agent.

        The agent writes `record` to --error-file: a hanging file system could keep this process from ending.
        """
        message = protocol.ReasonPrinted(record=record if self._is_watched else "")
        return self._channel.send(message) and self._is_watched

    def report_cleanup_done(self) -> None:
        """Report that this rank, which has failed, has nothing more to do."""
        self._channel.send(protocol.CleanupDone())

    def report_script_ended(self, by_exit: Report | None = None) -> None:
        """Report that the script has finished; `by_exit` as in ScriptEnded."""
        self._script_ended = protocol.ScriptEnded(by_exit)
        self._channel.send(self._script_ended)

    def unfinished_ranks(self) -> str:
        """Return text on the ranks whose scripts have not finished, empty without an answer."""
        self._channel.send(protocol.QueryUnfinished())
        answer = self._await(UnfinishedRanks)
        return answer.names if answer is not None else ""

    def report_locally_handled(self) -> None:
        """Report that this rank knows why it ends, and prints the reason itself."""
        self._helper.stop_monitoring()
        self._channel.send(protocol.LocallyHandled())

    def dismiss(self) -> None:
        """End the agent, and return when it has ended."""
        self._helper.stop_monitoring()
        self._channel.send(protocol.Leave())
        if self._is_watched:
            self._helper.await_end()
            self._leave_coordinator()
        self._descriptors.close()
        self._helper.close()
        self._channel.close()
        self._stop_reporting_signals()
        self._signals.close()
        self._its_signals.close()
        if self._window is not None:
            self._window.release_signal()

    def _leave_coordinator(self) -> None:
        """Send the coordinator `Leave`, too: a killed agent may not have passed it on."""
        if (connection := self._channel.take_descriptor()) >= 0:
            coordinator = RankChannel(socket.socket(fileno=connection), CODEC)
            coordinator.send(protocol.Leave())
            coordinator.close()

    def _await(self, kind: type[Awaited], timeout_s: float = ANSWER_TIMEOUT_S) -> Awaited | None:
        """Return the next message of a kind, None if none comes; messages of other kinds are kept.

        A signal's handler may wait for a message while the script's thread waits for another one.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError, OSError):
            while kind not in self._inbox and (left_s := deadline - time.monotonic()) > 0:
                self._read(min(left_s, MAX_READ_S))
        message = self._inbox.pop(kind, None)
        return message if isinstance(message, kind) else None

    def _read(self, timeout_s: float) -> None:
        """Put the messages of one read into the inbox; raise EOFError or OSError if the other end has closed."""
        with contextlib.suppress(TimeoutError):
            for message in self._channel.receive(timeout_s):
                self._inbox[type(message)] = message

    def _drain(self) -> None:
        """Put the messages received so far into the inbox."""
        with contextlib.suppress(EOFError, OSError):
            while messages := self._channel.receive(0):
                self._inbox.update((type(message), message) for message in messages)

    def _on_end_signal(self, *_: object) -> None:
        """End at the request of the agent or the coordinator; if a helper has died, continue without it."""
        is_late = handle_helper_deaths()
        if self._is_watched:
            if (end := self._await(EndRank, LATE_END_TIMEOUT_S if is_late else END_TIMEOUT_S)) is not None:
                self._end(end.status)
        else:
            self._obey_coordinator()

    def _on_agent_death(self) -> None:
        """Continue without the agent, which was killed, and connect to the coordinator."""
        assert self._registration
        self._is_watched = False
        self._drain()  # its last messages
        connection = self._channel.take_descriptor()
        self._stop_reporting_programs()
        if self._reports_crashes:
            show_crashes()
            self._reports_crashes = False
        if self._window is not None:
            self._window.close()
            self._window.release_signal()
            self._window = None
        if self._registration.member.rank == 0:
            self._print("the job continues, but mpiddp.where and --stall no longer work, and each rank that fails "
                        "prints its own report")
            return
        self._print("the rank continues without it; if the rank is killed, the cause stays unknown, and mpiddp.where "
                    "does not show the rank")
        try:
            self._connect_to_coordinator(connection)
        except (EOFError, OSError) as error:
            self._print(f"the coordinator cannot be reached ({error or 'it closed the connection'})")

    def _connect_to_coordinator(self, connection: int) -> None:
        """Use the agent's connection to the coordinator from now on, or a new one if that is -1."""
        assert self._registration
        member, address, port, token = self._registration
        if connection >= 0:
            sock = socket.socket(fileno=connection)
        elif port:
            from ..ipc.authentication import connect

            sock = connect((address, port), token, CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S)
        else:
            return
        self._channel = RankChannel(sock, CODEC)
        self._channel.send(protocol.Hello(member.rank, member.host, member.pid, member.namespace))
        self._channel.send(protocol.AgentLost())
        if self._script_ended is not None:
            self._channel.send(self._script_ended)
        arm_end_signal(self._channel.fileno())
        os.kill(os.getpid(), END_SIGNAL)  # a message may have come before

    def _obey_coordinator(self) -> None:
        """Carry out the coordinator's messages, which the agent did before it was killed."""
        self._drain()
        end, job_ends = self._inbox.pop(EndRank, None), self._inbox.pop(JobEnds, None)
        if isinstance(end, EndRank):  # of the agent's, before it was killed
            self._end(end.status)
        if isinstance(job_ends, JobEnds):
            if not self._is_ending and self._registration is not None:
                self._is_ending = True
                grace_s = self._registration.member.grace_s + protocol.FINAL_EXIT_TIMEOUT_S
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    _thread.start_new_thread(kill_after, (grace_s,))
            if job_ends.abort and (job_ends.waits or self._waits_for_job_end or not self._has_failed):
                self._end(job_ends.status)

    def _print(self, text: str) -> None:
        """Print on the launcher's stderr, even if the script has replaced its own."""
        with contextlib.suppress(OSError):
            stderr = self._stderr if self._descriptors.owns(self._stderr) else 2
            write_all(stderr, f"mpiddp: {self._helper.name} exited unexpectedly: {text}\n".encode(errors="replace"))

    def _stop_reporting_signals(self) -> None:
        if self._wakeup_fd is not None:
            self._wakeup_fd.end()
            self._wakeup_fd = None

    def _in_child(self) -> None:
        """Report a child that the script has forked; then close in it what belongs to the agent."""
        if self._channel.fileno() < 0:
            return
        if self._is_watched:
            self._channel.send(protocol.ChildStarted(os.getpid()))
        self._descriptors.close()
        self._helper.abandon()
        self._channel.close()
        self._stop_reporting_signals()
        if self._reports_crashes:  # else the stack goes into the file that gets the number of our descriptor
            show_crashes()


class WakeupFd:
    """Sends each signal's number to a descriptor, as the process's wake-up descriptor (signal.set_wakeup_fd).

    Python writes to it from its handler in C, and also if _thread.interrupt_main() simulates a signal. asyncio and
    uvloop use the process's only wake-up descriptor while they run, and leave none set: then ours is set again.
    """

    def __init__(self, descriptor: int) -> None:
        """Begin; the descriptor does not block."""
        self._descriptor = descriptor
        self._set_wakeup_fd = signal.set_wakeup_fd
        self._interrupt_main = _thread.interrupt_main
        self._is_on = True  # checked later: a library may keep our function
        self.lent = False  # others have used the process's descriptor, and may have got a signal's number
        self.simulated = False  # the script has called _thread.interrupt_main()
        if (former := self._set_wakeup_fd(descriptor, warn_on_full_buffer=False)) >= 0:
            self._set_wakeup_fd(former)
            self.lent = True
        signal.set_wakeup_fd = self._set
        _thread.interrupt_main = self._simulate

    def end(self) -> None:
        """Stop using the descriptor; one of others stays set."""
        self._is_on = False
        if signal.set_wakeup_fd == self._set:
            signal.set_wakeup_fd = self._set_wakeup_fd
        if _thread.interrupt_main == self._simulate:
            _thread.interrupt_main = self._interrupt_main
        with contextlib.suppress(ValueError):  # not in the main thread
            if (descriptor := self._set_wakeup_fd(-1)) != self._descriptor:
                self._set_wakeup_fd(descriptor)

    def _set(self, fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
        """Act as `signal.set_wakeup_fd`: if the script unsets its own, ours is set again; ours is returned as -1."""
        if fd == -1 and self._is_on:
            fd, warn_on_full_buffer = self._descriptor, False
        self.lent |= fd != self._descriptor
        former = self._set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
        return -1 if former == self._descriptor and self._is_on else former

    def _simulate(self, signum: signal.Signals = signal.SIGINT, /) -> None:
        """Act as `_thread.interrupt_main`."""
        self.simulated |= signum == signal.SIGINT
        self._interrupt_main(signum)


def kill_after(seconds: float) -> None:
    """Kill this process after a while, in a thread: without an agent no other process does."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def show_crashes() -> None:
    """Make faulthandler print to stderr."""
    faulthandler.disable()
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(file=2)


def leave_to_agent(*_: object) -> None:
    """Handle SIGQUIT by doing nothing: the agent gets its number, and requests a snapshot."""


def report_programs(report: Callable[[int], object]) -> Callable[[], None]:
    """Call `report` with the process of each program that subprocess or multiprocessing starts; return the undo.

    os.register_at_fork() does not see them: both start programs by the same function of C.
    """
    import _posixsubprocess

    fork_exec = _posixsubprocess.fork_exec

    @functools.wraps(fork_exec)
    def reporting_fork_exec(*arguments: Any) -> int:
        pid: int = fork_exec(*arguments)
        report(pid)
        return pid

    # subprocess may have imported the function by name
    places = [(_posixsubprocess, "fork_exec"), (sys.modules.get("subprocess"), "_fork_exec")]
    replace_function(places, fork_exec, reporting_fork_exec)
    return functools.partial(replace_function, places, reporting_fork_exec, fork_exec)


def replace_function(places: list[tuple[Any, str]], former: object, new: object) -> None:
    """Replace a function wherever it still is."""
    for module, name in places:
        if getattr(module, name, None) is former:
            setattr(module, name, new)
