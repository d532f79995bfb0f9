"""The logic of the coordinator, in rank 0's sentinel: from the reports of all it decides who failed first."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator

from ..base.stderr import LAUNCHER_FORWARDING_S
from ..failure import root_cause as waits
from ..failure.rank import RankIdentity
from ..failure.root_cause import (
    ABORT_SIGNAL,
    NO_STEP_DAEMON,
    FailureContext,
    JobActivity,
    Report,
    ReportKind,
    RootCause,
    describe_ranks,
    select_root_cause,
    truncate_report,
)
from . import events, protocol
from .events import Machine
from .protocol import Hello, Missing, Neighbour
from .startup_timeout import LateRanks


class Peer:
    """The sentinel of a rank, as the coordinator knows it."""

    def __init__(self, link: int, hello: Hello) -> None:
        self.link, self.rank, self.host = link, hello.rank, hello.host
        self.namespace, self.pid = hello.namespace, hello.pid
        self.gone = False  # the rank
        self.watched = True  # its sentinel lives; else the rank speaks for itself over this link
        self.ruled = False  # it failed too, and has its ruling: it waits for the job's end


class Peers:
    """The sentinels, by link and by rank; and which one of each namespace watches all ranks there, its elder.

    `hosts` has the host of each rank that was ever there.
    """

    def __init__(self) -> None:
        self.by_link: dict[int, Peer] = {}
        self.by_rank: dict[int, Peer] = {}
        self.hosts: dict[int, str] = {}
        self._elders: dict[str, Peer] = {}

    def admit(self, link: int, hello: Hello) -> Peer:
        """Admit a sentinel."""
        self.hosts[hello.rank] = hello.host
        peer = self.by_link[link] = self.by_rank[hello.rank] = Peer(link, hello)
        return peer

    def introduce(self, peer: Peer) -> tuple[Peer, Neighbour]:
        """Return what to tell the elder of a new one's namespace: whom to watch."""
        return self._elders.setdefault(peer.namespace, peer), Neighbour(peer.rank, peer.pid)

    def unwatch(self, peer: Peer) -> Iterator[tuple[Peer, Neighbour]]:
        """Note that a sentinel was killed, and its rank lives; yield what to tell the next elder, if that was it."""
        peer.watched = False
        if self._elders[peer.namespace] is not peer:
            return
        here = [one for one in self.by_rank.values() if one.namespace == peer.namespace]
        if elder := next((one for one in here if one.watched), None):
            self._elders[peer.namespace] = elder
            for one in here:
                yield elder, Neighbour(one.rank, one.pid)

    def drop(self, peer: Peer) -> None:
        """Forget a sentinel that has left, or is gone."""
        del self.by_link[peer.link], self.by_rank[peer.rank]


class Search:
    """Finds out where the ranks are: for the verdict, and for those who ask who is missing."""

    def __init__(self) -> None:
        self.seen = JobActivity()
        self._askers: list[Peer] = []

    def begin(self, asker: Peer | None = None) -> list[events.CoordinatorAction]:
        """Begin, unless it has begun; `asker` waits for the answer."""
        busy = self.seen.is_pending
        self.seen = self.seen._replace(is_pending=True)
        if asker is not None:
            self._askers.append(asker)
        return [] if busy else [events.Survey()]

    def end(self, seen: JobActivity, missing: Collection[int], peers: Peers) -> list[events.CoordinatorAction]:
        """Take what was found, and tell those who have asked which ranks are missing, and where these are."""
        self.seen = seen
        words = describe_ranks(missing, peers.hosts, seen.places)
        askers, self._askers = self._askers, []
        return [events.ToPeer(peer.link, Missing(words)) for peer in askers]


TELLING_S = 0.5  # for the rank that was first to print its reason
UNTOLD_S = 1.0  # for the word that it is printed, when rank 0 is gone already
DESERTED_S, SELDOM_S = 5.0, 30.0  # between two looks whether ranks wait for one that has come to its end
LOOK_S = 2e-6  # for each rank, between one look at all reports and the next: a look takes about a fifth of that


class State(enum.Enum):
    """What the coordinator is at."""

    LISTENING = "nobody has failed"
    JUDGING = "somebody has; others may say what came before"
    RULED = "it is clear who was first; that rank is told to say so"
    ANNOUNCED = "it is said; all wait for that rank, whose threads and atexit functions may still run"
    ENDING = "every rank has been told to end"


S = State
MOVES: dict[State, dict[str, State]] = {  # what leads from a state to which other; anything else changes none
    S.LISTENING: {"reported": S.JUDGING}, S.JUDGING: {"ruled": S.RULED},
    S.RULED: {"told": S.ANNOUNCED, "through": S.ENDING},
    S.ANNOUNCED: {"through": S.ENDING}, S.ENDING: {},
}


class Coordinator(Machine[State, events.CoordinatorAction]):
    """Talks to the sentinels of all ranks; a link is a number for the connection to one."""

    moves = MOVES

    def __init__(self, watched: protocol.Watched, began_s: float) -> None:
        """Coordinate a job whose rank 0 is `watched` and began at `began_s`, on the clock of handle()."""
        super().__init__(State.LISTENING, began_s)
        self._began_s, self._watched = began_s, watched
        self._own: RankIdentity | None = None
        self.peers, self._search, self._late_ranks = Peers(), Search(), LateRanks()
        self._silent: set[int] = set()  # ranks that were asked how they are, and have not answered
        self._left: set[int] = set()  # ranks whose script has ended
        self._first_left_s: float | None = None  # when the first one of them did
        self._deserted: tuple[str, float] | None = None  # who waits for such a rank, in words, and since when
        self._exits: list[Report] = []  # of those that raised SystemExit with an unknown status
        self._order: list[int] = []  # in which ranks ended, as the elder of their namespace saw it
        self._interrupted: list[int] = []
        self.reports: list[Report] = []
        self._known: set[tuple[int, str]] = set()  # of whom there is a report, and its cause
        self._came_s: dict[int, float] = {}  # after the first
        self._living: set[int] = set()  # ranks that have reported themselves
        self._late: list[int] = []  # ranks that failed too, but not first
        self._first_report_s = 0.0
        self._looked_s = -1e9  # when the reports were looked at last
        self._verdict: RootCause | None = None
        self._told = False  # the verdict is printed, or just being printed
        self._telling: int | None = None  # whose sentinel is about to print it
        self._leaving = self._waits_for_word = False  # rank 0 goes; others may have to say that the verdict is printed
        self._ender: int | None = None  # the rank that has to end the others, where not each ends by itself

    def handle(self, event: events.CoordinatorEvent, now_s: float) -> list[events.CoordinatorAction]:
        """Return what to do about an event that has come at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        match event:
            case events.Greeted(link, hello):
                self._greet(link, hello)
            case events.OwnRank(link, member):
                self._own = member
                self._admit(link, protocol.Hello(member.rank, member.host, member.pid, member.namespace))
            case events.FromPeer(link, message):
                if peer := self.peers.by_link.get(link):
                    self._on_message(peer, message)
            case events.PeerLost(link, error):
                if peer := self.peers.by_link.get(link):
                    self._on_lost(peer, error)
            case events.Stalled(report):
                self._add_report(report)
            case events.Deserted(report) if self.state is State.LISTENING:
                self._on_deserted(report)
            case events.Due("deserted"):
                self._look_for_deserted()
            case events.Found(seen):
                self._do(*self._search.end(seen, self.peers.by_rank.keys() - self._left, self.peers))
            case events.OwnRankLeft() if self.state is State.LISTENING:
                self._tell_all(protocol.Over())
            case events.OwnRankLeft() | events.OwnRankGone():
                self._leaving = True
                self._rule_if_clear(last_chance=True)
                self._begin_end()
                if any(one.kind == ReportKind.UNREACHABLE for one in self.reports):
                    self._do(events.CancelStep())
            case events.Due("told"):
                self._announce_end()
            case events.Due("through"):
                self._begin_end()
            case events.Due("untold"):
                self._tell_if_untold()
            case events.Due("late") if self.state is State.LISTENING and self._own is not None:
                self._do(*self._late_ranks.remind(now_s - self._began_s, self.peers.hosts, self._own.world_size))
        self._rule_if_clear()
        if self._leaving and self.owes_word and not self._waits_for_word:
            self._waits_for_word = True
            self._do(events.SetTimer("untold", UNTOLD_S))
        return self.taken()

    @property
    def owes_word(self) -> bool:
        """Whether a verdict may have to be printed here, because nobody has said so far that it is."""
        return self._verdict is not None and not self._told

    def _send(self, peer: Peer, message: protocol.Sent) -> None:
        self._do(events.ToPeer(peer.link, message))

    def _tell_all(self, message: protocol.Sent) -> None:
        for peer in self.peers.by_link.values():
            self._send(peer, message)

    def _greet(self, link: int, hello: protocol.Hello) -> None:
        """Admit the sentinel of a rank, unless the rank has one."""
        is_member = self._own is None or 0 < hello.rank < self._own.world_size
        if is_member and hello.rank not in self.peers.by_rank:
            self._do(events.ToPeer(link, protocol.Admitted()))
            self._admit(link, hello)
        else:
            self._do(events.Drop(link))

    def _admit(self, link: int, hello: protocol.Hello) -> None:
        peer = self.peers.admit(link, hello)
        self._send(*self.peers.introduce(peer))
        if self._verdict is not None and self.state in (State.ANNOUNCED, State.ENDING):
            self._send(peer, protocol.JobEnds(self._verdict.first.status, abort=self.state is State.ENDING))

    def _on_unwatched(self, peer: Peer) -> None:
        """Note that a rank speaks for itself, and tell it again what its sentinel may have heard."""
        for elder, news in self.peers.unwatch(peer):
            self._send(elder, news)
        self._silent.discard(peer.rank)
        if self._verdict is None:
            return
        first = self._verdict.first
        if peer.rank == first.rank and not self._told:
            self._send(peer, protocol.Ruling(self._verdict, first.status, abort=True))
        if self.state in (State.ANNOUNCED, State.ENDING):
            abort = self.state is State.ENDING and self._must_abort(peer.rank)
            self._send(peer, protocol.JobEnds(first.status, abort, waits=peer.ruled))

    def _on_message(self, peer: Peer, message: protocol.Message) -> None:
        match message:
            case protocol.Failed(report, gone):
                peer.gone = gone
                self._add_report(report, living=not gone)
            case protocol.Told(done):
                self._told, self._telling = True, None if done else peer.rank
                if done:
                    self._announce_end()
            case protocol.Through():
                if self._verdict is not None and peer.rank == self._verdict.first.rank:
                    self._begin_end()
            case protocol.Condition(stopped):
                self._silent.discard(peer.rank)
                if stopped:
                    self._add_absent(peer, "is stopped (by SIGSTOP or a debugger)")
            case protocol.Orphaned():
                self._add_absent(peer, NO_STEP_DAEMON)
            case protocol.AskMissing():
                self._do(*self._search.begin(peer))
            case protocol.Ended(rank):
                self._order.append(rank)
            case protocol.Interrupted():
                self._interrupted.append(peer.rank)
                self._do(*self._search.begin())
            case protocol.ScriptEnded(by_exit):
                self._left.add(peer.rank)
                self._exits += [by_exit] if by_exit else []
                if self._first_left_s is None:
                    self._first_left_s = self._now_s
                    self._do(events.SetTimer("deserted", DESERTED_S))
            case protocol.Stage(name):
                self._do(*self._late_ranks.note(peer.rank, name))
            case protocol.Bye():
                self._drop(peer)
            case protocol.Unwatched():
                self._on_unwatched(peer)
            case protocol.Unreadable(error):
                raise ValueError(error)

    def _look_for_deserted(self) -> None:
        """Look whether ranks wait for one that has come to its end; the more seldom, the longer nothing is found."""
        if self.state is not State.LISTENING:
            return
        assert self._first_left_s is not None
        pause_s = DESERTED_S if self._deserted else (self._now_s - self._first_left_s) / 2
        self._do(events.SetTimer("deserted", min(SELDOM_S, max(DESERTED_S, pause_s))))
        if self.peers.by_rank.keys() - self._left:
            self._do(events.LookForDeserted())

    def _on_deserted(self, report: Report | None) -> None:
        """Say that ranks wait for one that has come to its end; end the job when that has lasted."""
        if report is None:
            self._deserted = None
        elif self._deserted is None or self._deserted[0] != report.cause:
            self._deserted = report.cause, self._now_s
            limit = f"{self._watched.exit_timeout_s:g} s (--exit-timeout)"
            self._do(events.Say(f"mpiddp: {report.cause}; the job ends if that lasts for {limit}"))
        elif self._now_s - self._deserted[1] >= self._watched.exit_timeout_s:
            self._add_report(truncate_report(report))

    def _drop(self, peer: Peer) -> None:
        self.peers.drop(peer)
        self._late_ranks.forget(peer.rank)
        self._silent.discard(peer.rank)
        self._left.discard(peer.rank)
        self._do(events.Drop(peer.link))

    def _on_lost(self, peer: Peer, error: str) -> None:
        """Report the rank of a sentinel that is gone without a `Bye`."""
        self._drop(peer)
        if peer.rank == self._telling:  # twice is better than never
            self._told = False
        with_it = "its sentinel" if peer.pid != 1 else "all else in its container"
        cause, status = f"is gone, and {with_it} with it", 137
        if not peer.watched:
            cause = "is gone; its sentinel was killed before, so nobody saw how it ended"
        if error:
            cause, status = f"is out of reach, its node or its network is down ({error})", 1
        if self._verdict is None:
            self._add_absent(peer, cause, status)
        elif peer.rank == self._verdict.first.rank:
            self._tell_if_untold()
            self._announce_end()

    def _add_absent(self, peer: Peer, cause: str, status: int = 1) -> None:
        self._add_report(Report(peer.rank, peer.host, ReportKind.UNREACHABLE, cause, status))

    def _add_report(self, report: Report, living: bool = False) -> None:
        """Take a report; `living` tells that the rank itself waits for a ruling."""
        if living:
            self._living.add(report.rank)
        if self._verdict is not None:
            self._late.append(report.rank)
            if self.state in (State.ANNOUNCED, State.ENDING):
                self._rule_not_first(report.rank)
            return
        if self._move("reported"):
            self._first_report_s = self._now_s
        if (report.rank, report.cause) in self._known:  # told again to a coordinator that knew it
            return
        self._known.add((report.rank, report.cause))
        self.reports.append(report)
        self._came_s.setdefault(report.rank, self._now_s - self._first_report_s)
        if len(self.reports) == 1 and (report.kind == ReportKind.SECONDARY or report.signal == ABORT_SIGNAL):
            self._silent.update(rank for rank, peer in self.peers.by_rank.items() if peer.watched)
            self._tell_all(protocol.Look())
            self._do(*self._search.begin())

    def _rule_if_clear(self, last_chance: bool = False) -> None:
        """Rule as soon as it is clear who was first; by what is known, if this is the last chance."""
        if self.state is not State.JUDGING or self._own is None:
            return
        next_s = self._looked_s + LOOK_S * self._own.world_size
        if self._now_s < next_s and not last_chance:
            self._do(events.SetTimer("look", next_s - self._now_s))
            return
        self._looked_s = self._now_s
        waited_s = math.inf if last_chance else self._now_s - self._first_report_s
        verdict = select_root_cause(self.reports, waited_s, FailureContext(
            self.peers.hosts, self._silent, self._left - {one.rank for one in self.reports}, self._interrupted,
            self._order, self._watched.step is not None, self._watched.by_srun, self._came_s, self._own.world_size,
            self._search.seen, self._exits))
        if verdict is not None:
            self._rule(verdict)
        else:
            waits_s = waits.SAME_ERROR_WAIT_S, waits.SAME_CAUSE_WAIT_S, waits.ROOT_CAUSE_WAIT_S
            due_s = next(time_s for time_s in waits_s if time_s > waited_s)
            self._do(events.SetTimer("look", due_s - waited_s))

    def _rule(self, verdict: RootCause) -> None:
        """Let the rank that failed first print the reason, or print it if that rank cannot; then all end."""
        self._move("ruled")
        self._verdict = verdict
        first = self.peers.by_rank.get(verdict.first.rank)
        self._late += [report.rank for report in self.reports if report.rank != verdict.first.rank]
        if first is None or verdict.first.kind == ReportKind.UNREACHABLE or verdict.first in self._exits:
            self._tell_if_untold()
            self._do(events.SetTimer("told", LAUNCHER_FORWARDING_S))
        else:
            self._send(first, protocol.Ruling(verdict, verdict.first.status, abort=True))
            self._do(events.SetTimer("told", TELLING_S))

    def _tell_if_untold(self) -> None:
        """Print the reason, if the rank that was first cannot any more, and has not."""
        if self._verdict is not None and self._own is not None and not self._told:
            self._told = True
            after_s = self._now_s - self._began_s
            self._do(events.TellReason(self._verdict, None, after_s, self._own.error_file))
            first = self.peers.by_rank.get(self._verdict.first.rank)
            # it has been asked to, and may do so yet
            if first is not None and self._verdict.first.kind != ReportKind.UNREACHABLE:
                self._send(first, protocol.Ruling(None, self._verdict.first.status, abort=True))

    def _rule_not_first(self, rank: int) -> None:
        """Rule that another rank failed first."""
        assert self._verdict
        if (peer := self.peers.by_rank.get(rank)) is not None and not peer.ruled:
            ends = self.state is State.ENDING
            peer.ruled = not ends
            self._send(peer, protocol.Ruling(None, self._verdict.first.status, ends and self._must_abort(rank)))

    def _must_abort(self, rank: int) -> bool:
        """Tell whether a rank has to end the job: each, or one by MPI_Abort; that is the first, if it is there."""
        assert self._verdict
        assert self._own
        if self._own.exits:
            return True
        if self._ender is None:
            first = self._verdict.first.rank
            others = [peer for one, peer in self.peers.by_rank.items() if one != first and not peer.gone]
            watched = [peer.rank for peer in others if peer.watched] or [peer.rank for peer in others]
            self._ender = first if first in self._living else min(self._living or watched, default=first)
        return rank == self._ender or (rank in self._living and self._ender not in self.peers.by_rank)

    def _announce_end(self) -> None:
        """Tell that the job ends; if ranks exit by themselves, all wait for the first, as it ends all by its exit."""
        if self._verdict is None or not self._move("told"):
            return
        assert self._own
        if not (self._own.exits and self._verdict.first.rank in self._living):
            self._begin_end()
            return
        for rank in self._late:
            self._rule_not_first(rank)
        self._tell_all(protocol.JobEnds(self._verdict.first.status, abort=False))
        self._do(events.SetTimer("through", self._own.grace_s))

    def _begin_end(self) -> None:
        """Let every sentinel end its rank."""
        if self._verdict is None or not self._move("through"):
            return
        for rank in self._late:
            self._rule_not_first(rank)
        for peer in self.peers.by_link.values():
            abort = self._must_abort(peer.rank)
            self._send(peer, protocol.JobEnds(self._verdict.first.status, abort, waits=peer.ruled))
