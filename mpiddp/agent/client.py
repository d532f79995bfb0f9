"""The rank's side of its agent."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from ..base.ranks import RankIdentity
from ..base.stderr import write_line
from ..base.text import truncate_middle
from ..failure.root_cause import MAX_STACK_CHARS, Report, truncate_report
from ..ipc.channel import Channel, Codec, Unreadable
from ..output.protocol import ForwardConfig, OutputConfigured, ShowText
from ..planning.environment import Endpoint
from ..where.dumper import StackDumper, handled_signals
from . import protocol
from .protocol import AgentToRank, AllFinished, JobEnds, ListenPort, PrintStack, RankToAgent, RegistrationDone
from .timeouts import ABORT_WAIT_S, ANSWER_TIMEOUT_S, LISTEN_TIMEOUT_S

RankChannel = Channel[RankToAgent, AgentToRank]
CODEC: Codec[AgentToRank] = Codec(AgentToRank)
Awaited = TypeVar("Awaited", OutputConfigured, RegistrationDone, ListenPort, JobEnds, AllFinished)

MAX_READ_S = 0.1  # for one read: another thread, or a signal's handler, may have read the answer


class AgentClient:
    """Talks to the agent of this process, which has forked it."""

    def __init__(self, channel: RankChannel, crash_pipe: int, dumper_fds: tuple[int, int], began_s: float,
                 has_own_group: bool, is_forwarded: bool) -> None:
        """Use the connections that were made before the fork, at `began_s` on time.monotonic()'s clock."""
        self.began_s = began_s
        self._pid = os.getpid()
        self._channel = channel
        self._crash_pipe, self._dumper_fds = crash_pipe, dumper_fds
        self._has_own_group, self.is_forwarded = has_own_group, is_forwarded
        self._inbox: dict[type[Any], AgentToRank | Unreadable] = {}
        self._dumper: StackDumper | None = None
        self._reports_crashes = False

    def report_stage(self, name: str) -> None:
        """Report the stage that begins."""
        self._channel.send(protocol.Stage(name))

    def hand_over_sockets(self, sockets: Collection[int]) -> None:
        """Let the agent hold duplicates of the sockets by which MPI knows this rank."""
        for descriptor in sockets:
            self._channel.send(protocol.MpiSocket(), descriptor)

    def serve_probes(self, token: str, port: int = 0) -> int:
        """Make the agent send `token` to all who connect to this node, and return the port; 0 if it cannot.

        It listens on `port`, or on a free one if that is 0.
        """
        return self._request_port(protocol.ServeProbes(token, port))

    def start_coordinator(self, address: str, token: str, ranks: int, port: int = 0) -> int:
        """Make this agent the coordinator of so many ranks, and return the port on which it listens at `address`.

        That is `port`, or a free one if that is 0. Returns 0 if it cannot. It serves no probes any more.
        """
        return self._request_port(protocol.StartCoordinator(address, token, ranks, port))

    def _request_port(self, request: protocol.ServeProbes | protocol.StartCoordinator) -> int:
        self._channel.send(request)
        port = self._await(ListenPort, LISTEN_TIMEOUT_S)
        while port is not None and port.request != type(request).__name__:  # a late answer to an earlier request
            port = self._await(ListenPort, LISTEN_TIMEOUT_S)
        return port.number if port is not None else 0

    def register(self, member: RankIdentity, endpoint: Endpoint) -> None:
        """Register the rank with its agent, with the coordinator's address."""
        self._channel.send(protocol.RegisterRank(
            member, endpoint.address, endpoint.coordinator_port, endpoint.agent_token))

    def await_registration(self) -> None:
        """Wait, but not for long, until the coordinator has admitted this rank: it then sees which rank ends first."""
        self._await(RegistrationDone, ANSWER_TIMEOUT_S)

    def configure_output(self, config: ForwardConfig, listener: int) -> None:
        """Make the agent forward what this rank writes from now on as `config` says.

        Agents of other ranks connect to the descriptor `listener`, -1 for none, which this closes.
        """
        self._channel.send(config, listener)
        if listener >= 0:
            os.close(listener)
        self._await(OutputConfigured, ANSWER_TIMEOUT_S)

    def show_text(self, text: str) -> None:
        """Print a text of mpiddp's own on the terminal, even if that does not show this rank's output."""
        if self.is_forwarded:
            self._channel.send(ShowText(text))
        else:
            write_line(text)

    def begin_script(self) -> None:
        """Let the agent see the script's stacks and crashes, except those that others handle already."""
        self._channel.send(protocol.Stage(""))
        if not faulthandler.is_enabled():
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=self._crash_pipe)
                self._reports_crashes = True
        with contextlib.suppress(OSError):
            self._dumper = StackDumper(*self._dumper_fds)
        is_free = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL and not handled_signals([signal.SIGQUIT])
        if not self._has_own_group and is_free:
            signal.signal(signal.SIGQUIT, leave_to_agent)
        os.register_at_fork(after_in_child=self._in_child)

    def report_failure(self, report: Report, print_stack: Callable[[], str] = str) -> int:
        """Report why this rank fails, and return the job's exit status.

        If this rank was the first to fail, `print_stack` is called, which prints its traceback, and returns it; also if
        the agent does not answer, because the script has closed the connection, for example.
        """
        self._channel.send(protocol.Failed(truncate_report(report)))
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while (end := self._await_any((JobEnds, PrintStack), deadline)) is not None:
            if isinstance(end, JobEnds):
                return end.status
            self._inbox.pop(PrintStack)
            self._channel.send(protocol.StackPrinted(truncate_middle(print_stack(), MAX_STACK_CHARS)))
        print_stack()
        return report.status

    def report_refusal(self, report: Report) -> int:
        """Report that this rank ends for a reason that it has printed itself, and return the job's exit status."""
        self.report_locally_handled()
        return self.report_failure(report)

    def await_abort(self, grace_s: float) -> int | None:
        """Report that this rank can end the job by MPI_Abort, and return the status for that; None if it need not.

        Other ranks may take `grace_s` to end.
        """
        self._channel.send(protocol.ReadyToAbort())
        abort = self._await_any((protocol.Abort,), time.monotonic() + grace_s + ABORT_WAIT_S)
        return abort.status if isinstance(abort, protocol.Abort) else None

    def report_locally_handled(self) -> None:
        """Report that this rank knows why it ends, and prints the reason itself."""
        self._channel.send(protocol.LocallyHandled())

    def close(self) -> None:
        """Close the connection to the agent: this process ends."""
        self._channel.close()

    def await_all_finished(self, calls: int) -> AllFinished | JobEnds | None:
        """Report that the script has finished, and wait until all ranks' have.

        Returns JobEnds if the job ends instead, None if the agent cannot be reached: the script has closed the
        connection. If a signal's handler raises meanwhile, call this again.
        """
        self._channel.send(protocol.ScriptEnded(calls))
        answer = self._await_any((AllFinished, JobEnds), math.inf)
        return answer if isinstance(answer, (AllFinished, JobEnds)) else None

    def leave(self, status: int) -> None:
        """Report that this rank has left MPI and the job, and ends with a status."""
        self._channel.send(protocol.Leave(status))

    def _await(self, kind: type[Awaited], timeout_s: float) -> Awaited | None:
        """Return the next message of a kind, None if none comes; messages of other kinds are kept.

        A signal's handler may wait for a message while the script's thread waits for another one.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(EOFError, OSError):
            while kind not in self._inbox and (left_s := deadline - time.monotonic()) > 0:
                self._read(min(left_s, MAX_READ_S))
        message = self._inbox.pop(kind, None)
        return message if isinstance(message, kind) else None

    def _await_any(self, kinds: Collection[type[AgentToRank]], deadline: float) -> AgentToRank | None:
        """Return a message of one of these kinds, which is kept; None if none comes, or the agent has ended."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                for kind in kinds:
                    if isinstance(message := self._inbox.get(kind), kind):
                        return message
                if (left_s := deadline - time.monotonic()) <= 0:
                    return None
                self._read(min(left_s, MAX_READ_S))
        return None

    def _read(self, timeout_s: float) -> None:
        """Put the messages of one read into the inbox; raise EOFError or OSError if the other end has closed."""
        with contextlib.suppress(TimeoutError):
            for message in self._channel.receive(timeout_s):
                self._inbox[type(message)] = message

    def _in_child(self) -> None:
        """Close in a process that the script has forked what belongs to the rank."""
        self._channel.close()
        if self._reports_crashes:  # else the stack goes into the file that gets the number of our descriptor
            faulthandler.disable()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.enable(file=2)


class NoAgent:
    """Stands for the agent of a rank that has none (--no-agent)."""

    def report_stage(self, name: str) -> None:
        """Report nothing."""

    def hand_over_sockets(self, sockets: Collection[int]) -> None:
        """Hand nothing over."""

    def report_locally_handled(self) -> None:
        """Report nothing."""

    def close(self) -> None:
        """Close nothing."""


def leave_to_agent(*_: object) -> None:
    """Handle SIGQUIT by doing nothing: the agent gets it, too, and requests a snapshot."""


def list_connections() -> set[int]:
    """Return the descriptors of this process's connected sockets."""
    connections = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            duplicate.getpeername()
            connections.add(descriptor)
    return connections


def holding_new_sockets(client: AgentClient | NoAgent) -> Callable[[], None]:
    """Return a function that hands over the connections that are made between this call and that one."""
    before = list_connections()
    return lambda: client.hand_over_sockets(list_connections() - before)
