"""The logic of a sentinel: what it does about its rank, from the rank's first moment to its last.

No I/O, no clock: `Watcher.handle()` takes an event and returns actions, which `process.py` carries out.
"""

from __future__ import annotations

import enum

from ..base.stderr import LAUNCHER_FORWARDING_S
from ..base.text import truncate_middle
from ..failure.postmortem import describe_early_death, extract_crash_stack, is_maybe_secondary, make_death_report
from ..failure.rank import RankIdentity
from ..failure.root_cause import MAX_STACK_CHARS, NO_STEP_DAEMON, Report, ReportKind, RootCause, truncate_report
from ..output.protocol import Outflow
from ..where.protocol import Answers, Inspect, Stacks, Where
from . import events, protocol
from .events import Machine
from .protocol import LAST_S, LAUNCHER_S
from .startup_timeout import HARD_GRACE_S, OTHERS_S, Start

RULING_S = 2.5  # for the coordinator to rule
LEAVING_S = 60.0  # for a rank whose script has ended to leave a job whose rank 0 may have left it in order
ASKING_S = 1.0  # between one way to end a rank and the next, harder one


class State(enum.Enum):
    """What a watcher is at."""

    STARTING = "the rank has not joined its job yet"
    WORKING = "the rank is a member of its job"
    REPORTED = "it is reported why the rank ends, and the coordinator rules what follows"
    DESERTED = "the coordinator is gone, and rank 0 with it: the launcher may end the job"
    ENDING = "the rank ends, or has to; it is known why"
    SETTLED = "the rank says itself why it ends, or the job is over"
    CLEANING = "the rank is gone; what it left behind is ended"
    OVER = "nothing is left to do"


S = State
MOVES: dict[State, dict[str, State]] = {  # what leads from a state to which other; anything else changes none
    S.STARTING: {"joined": S.WORKING, "reported": S.REPORTED, "told to end": S.ENDING, "settled": S.SETTLED,
                 "gone": S.CLEANING, "left": S.OVER},
    S.WORKING: {"reported": S.REPORTED, "ruled": S.ENDING, "told to end": S.ENDING, "deserted": S.DESERTED,
                "settled": S.SETTLED, "left": S.OVER},
    S.REPORTED: {"ruled": S.ENDING, "told to end": S.ENDING, "deserted": S.DESERTED},
    S.DESERTED: {"ruled": S.ENDING, "told to end": S.ENDING, "gone": S.CLEANING, "left": S.OVER},
    S.SETTLED: {"reported": S.REPORTED, "ruled": S.ENDING, "told to end": S.ENDING, "gone": S.CLEANING,
                "left": S.OVER},
    S.ENDING: {"gone": S.CLEANING, "left": S.OVER},
    S.CLEANING: {"cleaned": S.OVER}, S.OVER: {},
}


class Watcher(Machine[State, events.WatcherAction]):
    """Reports to the coordinator why its rank ends, and ends it when the coordinator rules so.

    Without a coordinator it rules itself that its rank was the first to fail, unless it has lost another rank, or its
    launcher may have ended it.
    """

    moves = MOVES

    def __init__(self, watched: protocol.Watched, began_s: float) -> None:
        """Begin to watch at `began_s`, in seconds of the clock that handle() is given."""
        super().__init__(State.STARTING, began_s)
        self.watched = watched
        self.member: RankIdentity | None = None  # once the rank has joined its job
        self.gone = False  # the rank's process
        self.start = Start(watched, began_s)
        self._do(*self.start.begin_watch())
        self._stacks: list[str] = []  # the lines that faulthandler printed
        self._rank_reported = False  # by itself
        self._ruling: protocol.Ruling | None = None  # what the rank is told when it fails, once that is known
        self._waiting: Report | None = None  # a report that has no ruling yet
        self._alone = self._closed = False  # there is no coordinator, or none any more; that has closed its connection
        self._over = False  # the job, in order
        self._parked = False  # the rank has a ruling that lets it wait for the job's end
        self._killing = False  # the rank's grace has begun
        self._script_ended: protocol.ScriptEnded | None = None

    def handle(self, event: events.WatcherEvent, now_s: float) -> list[events.WatcherAction]:
        """Return what to do about an event that has come at `now_s`, on any monotonic clock."""
        self._now_s = now_s
        match event:
            case events.FromRank(protocol.Unreadable(error)) | events.FromCoordinator(protocol.Unreadable(error)):
                raise ValueError(error)
            case events.FromRank(message):
                self._on_rank_message(message)
            case events.FromCoordinator(message):
                self._on_coordinator_message(message)
            case events.RankGone():
                self._on_rank_gone(event)
            case events.CoordinatorGone(closed):
                self._on_coordinator_gone(closed)
            case events.NoCoordinator(error):
                self._alone = True
                if error:
                    self._do(events.Say(f"mpiddp: {self.watched.who} is not watched together with the others: {error}"))
            case events.CoordinatorKilled():
                self._on_coordinator_killed()
            case events.StepDaemonGone():
                self._on_step_daemon_gone()
            case events.Noticed(message):
                self._do(events.ToCoordinator(message))
            case events.Due(timer):
                self._on_due(timer)
        return self.taken()

    def _on_rank_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.Stage(name):
                self._do(*self.start.begin(name))
            case protocol.Forked(pid):
                self._do(events.NoteChild(pid))
            case Stacks() | Answers() | Outflow():
                self._do(events.TakeWindow(message))
            case protocol.Answer():
                self._do(events.AnswerTrials(message))
            case protocol.Coordinate():
                self._do(events.BeCoordinator(message))
            case protocol.Join(member):
                self.member = member
                self._move("joined")
                self._do(events.MeetCoordinator(message), *self.start.join())
            case protocol.Failed(report):
                self._rank_reported = True
                self._report(report)
            case protocol.Text(line):
                self._stacks.append(line)
            case protocol.Settled():
                self._move("settled")
            case protocol.Bye():
                if self._move("left"):
                    self._do(events.LeaveInOrder())
            case protocol.Told() | protocol.Through() | protocol.ScriptEnded() | protocol.AskMissing():
                if isinstance(message, protocol.ScriptEnded) and (message.exit or self._script_ended is None):
                    self._script_ended = message
                if isinstance(message, protocol.Told):
                    message = self._on_told(message)
                self._do(events.ToCoordinator(message))

    def _on_told(self, message: protocol.Told) -> protocol.Told:
        """Let the record be written that comes with this, and return it without."""
        if message.record and self.member is not None:
            self._do(events.WriteRecord(self.member.error_file, message.record))
        if self._ruling is not None:
            self._ruling = self._ruling._replace(verdict=None)
        return protocol.Told(message.done)

    def _on_coordinator_message(self, message: protocol.Message) -> None:
        match message:
            case protocol.Ruling():
                self._take_ruling(message)
            case protocol.JobEnds():
                self._end_rank(message)
            case protocol.Missing():
                self._do(events.ToRank(message))
            case protocol.Look() | Where() | Inspect():
                self._do(events.LookAtRank(message, self._script_ended is not None))
            case protocol.Neighbour(rank, pid):
                self._do(events.WatchNeighbour(rank, pid))
            case protocol.Over():
                self._over = True
                if self.state is State.WORKING:
                    self._move("settled")

    def _on_due(self, timer: str) -> None:
        match timer:
            case "late":
                self._do(*self.start.on_due(timer, self._now_s))
            case "warn" | "start":
                self._do(*self.start.on_due(timer, self._now_s))
                if self.start.failed:
                    self._killing = self._move("settled")
            case "ruling":
                self._rule_alone()
            case "lost":
                self._end_without_coordinator()
            case "ask":
                self._do(events.AskToEnd())
            case "kill":
                self._do(events.Kill())
            case "told":
                self._do(events.ToCoordinator(protocol.Told()))
                self._finish()
            case "cancel":
                self._do(events.CancelStep())
                self._end_watch()

    def _report(self, report: Report) -> None:
        """Report to the coordinator why the rank ends, unless it is ruled already what follows."""
        if not self.gone:
            self._do(events.NoteDescendants())
        if self._ruling is not None:
            self._take_ruling(self._ruling)
            return
        self._waiting = report
        self._move("reported")
        if not self._alone:
            self._do(events.SetTimer("ruling", RULING_S), events.ToCoordinator(protocol.Failed(report, self.gone)))
        elif self.gone or report.kind != ReportKind.SECONDARY:
            self._rule_alone()
        elif self.state is not State.DESERTED:  # the rank that was first has asked the launcher to end the job
            self._do(events.SetTimer("ruling", LAUNCHER_S))

    def _rule_alone(self) -> None:
        """Answer a report in the place of the coordinator."""
        if self._waiting is not None:
            is_told = not (self.gone and self._alone and is_maybe_secondary(self._waiting))
            verdict = RootCause(self._waiting) if is_told else None
            self._take_ruling(self._ruling or protocol.Ruling(verdict, self._waiting.status, True))

    def _say_rank_0_is_gone(self, words: str = "") -> None:
        """Say so, once on a node; for rank 0's own, whose sentinel is gone, rank 1's does."""
        assert self.member
        how = "gone" if self._closed else f"out of reach of {self.member.host}"
        if self.watched.first_on_node or self.member.rank == 1:
            self._do(events.Say(f"mpiddp: rank 0 is {how}{words}"))

    def _take_ruling(self, ruling: protocol.Ruling) -> None:
        """Pass a ruling on to the rank; if that is gone, do what the rank would have to do."""
        self._do(events.DropTimer("ruling"))
        self._ruling, self._waiting, self._parked = ruling, None, not ruling.abort
        self._move("ruled")
        if self.gone:
            self._clean_up()
        else:
            self._do(events.ToRank(ruling))
            self._kill_in_time()

    def _end_rank(self, end: protocol.JobEnds) -> None:
        """End the rank because the job ends: ask it if it can end by itself, and kill it when its grace is over."""
        if self.state in (State.CLEANING, State.OVER):
            return
        self._move("told to end")
        if self._ruling is None or self._ruling.verdict is None:
            self._ruling = protocol.Ruling(None, end.status, end.abort)
        if self.gone:  # and its report has crossed this on the way
            self._take_ruling(self._ruling)
            return
        self._do(events.NoteDescendants())
        if end.abort and (end.waits or self._parked or not self._rank_reported):
            self._do(events.ToRank(protocol.End(end.status)), events.Alert())
        if not self._rank_reported:
            self._do(events.AskToFlush(), events.SetTimer("ask", min(ASKING_S, self._grace_s())))
        self._kill_in_time()

    def _on_coordinator_killed(self) -> None:
        """Rule alone from now on: what the coordinator has not answered, and what comes."""
        self._alone = True
        is_own = self._waiting is not None and self._waiting.kind == ReportKind.ERROR
        if self._over or self._ruling is not None or self.gone or is_own:
            self._rule_alone()

    def _on_coordinator_gone(self, closed: bool) -> None:
        """Wait whether the launcher ends the rank, if rank 0 is gone in the middle of the job."""
        self._on_coordinator_killed()
        if self._over or not self._move("deserted"):
            return
        self._closed = closed
        self._do(events.SetTimer("lost", LEAVING_S if self._script_ended is not None else LAUNCHER_S))

    def _end_without_coordinator(self) -> None:
        """End the rank, which its launcher has not ended although rank 0 and its sentinel are gone."""
        assert self.member
        if self.gone or self.state is not State.DESERTED:
            return
        self._say_rank_0_is_gone(f": ending the ranks on {self.member.host}")
        self._end_rank(protocol.JobEnds(1, abort=True))
        self._rule_alone()

    def _on_rank_gone(self, event: events.RankGone) -> None:
        """Report on a rank that is gone, if that is still to be done, and end what it left behind."""
        self.gone = True
        self._do(*(events.DropTimer(name) for name in ("start", "warn", "late", "ask", "kill")))
        stack = extract_crash_stack(self._stacks)
        self._do(events.LogStack(truncate_middle(stack, MAX_STACK_CHARS)))
        if self.state is State.STARTING:
            self._do(*self.start.tell_death(describe_early_death(event.status, event.out_of_memory)))
        if self.state is State.DESERTED and self._script_ended is None:
            self._say_rank_0_is_gone()
        if self.state is State.WORKING and self.member is not None:
            self._report(truncate_report(make_death_report(self.member, event.status, event.out_of_memory, stack)))
        elif self.state is not State.REPORTED:
            self._clean_up()
        elif self._alone:
            self._rule_alone()

    def _on_step_daemon_gone(self) -> None:
        """Tell it the coordinator; if there is none yet, say it, and end the rank, which nobody else ends."""
        if self.state is not State.STARTING:
            self._do(events.ToCoordinator(protocol.Orphaned()))
            return
        self._do(*self.start.end(f"has {NO_STEP_DAEMON}"))
        self._killing = self._move("settled")

    def _clean_up(self) -> None:
        """Print the reason if it is not printed yet; then end what the rank left behind, and this process."""
        if not self._move("gone"):
            return
        if self._ruling is not None and self._ruling.verdict is not None:
            error_file = self.member.error_file if self.member else ""
            after_s = self._now_s - self.start.began_s
            self._do(events.ToCoordinator(protocol.Told(done=False)), events.SetTimer("told", LAUNCHER_FORWARDING_S),
                     events.TellReason(self._ruling.verdict, self.member, after_s, error_file))
        else:
            self._finish()

    def _finish(self) -> None:
        """Let the others end, who wait for this rank."""
        self._do(events.ToCoordinator(protocol.Through()), events.LetAllEnd())
        if self.start.failed:
            self._do(events.SetTimer("cancel", OTHERS_S))
        else:
            self._end_watch()

    def _end_watch(self) -> None:
        self._move("cleaned")
        self._do(events.CleanUp())

    def _grace_s(self) -> float:
        return self.member.grace_s if self.member else HARD_GRACE_S

    def _kill_in_time(self) -> None:
        """Kill the rank when its grace is over, which begins now unless it has begun before."""
        if not self._killing:
            self._killing = True
            self._do(events.SetTimer("kill", self._grace_s() + LAST_S))
