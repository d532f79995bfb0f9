"""The sentinel process: it watches one rank from its first moment to its last.

It knows neither MPI nor torch. While the rank works it sleeps.
"""

from __future__ import annotations

import socket
import time

from ..facts.process import Process
from ..plan.member import Member
from ..plan.verdict import CONSEQUENCE, Report, Verdict, brief
from ..plan.words import shortened
from ..say import FORWARDING_S, say
from ..show.report import tell
from .connections import Connections
from .detached import silence
from .leftovers import Leftovers, cancel
from .loop import Loop
from .messages import (
    Bye,
    Condition,
    Coordinate,
    End,
    Failed,
    Forked,
    JobEnds,
    Join,
    Look,
    Message,
    Neighbour,
    Over,
    Port,
    Ruling,
    ScriptEnded,
    Settled,
    Stage,
    Text,
    Through,
    Told,
    Unreadable,
    Watched,
)
from .postmortem import early_death, report_on
from .rank import RankProcess
from .start import Start
from .wire import Wire

RULING_S = 2.5  # for the coordinator to rule
LAUNCHER_S = 2.0  # for the launcher to end a job that has lost its rank 0
OTHERS_S = 1.0  # for other nodes' sentinels to say what they have to, before the job's step is cancelled


def watch(rank_wire: Wire, signals: socket.socket, pid: int, watched: Watched) -> None:
    """Be the sentinel of process `pid` until that is gone; `signals` brings the number of each signal that it gets."""
    silence(0, 1)
    try:
        process = Process(pid)
    except (FileNotFoundError, ProcessLookupError):  # it is gone already
        if not knows_why(rank_wire):
            say(f"mpiddp: {watched.who} died as soon as it had started; its launcher may know how")
            time.sleep(OTHERS_S)
            cancel(watched.step)
        return
    watcher = Watcher(rank_wire, process, watched)
    watcher.connections.listen_to_signals(signals)
    watcher.loop.run()


class Watcher:
    """Reports to the coordinator why its rank ends, and ends it when the coordinator rules so."""

    def __init__(self, rank_wire: Wire, process: Process, watched: Watched) -> None:
        self.watched = watched
        self.loop = Loop(self.excuse)
        self.connections = Connections(self.loop, rank_wire, self)  # before the process: what it has told comes first
        self.rank = RankProcess(process, self.loop, self.on_rank_gone)
        self.start = Start(self.loop, watched, self.rank, self.settle)
        self.leftovers = Leftovers(process.pid)
        self.member: Member | None = None  # once the rank has joined its job
        self.stacks: list[str] = []  # the lines that faulthandler printed
        self.rank_reported = False  # by itself
        self.settled = False  # nobody needs a report on the rank any more
        self.untold: Verdict | None = None  # the reason for the job's end, until it is printed
        self.end_ruling: Ruling | None = None  # what is ruled on the rank, if it fails now that the job ends
        self.lost_coordinator = False
        self.excuses: set[str] = set()  # that were made

    def excuse(self, error: Exception) -> None:
        """Say, once, what went wrong in the sentinel itself, and end if the rank is gone."""
        words = f"{type(error).__name__}: {error}"
        line = f"mpiddp: sentinel of {self.watched.who}: {shortened(words)} ({place_of(error)})"
        if line not in self.excuses:
            self.excuses.add(line)
            say(line)
        self.loop.over |= self.rank.gone

    def settle(self) -> None:
        """Note that the reason for the rank's end is known, or told by others."""
        self.settled = True

    def on_rank_message(self, message: Message) -> None:
        """Act on one message of the rank."""
        match message:
            case Stage(name):
                self.start.begin(name)
            case Forked(pid):
                self.leftovers.note(pid)
            case Coordinate(address, token):
                port = self.connections.coordinate(address, token, self.start.began, self.watched)
                self.connections.tell_rank(Port(port))
            case Join(member):
                self.member = member
                self.rank.grace_s = member.grace_s
                self.connections.join(message)
            case Failed(report):
                self.rank_reported = True
                self.report(report)
            case Text(line):
                self.stacks.append(line)
            case Settled():
                self.settle()
            case Bye():
                self.settle()
                self.let_go()
            case Told() | Through() | ScriptEnded():
                self.connections.tell_coordinator(message)
                if isinstance(message, Told):
                    self.untold = None
            case Unreadable(error):
                raise ValueError(error)

    def on_rank_closed(self) -> None:
        """Look whether the rank is gone: it closes its connection also when it becomes another program."""
        self.rank.look()

    def on_coordinator_message(self, message: Message) -> None:
        """Act on one message of the coordinator."""
        match message:
            case Ruling():
                self.take_ruling(message)
            case JobEnds():
                self.end_rank(message)
            case Look():
                self.connections.tell_coordinator(Condition(self.rank.is_stopped()))
            case Neighbour(rank, pid):
                self.connections.watch_neighbour(rank, pid)
            case Over():
                self.settle()
            case Unreadable(error):
                raise ValueError(error)

    def report(self, report: Report) -> None:
        """Report to the coordinator why the rank ends, unless it is ruled already what follows."""
        if not self.rank.gone:
            self.leftovers.note_descendants()
        if self.end_ruling is not None:
            self.take_ruling(self.end_ruling)
        elif not self.lost_coordinator or report.kind != CONSEQUENCE:
            self.loop.set_timer("ruling", RULING_S, lambda: self.rule_alone(report))
            if not self.connections.tell_coordinator(Failed(report, self.rank.gone)):
                self.rule_alone(report)

    def rule_alone(self, report: Report) -> None:
        """Rule in the place of the coordinator, which does not answer."""
        self.take_ruling(Ruling(Verdict(report), report.status, True))

    def take_ruling(self, ruling: Ruling) -> None:
        """Pass a ruling on to the rank; if that is gone, do what the rank would have to do."""
        self.loop.drop_timers("ruling")
        self.settle()
        self.untold = ruling.verdict
        if self.rank.gone:
            self.clean_up()
        else:
            self.connections.tell_rank(ruling)
            self.rank.kill_in_time()

    def end_rank(self, end: JobEnds) -> None:
        """End the rank because the job ends: ask it if it can end by itself, and kill it when its grace is over."""
        self.settle()
        self.end_ruling = Ruling(None, end.status, end.abort)
        if self.rank.gone:  # and its report has crossed this on the way
            self.take_ruling(self.end_ruling)
            return
        self.leftovers.note_descendants()
        if end.abort and (end.waits or not self.rank_reported):
            self.connections.tell_rank(End(end.status))
            self.rank.alert()
        if not self.rank_reported:
            self.rank.ask_soon()
        self.rank.kill_in_time()

    def on_coordinator_gone(self, closed: bool) -> None:
        """End the rank if the coordinator is gone in the middle of the job, and rank 0 with it."""
        if self.end_ruling is not None and self.loop.is_set("ruling"):
            self.take_ruling(self.end_ruling)
        if not self.settled:
            self.settle()
            self.lost_coordinator = True
            self.loop.set_timer("lost", LAUNCHER_S, lambda: self.end_without_coordinator(closed))

    def end_without_coordinator(self, closed: bool) -> None:
        """End the rank, which its launcher has not ended although rank 0 and its sentinel are gone."""
        assert self.member
        if self.rank.gone:
            return
        if self.watched.first_on_node:
            host = self.member.host
            state = "is gone" if closed else f"is out of reach of {host}"
            say(f"mpiddp: rank 0 {state}: ending the ranks on {host}")
        self.end_rank(JobEnds(1, abort=True))
        if self.rank_reported and self.end_ruling is not None:
            self.take_ruling(self.end_ruling)

    def on_rank_gone(self, status: int | None) -> None:
        """Report on a rank that is gone, if that is still to be done, and end what it left behind."""
        self.start.drop_deadline()
        if not self.settled and self.member is None and (cause := early_death(self.rank.facts, status)):
            self.start.tell_death(cause)
        if self.settled or self.member is None:
            self.clean_up()
        elif not self.rank_reported:
            self.report(brief(report_on(self.rank.facts, self.member, status, self.stacks)))

    def clean_up(self) -> None:
        """Print the reason if it is not printed yet, end what the rank left behind, and end this process."""
        if self.untold is not None:
            self.tell_reason(self.untold)
        self.connections.tell_coordinator(Through())
        if self.rank.gone:
            self.connections.finish()
        if self.start.failed:
            time.sleep(OTHERS_S)
            cancel(self.watched.step)
        silence(2)  # a launcher waits until nobody holds it
        self.leftovers.end(self.member)
        self.loop.over = True

    def tell_reason(self, verdict: Verdict) -> None:
        """Print the reason for the job's end, which the rank did not print before it was gone."""
        error_file = self.member.error_file if self.member else ""
        tell(verdict, self.member, time.monotonic() - self.start.began, error_file)
        time.sleep(FORWARDING_S)
        self.connections.tell_coordinator(Told())

    def let_go(self) -> None:
        """End this process because the rank leaves the job in order; what the rank has started lives on."""
        self.connections.take_leave()
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
