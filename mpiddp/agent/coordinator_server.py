"""The coordinator's I/O, in rank 0's agent: connects its logic with the agents of all ranks."""

from __future__ import annotations

import contextlib
import enum
import math
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ..base.config import RESTART_VARIABLE, RUNNING_SUFFIX
from ..base.errors import assert_never
from ..base.files import open_for_writing
from ..base.ranks import RankIdentity
from ..base.stderr import write_line
from ..base.version import __version__
from ..failure.report import format_error_file, print_failure
from ..ipc.authentication import AuthListener, enable_keepalive
from ..ipc.channel import Channel, Codec, Unreadable, listen
from ..ipc.event_loop import EventLoop
from ..output.index import complete_index
from ..where import progress
from ..where.protocol import Sample, SnapshotReply, SnapshotRequest, ThreadsReply, ThreadsRequest
from ..where.registry import JobEndpoint, find_job_number, remove_endpoint, remove_file, write_endpoint
from . import events, protocol
from .coordinator import Coordinator
from .events import CoordinatorCommand
from .process_cleanup import cancel_slurm_step, find_waiting_launcher
from .tasks import Tasks
from .timeouts import FINAL_FLUSH_TIMEOUT_S, INDEX_TIMEOUT_S, SIGNAL_SPREAD_S, SNAPSHOT_TIMEOUT_S

if TYPE_CHECKING:
    from ..where.service import SnapshotService

PeerChannel = Channel[protocol.CoordinatorSends, protocol.CoordinatorReceives]
CODEC: Codec[protocol.CoordinatorReceives] = Codec(protocol.CoordinatorReceives)

OWN_LINK = 0  # to this process's own watcher; connections have higher numbers
IDLE_CHECK_S = 5.0  # between two looks at rank 0's CPU time


class Requester(enum.IntEnum):
    """What in this process requests a snapshot; numbers from 1 on are connections."""

    STALL_CHECK = -1
    DECISION = -2
    SIGQUIT = -3
    DEADLOCK_CHECK = -4


class CoordinatorServer:
    """Listens for the job's agents, and carries out the coordinator's actions."""

    def __init__(
        self, loop: EventLoop, request: protocol.StartCoordinator, config: protocol.AgentConfig,
        post: Callable[[events.AgentEvent], None], began_s: float, tasks: Tasks,
    ) -> None:
        """Listen on the requested address and port; raise OSError if that is impossible.

        `post` gets the own watcher's events. `began_s` is when the watch of rank 0 began, on time.monotonic()'s clock.
        """
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        self._listener = AuthListener(
            loop, listen(request.address, request.port), request.token, request.ranks, self._on_connection)
        self.port = self._listener.port
        self._loop, self._config, self._post, self._tasks = loop, config, post, tasks
        self._coordinator = Coordinator(config, began_s)
        self._lazy_snapshots: SnapshotService | None = None
        self._request, self._running_mark = request, ""
        self._endpoint: JobEndpoint | None = None
        self._channels: dict[int, PeerChannel] = {}
        self._last_link = OWN_LINK
        self.waiting_launcher = 0  # the process of the launcher that does not end by itself

    def register_own_rank(self, member: RankIdentity) -> None:
        """Admit this process's own rank, and make the job visible to `mpiddp.where`."""
        self.handle(events.OwnRankJoined(OWN_LINK, member))
        endpoint = JobEndpoint(member.run_id, *find_job_number(), member.host, self._request.address, self.port,
                           self._request.token, member.world_size, __version__, self._config.script, time.time())
        self._endpoint = endpoint
        if RESTART_VARIABLE in os.environ and member.error_file:
            self._running_mark = f"{member.error_file}{RUNNING_SUFFIX}"
            self._tasks.run(partial(make_file, self._running_mark))
        self._loop.set_timer("endpoint", events.WARMUP_DELAY_S, partial(self._warm_up, endpoint, member.pid))
        if self._config.stall_s:
            self._check_for_stall()

    def _warm_up(self, endpoint: JobEndpoint, pid: int) -> None:
        """Import now what `where` needs: a later import could hang on a dead file system."""
        with contextlib.suppress(OSError, ImportError):  # no descriptor is left: imported again when needed
            self._snapshots()
            import_module("hmac")  # of ipc/authentication.py, if no other rank has connected
        self._tasks.run(partial(write_endpoint, endpoint))
        self._check_own_rank(pid)

    def close(self) -> None:
        """Give the others time to receive the last messages, and remove the endpoint file."""
        deadline = time.monotonic() + FINAL_FLUSH_TIMEOUT_S
        unflushed = list(self._channels.values())
        while (unflushed := [channel for channel in unflushed if not channel.flush()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._loop.cancel_timers("endpoint")
        if self._endpoint:
            self._tasks.run(partial(remove_endpoint, self._endpoint))

    @property
    def is_complete(self) -> bool:
        """Whether the job is over, and all ranks have ended."""
        return self._coordinator.is_complete

    def await_peers(self, limit_s: float) -> None:
        """Return when the other agents have ended, or at the limit."""
        deadline = time.monotonic() + limit_s
        waiting = select.poll()
        for channel in self._channels.values():
            waiting.register(channel, select.POLLRDHUP)
        left = len(self._channels)
        while left and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, _ in waiting.poll(1000 * left_s):
                waiting.unregister(descriptor)
                left -= 1

    def handle_own_message(self, message: protocol.AgentToCoordinator) -> None:
        """Handle a message of this process's own watcher."""
        self._on_message(OWN_LINK, message)

    def _on_message(self, link: int, message: protocol.CoordinatorReceives | Unreadable) -> None:
        """Handle a message of a rank's agent."""
        match message:
            case SnapshotRequest():
                if not self._loop.has_timer("sigquit"):
                    self._loop.set_timer("sigquit", SNAPSHOT_TIMEOUT_S + SIGNAL_SPREAD_S, lambda: None)
                    self._request_snapshot(Requester.SIGQUIT)
            case ThreadsReply():
                self._send(message.asker, message)
            case Sample():
                if link in self._coordinator.peers.by_link:
                    rank = self._coordinator.peers.by_link[link].rank
                    self._deliver(self._snapshots().collector.take(rank, message))
            case ThreadsRequest():
                raise ValueError("unexpected ThreadsRequest from an agent")
            case _:
                self.handle(events.FromPeer(link, message))

    def handle(self, event: events.CoordinatorEvent) -> None:
        """Pass an event to the coordinator, and carry out its actions."""
        actions = self._coordinator.handle(event, time.monotonic())
        for action in sorted(actions, key=is_for_own_watcher):  # last: the own watcher may end this process
            self._loop.call_safely(partial(self._do, action))

    def _do(self, action: events.CoordinatorAction) -> None:
        match action:
            case events.ToPeer(link, message):
                self._send(link, message)
            case events.ToPeers(links, message):
                for link in sorted(links, key=OWN_LINK.__eq__):  # last, see handle()
                    self._send(link, message)
            case events.CloseConnection(link):
                if link in self._channels:
                    self._close(link)
            case events.SetTimer(name, after_s):
                self._loop.set_timer(f"coordinator: {name}", after_s, partial(self.handle, events.Due(name)))
            case events.PrintLine(text):
                write_line(text)
            case events.PrintOwnReport(reason, after_s, error_file):
                print_failure(reason, None, after_s)
                if error_file:
                    self._tasks.write(error_file, format_error_file(reason, None, progress.step_count()))
            case events.CompleteIndex():
                self._complete_index(action)
            case CoordinatorCommand.NOTE_END_IN_ORDER:
                if self._running_mark:
                    self._tasks.run(partial(remove_file, self._running_mark))
            case CoordinatorCommand.CANCEL_STEP:
                self._tasks.run(partial(cancel_slurm_step, self._config.step))
                self.waiting_launcher = find_waiting_launcher(self._config.launcher)
            case CoordinatorCommand.TAKE_SNAPSHOT:
                self._request_snapshot(Requester.DECISION)
            case CoordinatorCommand.CHECK_DEADLOCK:
                self._request_snapshot(Requester.DEADLOCK_CHECK)
            case _:
                assert_never(action)

    def _complete_index(self, request: events.CompleteIndex) -> None:
        done, path = "done", request.path
        self._tasks.run(lambda: complete_index(path, request.ends, request.first) or done,
                        lambda result: self.handle(events.IndexCompleted("" if result == done else result)),
                        f"mpiddp: cannot write {path}: no response within {INDEX_TIMEOUT_S:g} s", INDEX_TIMEOUT_S)

    def _send(self, link: int, message: protocol.CoordinatorSends) -> None:
        if link == OWN_LINK and not isinstance(message, (SnapshotReply, ThreadsReply)):
            self._post(events.FromCoordinator(message))
        elif link in self._channels and not self._channels[link].enqueue(message):
            self._loop.watch_writable(self._channels[link])

    def _deliver(self, messages: Iterable[tuple[int, protocol.CoordinatorSends]]) -> None:
        """Send requests to agents, or a snapshot to each connection and requester that waits for it."""
        for link, message in messages:
            match link:
                case Requester.STALL_CHECK:
                    self._report_stall()
                case Requester.SIGQUIT:
                    write_line(f"mpiddp: SIGQUIT received; the ranks are here:\n{self._snapshots().format_table()}")
                case Requester.DECISION:
                    self._report_snapshot()
                case Requester.DEADLOCK_CHECK:
                    self.handle(events.DeadlockChecked(self._snapshots().find_deadlock(time.monotonic())))
                case _:
                    self._send(link, message)

    def _request_snapshot(self, requester: int) -> None:
        """Ask all agents where their ranks are, for a requester or a connection."""
        peers = self._coordinator.peers
        collector = self._snapshots().collector
        living = {rank: peer for rank, peer in peers.by_rank.items() if not peer.has_ended}
        requests = collector.request(requester, {rank: peer.link for rank, peer in living.items()},
                                     {rank: peer.host for rank, peer in living.items()},
                                     signals=requester != Requester.DEADLOCK_CHECK)
        if requests:  # none is under way
            self._loop.set_timer("snapshot", SNAPSHOT_TIMEOUT_S, lambda: self._deliver(collector.finish()))
            self._deliver(requests)

    def _snapshots(self) -> SnapshotService:
        if self._lazy_snapshots is None:
            from ..where.service import SnapshotService  # not while the job starts

            self._lazy_snapshots = SnapshotService(self._config.stall_s)
        return self._lazy_snapshots

    def _report_snapshot(self) -> None:
        """Pass a snapshot to the coordinator."""
        failed = {report.rank: report.where for report in self._coordinator.evidence.reports.all}
        self.handle(events.SnapshotTaken(self._snapshots().observe(failed)))

    def _check_own_rank(self, pid: int, before_s: float = math.nan) -> None:
        """Report again and again whether this process's own rank is idle."""
        is_own_idle, busy_s = False, math.nan  # unknown
        with contextlib.suppress(OSError, ImportError):  # no descriptor is left
            from ..where.process_sample import sample_process
            from ..where.stall import is_idle

            if (sample := sample_process(pid)) is not None:
                busy_s = sample.busy_s
                is_own_idle = is_idle(busy_s - before_s, IDLE_CHECK_S)
        self.handle(events.OwnRankIdle(is_own_idle))
        self._loop.set_timer("own rank", IDLE_CHECK_S, partial(self._check_own_rank, pid, busy_s))

    def _check_for_stall(self) -> None:
        self._request_snapshot(Requester.STALL_CHECK)
        self._loop.set_timer("stall", self._snapshots().stall_interval_s, self._check_for_stall)

    def _report_stall(self) -> None:
        """Pass it to the coordinator if the ranks have stopped to move, or move again."""
        if (stall := self._snapshots().find_stall(time.monotonic())) is not None:
            self.handle(events.StallChanged(*stall))

    def _on_connection(self, connection: socket.socket) -> None:
        """Read an authenticated connection: of an agent, which sends its `Hello` first, or of `mpiddp.where`."""
        with contextlib.suppress(OSError):  # the next read fails, too
            enable_keepalive(connection)
        self._last_link += 1
        link, channel = self._last_link, PeerChannel(connection, CODEC)
        self._channels[link] = channel
        is_agent = False

        def read() -> None:
            nonlocal is_agent
            if channel.flush():
                self._loop.watch_writable(channel, enabled=False)
            try:
                messages = channel.receive(0)
            except (EOFError, OSError) as error:
                self._close(link)
                if self._lazy_snapshots is not None:
                    self._lazy_snapshots.collector.forget(link)
                self.handle(events.PeerLost(link, "" if isinstance(error, EOFError) else str(error.strerror)))
                return
            for message in messages:
                if is_agent:
                    self._loop.call_safely(partial(self._on_message, link, message))
                    continue
                match message:
                    case protocol.Hello():
                        is_agent = True
                        self.handle(events.PeerGreeted(link, message))
                    case SnapshotRequest():
                        self._request_snapshot(link)
                    case ThreadsRequest():
                        self._request_threads(link, message)
                    case _:
                        self._close(link)
                        raise ValueError(f"expected Hello, got {type(message).__name__}")

        self._loop.watch(channel, read)

    def _request_threads(self, link: int, request: ThreadsRequest) -> None:
        """Pass a request of `mpiddp.where` on to the rank's agent, or answer it if there is none."""
        peer = self._coordinator.peers.by_rank.get(request.rank)
        if peer and not peer.has_ended:
            self._send(peer.link, request._replace(asker=link))
        else:
            self._send(link, ThreadsReply(request.rank, "has ended"))

    def _close(self, link: int) -> None:
        channel = self._channels.pop(link)
        self._loop.unwatch(channel)
        channel.close()


def make_file(path: str) -> None:
    """Make a file, if it does not exist."""
    os.close(open_for_writing(path, keep=True))


def is_for_own_watcher(action: events.CoordinatorAction) -> bool:
    """Return whether an action has a message to this process's own watcher."""
    match action:
        case events.ToPeer(link):
            return link == OWN_LINK
        case events.ToPeers(links):
            return OWN_LINK in links
    return False
