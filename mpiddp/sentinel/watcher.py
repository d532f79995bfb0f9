"""The sentinel process: it watches one rank from its first moment to its last.

It knows neither MPI nor torch. While the rank works it sleeps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from ..facts.process import Process
from ..plan.member import Member
from ..plan.verdict import CONSEQUENCE, Report, Verdict, brief
from ..plan.words import folded, shortened
from ..say import FORWARDING_S, say
from ..show.report import tell
from .coordinator import Coordinator
from .detached import silence
from .entrance import dial
from .leftovers import cancel
from .loop import Loop
from .messages import (
    END_SIGNAL,
    Bye,
    Condition,
    Coordinate,
    End,
    Ended,
    Failed,
    Forked,
    Interrupted,
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
from .reach import out_of_reach
from .wire import Wire

if TYPE_CHECKING:
    import psutil

HARD_GRACE_S = 15.0  # after the deadline of the start, in which ranks that can speak end the job themselves
RULING_S = 2.5  # for the coordinator to rule
ASKING_HOSTS_S = 2.0
ASKING_S = 1.0  # between one way to end a rank and the next, harder one
LAUNCHER_S = 2.0  # for the launcher to end a job that has lost its rank 0
MANY_CHILDREN = 1000
CLEANING_S = 0.7  # for what a rank left behind
LAST_S = 0.5  # for a rank whose grace is over to end by itself


def watch(rank_wire: Wire, signals: socket.socket, pid: int, watched: Watched) -> None:
    """Be the sentinel of process `pid` until that is gone; `signals` has the numbers of the signals that it gets."""
    silence(0, 1)
    try:
        process = Process(pid)
    except (FileNotFoundError, ProcessLookupError):  # it is gone already
        if not knows_why(rank_wire):
            say(f"mpiddp: {watched.who} died as soon as it had started; its launcher may know how")
            time.sleep(ASKING_S)
            cancel(watched.step)
        return
    watcher = Watcher(rank_wire, process, watched)
    watcher.loop.listen(signals, lambda: watcher.read_signals(signals))
    watcher.loop.run()


class Watcher:
    """Holds what the sentinel knows of its rank, and does what follows from it."""

    def __init__(self, rank_wire: Wire, process: Process, watched: Watched) -> None:
        self.rank_wire, self.process, self.watched = rank_wire, process, watched
        self.loop = Loop(self.excuse)
        self.start = time.monotonic()
        self.stage = "starting"
        self.member: Member | None = None
        self.coordinator: Coordinator | None = None  # on rank 0
        self.coordinator_wire: Wire | None = None
        self.children: set[psutil.Process] = set()
        self.stacks: list[str] = []  # as faulthandler printed them, in lines
        self.rank_reported = False
        self.untold: Verdict | None = None  # which is to be printed yet
        self.settled = False  # the reason for the rank's end is known, or will be told by others
        self.end_ruling: Ruling | None = None  # on a report that comes when the job ends already
        self.lost_coordinator = False
        self.excuses: set[str] = set()  # that were made
        self.failed_start = False  # the rank did not come through its start, and others may wait for it
        self.gone = False
        self.loop.listen(rank_wire, self.read_rank)
        if self.process.ended >= 0:
            self.loop.listen(self.process.ended, self.rank_closed)
        self.loop.set_timer("warn", watched.timeout_s / 4, self.warn)
        self.loop.set_timer("start", watched.timeout_s, self.end_start)

    def excuse(self, error: Exception) -> None:
        """Say, once, what went wrong in the sentinel itself; one whose rank is gone has nothing to stay for."""
        words = f"{type(error).__name__}: {error}"
        line = f"mpiddp: sentinel of {self.watched.who}: {shortened(words)} ({place_of(error)})"
        if line not in self.excuses:
            self.excuses.add(line)
            say(line)
        self.loop.over |= self.gone

    def read_rank(self) -> None:
        """Act on what the rank tells."""
        try:
            messages = self.rank_wire.receive()
        except (EOFError, OSError):
            self.loop.forget(self.rank_wire)
            self.rank_closed()
            return
        for message in messages:
            self.loop.attempt(partial(self.on_rank_message, message))

    def read_signals(self, signals: socket.socket) -> None:
        """Tell of a SIGINT, which a rank in the middle of a collective would only notice at its end."""
        numbers = signals.recv(4096)
        if not numbers:
            self.loop.forget(signals)
        elif signal.SIGINT in numbers and self.coordinator_wire:
            self.coordinator_wire.send(Interrupted())

    def on_rank_message(self, message: Message) -> None:
        """Act on one message of the rank."""
        match message:
            case Stage(name):
                self.begin(name)
            case Forked(pid):
                self.remember(pid)
            case Coordinate(address, token):
                self.start_coordinator(address, token)
            case Join():
                self.join(message)
            case Failed(report):
                self.rank_reported = True
                self.report(report)
            case Text(line):
                self.stacks.append(line)
            case Settled():
                self.settled = True
            case Bye():
                self.settled = True
                self.let_go()
            case Told() | Through() | ScriptEnded():
                if isinstance(message, Told):
                    self.untold = None
                if self.coordinator_wire:
                    self.coordinator_wire.send(message)
            case Unreadable(error):
                raise ValueError(error)

    def begin(self, stage: str) -> None:
        """Note what the rank does; the script, which has no name, has no deadline either."""
        self.stage = stage
        if stage != "MPI_Init":
            self.loop.drop_timers("warn")
        if not stage:
            self.loop.drop_timers("start")

    def warn(self) -> None:
        """Say that the rank waits in MPI_Init, if that is where it is."""
        if self.stage == "MPI_Init":
            waited_s = time.monotonic() - self.start
            silent = out_of_reach(self.watched.hosts(), min(ASKING_HOSTS_S, self.watched.timeout_s / 4))
            self.say_for_node(
                f"mpiddp: {self.watched.who} has waited {waited_s:.0f} s in MPI_Init, "
                "which returns when every rank of the job has reached it"
                + (f"; no answer from {folded(silent)}" if silent else ""))

    def end_start(self) -> None:
        """End a rank that is not ready in time: at once in MPI_Init, after a grace anywhere else."""
        late_s = time.monotonic() - self.start
        in_mpi = self.stage == "MPI_Init"
        if not in_mpi and late_s < self.watched.timeout_s + HARD_GRACE_S:
            self.loop.set_timer("start", self.watched.timeout_s + HARD_GRACE_S - late_s, self.end_start)
            return
        line = f"mpiddp: ending {self.watched.who}: still in {self.stage} {late_s:.0f} s after its start"
        self.say_for_node(line) if in_mpi else say(line)
        self.settled = self.failed_start = True
        self.send_signal(signal.SIGTERM)
        self.loop.set_timer("kill", ASKING_S, lambda: self.send_signal(signal.SIGKILL))

    def say_for_node(self, line: str) -> None:
        """Print a line that concerns the whole node: the sentinel of its first rank does."""
        if self.watched.first_on_node:
            say(line)

    def start_coordinator(self, address: str, token: str) -> None:
        """Coordinate the job's sentinels."""
        try:
            self.coordinator = Coordinator(self.loop, self.start, address, token, self.watched)
        except OSError:
            self.rank_wire.send(Port(0))
        else:
            self.rank_wire.send(Port(self.coordinator.port))

    def join(self, message: Join) -> None:
        """Connect to the coordinator; without one the rank is watched all the same."""
        self.member = message.member
        if self.coordinator:
            self.coordinator_wire = self.coordinator.own_member(self.member)
        elif message.port:
            self.coordinator_wire = dial(message.address, message.port, message.token, self.member)
        if self.coordinator_wire:
            self.loop.listen(self.coordinator_wire, self.read_coordinator)

    def report(self, report: Report) -> None:
        """Report to the coordinator why the rank ends; where the job ends already, that is the ruling."""
        self.remember_children()
        if self.end_ruling is not None:
            self.take_ruling(self.end_ruling)
        elif not self.lost_coordinator or report.kind != CONSEQUENCE:
            self.loop.set_timer("await ruling", RULING_S, lambda: self.rule_alone(report))
            if self.coordinator_wire is None or not self.coordinator_wire.send(Failed(report, self.gone)):
                self.rule_alone(report)

    def rule_alone(self, report: Report) -> None:
        """Rule without the coordinator, which does not answer."""
        self.take_ruling(Ruling(Verdict(report), report.status, True))

    def take_ruling(self, ruling: Ruling) -> None:
        """Pass a ruling on to the rank; if that is gone, do what it would have to do."""
        self.loop.drop_timers("await ruling")
        self.settled = True
        self.untold = ruling.verdict
        if self.gone:
            self.clean_up()
        else:
            self.rank_wire.send(ruling)
            self.kill_in_time()

    def tell_reason(self, verdict: Verdict) -> None:
        """Print the reason for the job's end in the place of the rank, which is gone."""
        tell(verdict, self.member, time.monotonic() - self.start, self.member.error_file if self.member else "")
        time.sleep(FORWARDING_S)
        if self.coordinator_wire:
            self.coordinator_wire.send(Told())

    @property
    def grace_s(self) -> float:
        """The time in which ranks end by themselves."""
        return self.member.grace_s if self.member else HARD_GRACE_S

    def read_coordinator(self) -> None:
        """Act on what the coordinator tells."""
        assert self.coordinator_wire
        try:
            messages = self.coordinator_wire.receive()
        except (EOFError, OSError) as error:
            self.loop.forget(self.coordinator_wire)
            self.coordinator_wire = None
            self.coordinator_gone(error)
            return
        for message in messages:
            self.loop.attempt(partial(self.on_coordinator_message, message))

    def on_coordinator_message(self, message: Message) -> None:
        """Act on one message of the coordinator."""
        match message:
            case Ruling():
                self.take_ruling(message)
            case JobEnds():
                self.end_rank(message)
            case Look() if self.coordinator_wire:
                self.coordinator_wire.send(Condition(self.process.is_stopped()))
            case Neighbour(rank, pid):
                self.watch_neighbour(rank, pid)
            case Over():
                self.settled = True
            case Unreadable(error):
                raise ValueError(error)

    def watch_neighbour(self, rank: int, pid: int) -> None:
        """Tell the coordinator when a process of this node ends: in one process's eyes there is an order."""

        def tell_end() -> None:
            self.loop.forget(descriptor)
            os.close(descriptor)
            if self.coordinator_wire:
                self.coordinator_wire.send(Ended(rank))

        with contextlib.suppress(OSError):  # before Linux 5.3
            descriptor = os.pidfd_open(pid)
            self.loop.listen(descriptor, tell_end)

    def coordinator_gone(self, error: Exception) -> None:
        """End the rank if the coordinator is gone in the middle of the job, and rank 0 with it."""
        if self.end_ruling is not None and self.loop.is_set("await ruling"):
            self.take_ruling(self.end_ruling)
        if not self.settled:
            self.settled = self.lost_coordinator = True
            gone = isinstance(error, EOFError)
            self.loop.set_timer("lost", LAUNCHER_S, lambda: self.end_without_coordinator(gone))

    def end_without_coordinator(self, gone: bool) -> None:
        """End the rank, which its launcher has not ended although rank 0 and its sentinel are gone."""
        assert self.member
        if not self.gone:
            host = self.member.host
            self.say_for_node(f"mpiddp: rank 0 {'is gone' if gone else f'is out of reach of {host}'}: "
                              f"ending the ranks on {host}")
            self.end_rank(JobEnds(1, abort=True))
            if self.rank_reported and self.end_ruling is not None:
                self.take_ruling(self.end_ruling)

    def end_rank(self, end: JobEnds) -> None:
        """End the rank because the job ends: it is asked where it may end itself, then ended by force."""
        self.settled = True
        self.end_ruling = Ruling(None, end.status, end.abort)
        if self.gone:  # and its report has crossed this on the way
            self.take_ruling(self.end_ruling)
            return
        self.remember_children()
        if end.abort and (end.waits or not self.rank_reported):
            self.rank_wire.send(End(end.status))
            self.send_signal(END_SIGNAL)
            if self.process.is_stopped():
                self.send_signal(signal.SIGCONT)
        if not self.rank_reported:
            self.loop.set_timer("ask", min(ASKING_S, self.grace_s), self.ask_to_end)
        self.kill_in_time()

    def kill_in_time(self) -> None:
        """Kill the rank when its grace is over, which begins now if it has not yet."""
        if not self.loop.is_set("kill"):
            self.loop.set_timer("kill", self.grace_s + LAST_S, lambda: self.send_signal(signal.SIGKILL))

    def ask_to_end(self) -> None:
        """Let a script that handles SIGTERM come to its own end; any other would be cut off by it."""
        with contextlib.suppress(OSError):
            if self.process.handles(signal.SIGTERM):
                self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def rank_closed(self) -> None:
        """Find out what it means that the rank's end is closed: it is on its way out, or became another program."""
        try:
            status = self.process.wait_status()
        except ProcessLookupError:
            self.rank_gone(None)
            return
        if status is not None:
            self.rank_gone(status)
        elif self.process.ended < 0:
            self.loop.set_timer("closed", ASKING_S, self.rank_closed)

    def rank_gone(self, status: int | None) -> None:
        """Report for a rank that is gone, if nobody has reported yet, and end what it left behind."""
        if self.gone:
            return
        self.gone = True
        self.loop.drop_timers("start", "ask", "kill", "closed")
        if self.process.ended >= 0:
            self.loop.forget(self.process.ended)
        if not self.settled and self.member is None:
            self.tell_early_death(early_death(self.process, status))
        if self.settled or self.member is None:
            self.clean_up()
        elif not self.rank_reported:
            self.report(brief(report_on(self.process, self.member, status, self.stacks)))

    def tell_early_death(self, cause: str) -> None:
        """Say how the rank died in its start, of which no other can know, and do not let them wait for it."""
        if cause:
            say(f"mpiddp: {self.watched.who} {cause}, in {self.stage}")
            self.failed_start = True

    def remember(self, child: int) -> None:
        """Note a process that the rank has forked: it shows no mark of the job, and soon perhaps no parent."""
        import psutil

        if len(self.children) > MANY_CHILDREN:
            self.children = {one for one in self.children if one.is_running()}
        with contextlib.suppress(psutil.Error):
            self.children.add(psutil.Process(child))

    def remember_children(self) -> None:
        """Note the rank's descendants while it is there to be their parent."""
        if not self.gone:
            from .descendants import children

            self.children |= children(self.process.pid)

    def clean_up(self) -> None:
        """Print the reason if the rank could not, end what it left behind, and end."""
        if self.untold is not None:
            self.tell_reason(self.untold)
        if self.coordinator_wire:
            self.coordinator_wire.send(Through())
        if self.coordinator is not None and self.gone:
            self.coordinator.finish()
        if self.failed_start:
            time.sleep(ASKING_S)  # for other nodes' sentinels to say what they have to
            cancel(self.watched.step)
        silence(2)  # a launcher waits until nobody holds it
        from .descendants import end, marked

        if self.member:
            self.children |= marked(f"TORCHELASTIC_RUN_ID={self.member.run_id}", f"RANK={self.member.rank}")
        end(self.children, CLEANING_S)
        self.loop.over = True

    def let_go(self) -> None:
        """End because the rank leaves the job in order; what it has started lives on, as without us."""
        if self.coordinator is not None:
            self.coordinator.tell_over()
        elif self.coordinator_wire:
            self.coordinator_wire.send(Bye())
        self.loop.over = True


def place_of(error: Exception) -> str:
    """Return the innermost line of our own code that an exception came through."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def knows_why(rank_wire: Wire) -> bool:
    """Tell whether a rank that is gone has told that it knows why."""
    try:
        return any(isinstance(message, (Settled, Bye)) for message in rank_wire.receive())
    except (EOFError, OSError):
        return False
