"""The hold in its ranks: each starts its template, and rank 0 serves those who run scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..base.config import LaunchConfig
from ..base.errors import LocalLaunchError
from ..base.files import format_os_error
from ..base.stderr import write_line
from ..base.text import format_ranges
from ..bootstrap.prepare import values_set
from ..discovery.runtime import hostname
from ..ipc.authentication import AuthListener, enable_keepalive
from ..ipc.channel import Codec, Unreadable, listen
from ..ipc.connection import Connection
from ..ipc.event_loop import EventLoop
from ..systems.launchers import HOLD, HOLD_RANK, HOLD_SIZE
from ..systems.statuses import EXIT_INTERRUPTED, signal_status
from . import protocol, registry
from .template import Template

if TYPE_CHECKING:
    import socket

    from ..runner.lifecycle import RunningJob

Peer = Connection[protocol.ToPeer, protocol.FromPeer]
CODEC: Codec[protocol.FromPeer] = Codec(protocol.FromPeer)
KILL_DELAY_S = 10.0  # for a run whose client is gone, or of which a rank has failed, to end by itself
ERRORS_SPREAD_S = 1.0  # for all ranks to say why they cannot begin
REMIND_AFTER_S = 10.0  # of the hold's start until the ranks are named that are awaited


def hold(preload: str, job: RunningJob, config: LaunchConfig) -> int:
    """Hold this rank until the end, and return its exit status."""
    rendezvous, env = job.membership.rendezvous, job.membership.environment
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends all
    server = Server(job.membership.endpoint.address, env.world_size) if env.rank == 0 else None
    where = ("", 0, "") if server is None else server.where
    address, port, token = rendezvous.exchange("starting the hold", None, lambda ranks: [where] * len(ranks))
    lowest, is_one_node = rendezvous.ranks.find_node()
    plan = Template(address, port, token, preload, env.rank, env.world_size, lowest, is_one_node,
                    rendezvous.ranks.library)
    template = subprocess.Popen([sys.executable, "-m", "mpiddp.hold.template"], stdin=subprocess.PIPE,
                                text=True, env=make_environ(job, env.rank, env.world_size))
    assert template.stdin is not None
    template.stdin.write(json.dumps(plan._asdict()) + "\n")
    template.stdin.close()
    failure = server.serve(job.membership.endpoint.run_id, template.pid, config.startup_timeout_s) if server else ""
    if not failure and template.wait():
        sys.exit(f"the template of rank {env.rank} on {hostname()} has ended: status {template.returncode}")
    if failure:
        job.refuse_alone(LocalLaunchError(
            "hold-failed", actual=failure,
            needed="a template on each rank, a process that imports torch and what --preload names",
            do="mend what is found, or leave it out of --preload"))
    return 0


def make_environ(job: RunningJob, rank: int, size: int) -> dict[str, str]:
    """Return the variables of a template: those with which this rank was started, without the MPI launcher's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*HOLD.hides_always, "MPIDDP_"))}
    for name, former in job.membership.saved.items():
        if name == "OMP_NUM_THREADS" or kept.get(name) != values_set.get(name):
            continue
        kept.pop(name, None)
        if former is not None:
            kept[name] = former
    return {**kept, HOLD_RANK: str(rank), HOLD_SIZE: str(size)}


class Server:
    """Serves one client at a time."""

    def __init__(self, address: str, size: int) -> None:
        self._loop = EventLoop(self._on_error)
        self._listener = AuthListener(self._loop, listen(address, 0), token := os.urandom(16).hex(), size, self._greet)
        self.where = address, self._listener.port, token
        self._size, self._began_s = size, time.monotonic()
        self._templates: dict[int, Peer] = {}
        self._errors: dict[int, str] = {}  # by rank: why its template cannot be one
        self._client: Peer | None = None
        self._waiting: dict[Peer, tuple[protocol.StartRun, list[protocol.Input]]] = {}  # clients, the first first
        self._renewer: Peer | None = None  # a client that waits for new templates
        self._run: protocol.StartRun | None = None
        self._is_forked = False
        self._early: list[protocol.Signal | protocol.Input] = []  # what the client sends until the run is forked
        self._interrupts = 0  # of the client
        self._statuses: list[int] = []
        self._run_id = self._failure = ""
        self._timeout_s, self._is_renewed = 0.0, False

    def serve(self, run_id: str, template: int, timeout_s: float) -> str:
        """Serve until the hold ends, or this rank's template, a process; return why it could not begin, else empty."""
        self._run_id = run_id
        self._timeout_s = timeout_s
        self._loop.watch_process(template, self._loop.stop)
        self._await_templates()
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, lambda *_: self._end())
        try:
            self._loop.run()
        finally:
            registry.remove_hold(run_id)
            self._listener.close()
            for peer in (*self._templates.values(), self._renewer, *self._waiting):  # templates end then
                if peer is not None:
                    peer.close()
        return self._failure

    def _await_templates(self) -> None:
        self._loop.set_timer("late", REMIND_AFTER_S, self._remind)
        self._loop.set_timer("start", self._timeout_s, lambda: self._fail(
            f"rank {self._missing}: no template within {self._timeout_s:g} s"))

    def _on_sigterm(self, number: int, _: object) -> None:
        registry.remove_hold(self._run_id)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _remind(self) -> None:
        write_line(f"mpiddp: still waiting for rank {self._missing} to import torch and what --preload names")
        self._loop.set_timer("late", REMIND_AFTER_S, self._remind)

    def _describe_errors(self) -> str:
        """Return why templates cannot be any: the first one's reason, and which others have the same."""
        why = self._errors[min(self._errors)]
        ranks = sorted(rank for rank, error in self._errors.items() if error == why)
        return f"{why} (rank {format_ranges(ranks)})"

    def _refuse_all(self) -> None:
        """Tell the clients why packages cannot be imported: that can be mended, and the hold stays."""
        if self._renewer is not None:
            self._finish_client(self._renewer, protocol.Refused(self._describe_errors()))
            self._renewer = None
        self._start_next()

    @property
    def _missing(self) -> str:
        return format_ranges(sorted(range(self._size) - self._templates.keys()))

    def _fail(self, why: str) -> None:
        self._failure = why
        self._loop.stop()

    def _greet(self, connection: socket.socket) -> None:
        """Read a connection, whose first message tells whose it is."""
        enable_keepalive(connection, may_stall=True)
        peer: Peer

        def receive(messages: list[protocol.FromPeer | Unreadable]) -> None:
            for message in messages:
                self._on_message(peer, message)

        peer = Connection(self._loop, connection, CODEC, receive, lambda _: self._on_lost(peer))

    def _on_message(self, peer: Peer, message: protocol.FromPeer | Unreadable) -> None:
        match message:
            case protocol.Ready(rank, error):
                self._templates[rank] = peer
                if error:
                    self._errors[rank] = error
                if error and not self._is_renewed:
                    self._loop.set_timer("errors", ERRORS_SPREAD_S, lambda: self._fail(self._describe_errors()))
                if len(self._templates) == self._size:
                    self._loop.cancel_timers("late", "start")
                    if not self._errors:
                        self._announce()
                    elif self._is_renewed:
                        self._refuse_all()
            case protocol.StartRun():
                self._start(peer, message)
            case protocol.Renew():
                self._renew(peer)
            case protocol.EndHold():
                self._end()
            case protocol.Signal() | protocol.Input() if peer is self._client and self._is_forked:
                self._pass_on(message)
            case protocol.Signal() | protocol.Input() if peer is self._client:
                self._early.append(message)
            case protocol.Signal(number) if peer in self._waiting:
                self._finish_client(peer, protocol.RunOver(signal_status(number)))
                del self._waiting[peer]
            case protocol.Input() if peer in self._waiting:
                self._waiting[peer][1].append(message)
            case protocol.Signal() | protocol.Input():
                pass  # the run is over
            case protocol.PortOpened() if self._client is None:  # it has ended already
                self._finish()
            case protocol.PortOpened(port) if self._run is not None:
                self._send_all(protocol.Fork(self._run, port, os.urandom(16).hex()))
                self._is_forked = True
                for early in self._early:
                    self._pass_on(early)
            case protocol.Output():
                if self._client is not None and not self._client.send(message):
                    self._pause(True)
            case protocol.RankOver(status):
                self._on_rank_over(status)
            case _:
                peer.close()

    def _announce(self) -> None:
        try:
            registry.write_hold(registry.Hold(self._run_id, hostname(), *self.where, self._size, time.time()))
        except OSError as error:
            path = registry.hold_path(self._run_id)
            self._fail(f"cannot write {path}, by which mpiddp.run finds the hold: {format_os_error(error, path)}")
            return
        ranks = f"{self._size} rank{'s' * (self._size > 1)}"
        write_line(f"mpiddp: a hold of {ranks} is ready after {time.monotonic() - self._began_s:.1f} s; start scripts "
                   "with python -m mpiddp.run, end it with python -m mpiddp.run --end")
        if self._renewer is not None:
            self._finish_client(self._renewer, protocol.RunOver(0))
            self._renewer = None
        self._start_next()

    def _start(self, peer: Peer, run: protocol.StartRun, early: Sequence[protocol.Input] = ()) -> None:
        """Start a run, or let it wait, or refuse it; its client has sent `early` while it was waiting."""
        is_busy = self._run is not None or len(self._templates) < self._size
        if run.python != (own := registry.describe_python()):
            self._finish_client(peer, protocol.Refused(f"the hold runs {own}, and this is {run.python}"))
        elif self._errors:
            self._finish_client(peer, protocol.Refused(
                f"{self._describe_errors()}; mend that, and then python -m mpiddp.run --renew"))
        elif is_busy and run.waits:
            self._waiting[peer] = run, []
            peer.send(protocol.Output(2, f"mpiddp.run: waiting: {self._describe_work()}\n".encode()))
        elif is_busy:
            self._finish_client(peer, protocol.Refused(f"{self._describe_work()}; --wait waits for it"))
        else:
            self._client, self._run, self._early = peer, run, [*early]
            peer.on_drain = partial(self._pause, False)
            self._templates[0].send(protocol.OpenPort())

    def _describe_work(self) -> str:
        return ("another script runs in this hold" if self._run is not None else
                f"the hold is not ready: {len(self._templates)} of {self._size} ranks are")

    def _finish_client(self, peer: Peer, answer: protocol.RunOver | protocol.Refused) -> None:
        peer.send(answer)
        peer.finish(lambda: None)

    def _renew(self, peer: Peer) -> None:
        """Let all templates begin anew."""
        if self._run is not None or self._renewer is not None or len(self._templates) < self._size:
            self._finish_client(peer, protocol.Refused(self._describe_work()))
            return
        self._renewer, self._is_renewed, self._began_s = peer, True, time.monotonic()
        self._send_all(protocol.Renew())
        self._templates, self._errors = {}, {}
        self._await_templates()

    def _on_rank_over(self, status: int) -> None:
        self._statuses.append(status)
        if status:
            self._loop.set_timer("terminate", KILL_DELAY_S, partial(self._end_others, status))
            self._loop.set_timer("kill", 2 * KILL_DELAY_S, partial(self._kill, signal.SIGKILL))
        if len(self._statuses) == self._size:
            if self._client is not None:
                status = EXIT_INTERRUPTED if self._interrupts > 1 and max(self._statuses) else max(self._statuses)
                self._finish_client(self._client, protocol.RunOver(status))
            self._finish()

    def _end_others(self, status: int) -> None:
        """End the ranks that have not ended after another one: their agents do not know each other."""
        if self._client is not None:
            line = (f"mpiddp.run: a rank has ended with status {status}, and others not within {KILL_DELAY_S:g} s; "
                    "they are ended\n")
            self._client.send(protocol.Output(2, line.encode()))
        self._kill(signal.SIGTERM)

    def _finish(self) -> None:
        """Be ready for the next run."""
        self._loop.cancel_timers("terminate", "kill")
        self._client, self._run, self._is_forked, self._early, self._statuses = None, None, False, [], []
        self._interrupts = 0
        self._pause(False)
        self._start_next()

    def _start_next(self) -> None:
        for peer in [*self._waiting]:
            if self._run is None:
                self._start(peer, *self._waiting.pop(peer))

    def _pass_on(self, message: protocol.Signal | protocol.Input) -> None:
        """Pass on what the client sends to the run; a second SIGINT ends it, if need be after a delay."""
        match message:
            case protocol.Input():
                self._interrupts = 0
                assert self._run is not None
                for rank in range(self._size if self._run.is_prompt else 1):
                    self._templates[rank].send(message)
            case protocol.Signal(signal.SIGINT) if self._interrupts:
                self._interrupts += 1
                self._kill(signal.SIGTERM)
                self._loop.set_timer("kill", KILL_DELAY_S, partial(self._kill, signal.SIGKILL))
            case protocol.Signal(number):
                self._interrupts += number == signal.SIGINT
                self._kill(number)

    def _kill(self, number: int) -> None:
        self._send_all(protocol.Signal(number))

    def _on_lost(self, peer: Peer) -> None:
        if peer is self._client:
            self._client = None
            self._pause(False)
            self._kill(signal.SIGTERM)
            self._loop.set_timer("kill", KILL_DELAY_S, partial(self._kill, signal.SIGKILL))
        elif peer is self._renewer:
            self._renewer = None
        elif peer in self._templates.values():
            self._end()
        else:
            self._waiting.pop(peer, None)

    def _end(self) -> None:
        self._send_all(protocol.EndHold())
        self._loop.stop()

    def _pause(self, is_paused: bool) -> None:
        """Take no output while the client takes none."""
        for peer in self._templates.values():
            peer.pause(is_paused)

    def _send_all(self, message: protocol.ToTemplate) -> None:
        for peer in self._templates.values():
            peer.send(message)

    def _on_error(self, error: Exception) -> None:
        write_line(f"mpiddp: error in the hold: {type(error).__name__}: {error}")
