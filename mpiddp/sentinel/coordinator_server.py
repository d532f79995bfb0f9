"""The coordinator's connections, in rank 0's sentinel: they join its logic to the sentinels of all ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ..base.config import RESTART_VARIABLE, RUNNING_SUFFIX
from ..base.errors import EXIT_STALLED
from ..base.files import open_for_writing
from ..base.stderr import write_line
from ..base.version import __version__
from ..failure.rank import RankIdentity
from ..failure.report import format_error_file, print_failure
from ..failure.root_cause import Report, ReportKind, truncate_report
from ..ipc.channel import Wire
from ..ipc.event_loop import Loop
from ..ipc.listener import Entrance, keep_alive
from ..where.protocol import Ask, Inspect, Inspected, Whereabouts
from ..where.registry import Card, job_number, remove, withdraw, write
from . import events
from .coordinator import Coordinator, State
from .errands import Errands, run_unheard
from .process_cleanup import cancel
from .protocol import Coordinate, Hello, Interrupted, Message, Sent, Watched

if TYPE_CHECKING:
    from ..where.service import Inquiry, Letters

OWN_LINK = 0  # to this process's own watcher
STALL_LINK = -1  # to nobody: --stall asks
JUDGE_LINK = -2  # to nobody: the coordinator asks
SHOW_LINK = -3  # to nobody: a SIGQUIT asks
DESERTED_LINK = -4  # to nobody: the coordinator asks who waits for a rank that has come to its end
LONGEST_S = 2.0  # for all ranks to tell where they are
SHOWN_S = 1.0  # in which a SIGQUIT comes to all ranks
FLUSHING_S = 2.0  # for all others to take what they are sent last


class Office:
    """Listens for the job's sentinels, and carries out what the coordinator wants."""

    def __init__(
        self, loop: Loop, request: Coordinate, watched: Watched, post: Callable[[events.WatcherEvent], None],
        began_s: float, errands: Errands,
    ) -> None:
        """Listen where it is requested; raise OSError where that is not possible.

        `post` tells the own watcher. `began_s` is when the watch of rank 0 began, on time.monotonic()'s clock.
        """
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._entrance = Entrance(loop, request, self._await_hello)
        self.port = self._entrance.port
        self._loop, self._watched, self._post, self._errands = loop, watched, post, errands
        self._coordinator = Coordinator(watched, began_s)
        self._made_inquiry: Inquiry | None = None
        self._request, self._mark = request, ""
        self._card: Card | None = None
        self._interrupted = False  # ranks got a SIGINT
        self._wires: dict[int, Wire] = {}
        self._last_link = OWN_LINK

    def fileno(self) -> int:
        """Return the descriptor that listens."""
        return self._entrance.fileno()

    def join(self, member: RankIdentity) -> None:
        """Admit this process's own rank, and let the job be found by those who ask where its ranks are."""
        self.handle(events.OwnRank(OWN_LINK, member))
        card = Card(member.run_id, *job_number(), member.host, self._request.address, self.port, self._request.token,
                    member.world_size, __version__)
        self._card = card
        if RESTART_VARIABLE in os.environ and member.error_file:
            self._mark = f"{member.error_file}{RUNNING_SUFFIX}"
            run_unheard(partial(touch, self._mark))
        self._loop.set_timer("card", events.READY_AFTER_S, partial(self._be_ready, card))
        if self._watched.stall_s:
            self._look_for_stall()

    def _be_ready(self, card: Card) -> None:
        """Be ready to be asked: also when a file system that Python imports from answers no more."""
        with contextlib.suppress(OSError, ImportError):  # no descriptor is left: it is tried again when it is needed
            self._inquiry()
            import_module("hmac")  # of ipc/listener.py, where no other rank has called
        run_unheard(partial(write, card))

    def close(self) -> None:
        """Let the job be found no more."""
        self._loop.drop_timers("card")
        if self._card:
            run_unheard(partial(withdraw, self._card))

    def hear_own(self, message: Sent) -> None:
        """Take a message of this process's own watcher."""
        self._hear(OWN_LINK, message)

    @property
    def busy(self) -> bool:
        """Whether the coordinator still has something to do."""
        return self._coordinator.owes_word

    def let_all_end(self) -> None:
        """Let all other sentinels end their ranks, because this one ends."""
        self.handle(events.OwnRankGone())

    def close_down(self) -> None:
        """Tell all that the job is over, in order; mpiddp.supervise, too: mpirun's status may hide a lost node."""
        if self._mark:
            run_unheard(partial(remove, self._mark))
        self.handle(events.OwnRankLeft())

    def flush(self) -> None:
        """Return when the others have taken what was sent to them, or have had time to."""
        deadline = time.monotonic() + FLUSHING_S
        waiting = list(self._wires.values())
        while (waiting := [wire for wire in waiting if not wire.flush()]) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _hear(self, link: int, message: Message) -> None:
        """Take a message of a member's sentinel."""
        if isinstance(message, Ask):
            if not self._loop.is_set("shown"):
                self._loop.set_timer("shown", LONGEST_S + SHOWN_S, lambda: None)
                self._ask(SHOW_LINK)
        elif isinstance(message, Inspected):
            self._send([(message.asker, message)])
        elif isinstance(message, Whereabouts):
            if link in self._coordinator.peers.by_link:
                self._send(self._inquiry().survey.hear(self._coordinator.peers.by_link[link].rank, message))
        else:
            self._interrupted |= isinstance(message, Interrupted)
            self.handle(events.FromPeer(link, message))

    def handle(self, event: events.CoordinatorEvent) -> None:
        """Tell the coordinator of an event, and do what it wants."""
        actions = self._coordinator.handle(event, time.monotonic())
        for action in sorted(actions, key=is_for_own):  # which may end this process
            self._loop.attempt(partial(self._do, action))

    def _do(self, action: events.CoordinatorAction) -> None:
        match action:
            case events.ToPeer(link, message):
                self._send([(link, message)])
            case events.Drop(link):
                if link in self._wires:
                    self._close(link)
            case events.SetTimer(name, after_s):
                self._loop.set_timer(f"coordinator: {name}", after_s, partial(self.handle, events.Due(name)))
            case events.Say(text):
                write_line(text)
            case events.TellReason(verdict, who, after_s, error_file):
                print_failure(verdict, who, after_s)
                if error_file:
                    self._errands.write(error_file, format_error_file(verdict, who))
            case events.Survey():
                self._ask(JUDGE_LINK)
            case events.LookForDeserted():
                self._ask(DESERTED_LINK)
            case events.CancelStep():
                self._errands.run(partial(cancel, self._watched.step))

    def _send(self, letters: Letters) -> None:
        for link, message in letters:
            if link == OWN_LINK:
                self._post(events.FromCoordinator(message))
            elif link == STALL_LINK:
                self._take_look()
            elif link == SHOW_LINK:
                write_line(f"mpiddp: SIGQUIT asks where the ranks are\n{self._inquiry().table()}")
            elif link == JUDGE_LINK:
                self._judge()
            elif link == DESERTED_LINK:
                self.handle(events.Deserted(self._inquiry().deserted(time.monotonic())))
            elif link in self._wires and not self._wires[link].post(message):
                self._loop.await_room(self._wires[link])

    def _ask(self, asker: int) -> None:
        """Ask all sentinels where their ranks are, for the one who has asked over a link."""
        peers = self._coordinator.peers
        survey = self._inquiry().survey
        questions = survey.ask(asker, {rank: peer.link for rank, peer in peers.by_rank.items() if peer.watched},
                               {rank: peers.hosts[rank] for rank in peers.by_rank})
        if questions:  # none is on its way
            self._loop.set_timer("survey", LONGEST_S, lambda: self._send(survey.answer()))
            self._send(questions)

    def _inquiry(self) -> Inquiry:
        if self._made_inquiry is None:
            from ..where.service import Inquiry  # not while the job starts

            self._made_inquiry = Inquiry(self._watched.stall_s)
        return self._made_inquiry

    def _judge(self) -> None:
        """Tell the coordinator where the ranks are, and the user, if a SIGINT came and no rank obeys it."""
        seen = self._inquiry().seen({report.rank: report.where for report in self._coordinator.reports})
        self.handle(events.Found(seen))
        ignored = self._interrupted and self._coordinator.state is State.LISTENING
        if ignored and seen.table and not self._loop.is_set("shown"):
            self._loop.set_timer("shown", SHOWN_S, lambda: None)
            write_line(f"mpiddp: SIGINT came, and no rank can act on it here; a second one ends the job\n{seen.table}")

    def _look_for_stall(self) -> None:
        self._ask(STALL_LINK)
        self._loop.set_timer("stall", self._inquiry().pause_s, self._look_for_stall)

    def _take_look(self) -> None:
        """Say that the job stands still, or goes on; end it if that was asked for."""
        found = self._inquiry().standstill(time.monotonic())
        if found is None:
            return
        write_line(f"mpiddp: {found.text}")
        if found.cause and self._watched.stall_abort:
            self._loop.drop_timers("stall")
            host = self._coordinator.peers.hosts.get(found.rank, "")
            self.handle(events.Stalled(truncate_report(Report(found.rank, host, ReportKind.UNREACHABLE, found.cause,
                                                              EXIT_STALLED))))

    def _await_hello(self, connection: socket.socket) -> None:
        """Wait for one that has shown the token to say which rank it watches."""
        with contextlib.suppress(OSError):  # the next read tells
            keep_alive(connection)
        self._last_link += 1
        link, wire = self._last_link, Wire(connection)
        self._wires[link] = wire
        greeted = False

        def read() -> None:
            nonlocal greeted
            if wire.flush():
                self._loop.await_room(wire, waits=False)
            try:
                messages = wire.receive(0)
            except (EOFError, OSError) as error:
                self._close(link)
                if self._made_inquiry is not None:
                    self._made_inquiry.survey.forget(link)
                self.handle(events.PeerLost(link, "" if isinstance(error, EOFError) else str(error.strerror)))
                return
            for message in messages:
                if greeted:
                    self._loop.attempt(partial(self._hear, link, message))
                elif isinstance(message, Ask):
                    self._ask(link)
                elif isinstance(message, Inspect):
                    peer = self._coordinator.peers.by_rank.get(message.rank)
                    how = "is not watched any more: its sentinel was killed" if peer else "is not there any more"
                    self._send([(peer.link, message._replace(asker=link)) if peer and peer.watched else
                                (link, Inspected(message.rank, how))])
                elif isinstance(message, Hello):
                    greeted = True
                    self.handle(events.Greeted(link, message))
                else:
                    self._close(link)
                    raise ValueError(f"{type(message).__name__} in the place of a hello")

        self._loop.listen(wire, read)

    def _close(self, link: int) -> None:
        wire = self._wires.pop(link)
        self._loop.forget(wire)
        wire.close()


def touch(path: str) -> None:
    """Make a file, unless it is there."""
    os.close(open_for_writing(path, keep=True))


def is_for_own(action: events.CoordinatorAction) -> bool:
    """Tell whether an action is a message to this process's own watcher."""
    return isinstance(action, events.ToPeer) and action.link == OWN_LINK
