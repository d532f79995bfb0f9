"""The sentinel process: it watches one rank from its first moment to its last.

It knows neither MPI nor torch. While the rank works it sleeps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..facts import runtime
from ..facts.process import Process
from ..plan.member import Member
from ..plan.verdict import CONSEQUENCE, Report, Verdict, brief
from ..plan.words import folded, shortened
from ..say import FORWARDING_S, say
from ..show.report import tell
from .coordinator import Coordinator, dial
from .detached import silence
from .loop import Loop
from .postmortem import early_death, report_on
from .reach import out_of_reach
from .wire import END, Message, Wire, read_verdict, verdict_message

if TYPE_CHECKING:
    import psutil

HARD_GRACE_S = 15.0  # after the deadline of the start, in which ranks that can speak end the job themselves
RULING_S = 2.5  # for the coordinator's answer
ASKING_HOSTS_S = 2.0
ASKING_S = 1.0  # between one way to end a rank and the next, harder one
LAUNCHER_S = 2.0  # for the launcher to end a job that has lost its rank 0
MANY_CHILDREN = 1000
CLEANING_S = 0.7  # for what a rank left behind
LAST_S = 0.5  # for a rank whose grace is over to end by itself


def watch(
    channel: Wire, signals: socket.socket, rank: int, who: str, speaks: bool, step: str | None,
    hosts: Callable[[], list[str]], timeout_s: float,
) -> None:
    """Be the sentinel of process `rank` until it is gone; the numbers of signals it gets come by `signals`."""
    silence(0, 1)
    try:
        process = Process(rank)
    except (FileNotFoundError, ProcessLookupError):  # it is gone already
        if not knows_why(channel):
            say(f"mpiddp: {who} died as soon as it had started; its launcher may know how")
            time.sleep(ASKING_S)
            cancel(step)
        return
    watcher = Watcher(channel, process, who, speaks, step, hosts, timeout_s)
    watcher.loop.listen(signals, lambda: watcher.hear_signal(signals))
    watcher.loop.run()


class Watcher:
    """Holds what the sentinel knows of its rank, and does what the moment asks for."""

    def __init__(
        self, rank: Wire, process: Process, who: str, speaks: bool, step: str | None, hosts: Callable[[], list[str]],
        timeout_s: float,
    ) -> None:
        self.rank, self.who, self.speaks, self.step, self.timeout_s = rank, who, speaks, step, timeout_s
        self.hosts = hosts
        self.loop = Loop(self.excuse)
        self.process = process
        self.start = time.monotonic()
        self.stage = "starting"
        self.member: Member | None = None
        self.court: Wire | None = None  # where reports go, and rulings come from
        self.coordinator: Coordinator | None = None  # on rank 0
        self.children: set[psutil.Process] = set()
        self.stacks: list[str] = []
        self.asked = False  # for a ruling
        self.unspoken: Verdict | None = None  # which the rank has to print
        self.settled = False  # the reason of the job's end is known
        self.sentence: Message | None = None  # what the job's end means for the rank
        self.lost = False  # the coordinator went without a word
        self.excuses: set[str] = set()  # that were made
        self.failed_start = False  # it did not come through its start, and others may wait for it
        self.gone = False
        self.loop.listen(rank, self.hear_rank)
        if self.process.ended >= 0:
            self.loop.listen(self.process.ended, self.rank_closed)
        self.loop.set_timer("warn", timeout_s / 4, self.warn)
        self.loop.set_timer("start", timeout_s, self.end_start)

    def hear_rank(self) -> None:
        """Act on what the rank says."""
        try:
            messages = self.rank.receive()
        except (EOFError, OSError):
            self.loop.forget(self.rank)
            self.rank_closed()
            return
        for message in messages:
            self.loop.attempt(partial(self.obey, message))

    def excuse(self, error: Exception) -> None:
        """Say, once, what went wrong in the sentinel itself; one whose rank is gone has nothing to stay for."""
        words = f"{type(error).__name__}: {error}"
        line = f"sentinel of {self.who}: {shortened(words)} ({place_of(error)})"
        if line not in self.excuses:
            self.excuses.add(line)
            self.say(line, whole_node=False)
        self.loop.over |= self.gone

    def hear_signal(self, signals: socket.socket) -> None:
        """Tell of a SIGINT, which a rank in the middle of a collective would only notice at its end."""
        numbers = signals.recv(4096)
        if not numbers:
            self.loop.forget(signals)
        elif signal.SIGINT in numbers and self.court:
            self.court.send(interrupted=True)

    def obey(self, message: Message) -> None:
        """Act on one message of the rank."""
        if "stage" in message:
            self.begin(message["stage"])
        elif "forked" in message:
            self.remember(message["forked"])
        elif "serve" in message:
            self.serve(message["serve"], message["token"])
        elif "join" in message:
            self.join(message)
        elif "failed" in message:
            self.asked = True
            self.accuse(message["failed"])
        elif "text" in message:
            self.stacks.append(message["text"])
        elif "settled" in message:
            self.settled = True
        elif "bye" in message:
            self.settled = True
            self.leave()
        elif self.court:
            self.court.send(**message)
        if "spoken" in message:
            self.unspoken = None

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
            silent = out_of_reach(self.hosts(), min(ASKING_HOSTS_S, self.timeout_s / 4))
            self.say(f"{self.who} has waited {waited_s:.0f} s in MPI_Init, "
                     "which returns when every rank of the job has reached it"
                     + (f"; no answer from {folded(silent)}" if silent else ""))

    def end_start(self) -> None:
        """End a rank that is not ready in time: at once in MPI_Init, after a grace anywhere else."""
        late_s = time.monotonic() - self.start
        in_mpi = self.stage == "MPI_Init"
        if not in_mpi and late_s < self.timeout_s + HARD_GRACE_S:
            self.loop.set_timer("start", self.timeout_s + HARD_GRACE_S - late_s, self.end_start)
            return
        self.say(f"ending {self.who}: still in {self.stage} {late_s:.0f} s after its start", whole_node=in_mpi)
        self.settled = self.failed_start = True
        self.press(signal.SIGTERM)
        self.loop.set_timer("kill", ASKING_S, lambda: self.press(signal.SIGKILL))

    def say(self, line: str, whole_node: bool = True) -> None:
        """Print a line, but only on one rank of a node where it concerns the whole of it."""
        if self.speaks or not whole_node:
            say(f"mpiddp: {line}")

    def serve(self, address: str, token: str) -> None:
        """Become the coordinator of the job's sentinels."""
        started_by = runtime.detect(os.environ)
        by_srun = started_by is not None and started_by.launcher is runtime.SRUN
        try:
            self.coordinator = Coordinator(
                self.loop, self.start, address, token, self.step is not None, by_srun, self.end_step)
        except OSError:
            self.rank.send(port=0)
        else:
            self.rank.send(port=self.coordinator.port)

    def join(self, message: Message) -> None:
        """Connect to the coordinator; without one the rank is watched all the same."""
        self.member = Member(**message["join"])
        if self.coordinator:
            self.court = self.coordinator.own_member(self.member)
        elif message["port"]:
            self.court = dial(message["address"], message["port"], message["token"], self.member)
        if self.court:
            self.loop.listen(self.court, self.hear_court)

    def accuse(self, report: Message) -> None:
        """Bring the reason for the rank's end before the coordinator, unless the job's end has come already."""
        self.remember_children()
        if self.sentence:
            self.rule(self.sentence)
        elif not self.lost or report["kind"] != CONSEQUENCE:
            self.loop.set_timer("ruling", RULING_S, lambda: self.rule_alone(report))
            if self.court is None or not self.court.send(failed=report, gone=self.gone):
                self.rule_alone(report)

    def rule_alone(self, report: Message) -> None:
        """Decide without the coordinator: it does not answer."""
        self.rule({"ruling": verdict_message(Verdict(Report(**report))), "abort": True})

    def rule(self, message: Message) -> None:
        """Pass a ruling on, or speak for the rank that is gone."""
        self.loop.drop_timers("ruling")
        self.settled = True
        self.unspoken = read_verdict(message["ruling"]) if message["ruling"] else None
        if self.gone:
            self.clean()
        else:
            self.rank.send(**message)
            self.kill_in_time()

    def speak(self, verdict: Verdict) -> None:
        """Print the job's last words for the rank, which is gone."""
        tell(verdict, self.member, time.monotonic() - self.start, self.member.error_file if self.member else "")
        time.sleep(FORWARDING_S)
        if self.court:
            self.court.send(spoken=True)

    @property
    def grace_s(self) -> float:
        """The time in which ranks end by themselves."""
        return self.member.grace_s if self.member else HARD_GRACE_S

    def hear_court(self) -> None:
        """Act on what the coordinator says."""
        assert self.court
        try:
            messages = self.court.receive()
        except (EOFError, OSError) as error:
            self.loop.forget(self.court)
            self.court = None
            self.lose_coordinator(error)
            return
        for message in messages:
            self.loop.attempt(partial(self.heed, message))

    def heed(self, message: Message) -> None:
        """Act on one message of the coordinator."""
        if "ruling" in message:
            self.rule(message)
        elif "end" in message:
            self.end_rank(message["end"], message["abort"], message.get("waits", False))
        elif "look" in message and self.court:
            self.court.send(stopped=self.process.is_stopped())
        elif "neighbour" in message:
            self.watch_neighbour(message["neighbour"], message["pid"])
        elif "over" in message:
            self.settled = True

    def watch_neighbour(self, rank: int, pid: int) -> None:
        """Tell the coordinator when a process of this node ends: in one process's eyes there is an order."""

        def tell_end() -> None:
            self.loop.forget(descriptor)
            os.close(descriptor)
            if self.court:
                self.court.send(ended=rank)

        with contextlib.suppress(OSError):  # before Linux 5.3
            descriptor = os.pidfd_open(pid)
            self.loop.listen(descriptor, tell_end)

    def lose_coordinator(self, error: Exception) -> None:
        """End the rank where the coordinator is gone in the middle of the job, and rank 0 with it."""
        if self.sentence and self.loop.is_set("ruling"):
            self.rule(self.sentence)
        if not self.settled:
            self.settled = self.lost = True
            gone = isinstance(error, EOFError)
            self.loop.set_timer("lost", LAUNCHER_S, lambda: self.end_without_coordinator(gone))

    def end_without_coordinator(self, gone: bool) -> None:
        """End the rank, which its launcher has not ended although rank 0 and its sentinel are gone."""
        assert self.member
        if not self.gone:
            host = self.member.host
            self.say(f"rank 0 {'is gone' if gone else f'is out of reach of {host}'}: ending the ranks on {host}")
            self.end_rank(1, abort=True)
            if self.asked and self.sentence:
                self.rule(self.sentence)

    def end_rank(self, status: int, abort: bool, waits: bool = False) -> None:
        """End the rank because the job ends: asked where it may do it itself, then ended by force.

        `waits` tells that it has failed too, and waits to be told.
        """
        self.settled = True
        self.sentence = {"ruling": None, "status": status, "abort": abort}
        if self.gone:  # and its report has crossed this on the way
            self.rule(self.sentence)
            return
        self.remember_children()
        if abort and (waits or not self.asked):
            self.rank.send(end=status)
            self.press(END)
            if self.process.is_stopped():
                self.press(signal.SIGCONT)
        if not self.asked:
            self.loop.set_timer("ask", min(ASKING_S, self.grace_s), self.ask_to_end)
        self.kill_in_time()

    def kill_in_time(self) -> None:
        """Kill the rank when its grace is over, which has begun."""
        if not self.loop.is_set("kill"):
            self.loop.set_timer("kill", self.grace_s + LAST_S, lambda: self.press(signal.SIGKILL))

    def ask_to_end(self) -> None:
        """Let a script that handles SIGTERM come to its own end; any other would be cut off by it."""
        with contextlib.suppress(OSError):
            if self.process.handles(signal.SIGTERM):
                self.press(signal.SIGTERM)

    def press(self, number: int) -> None:
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
        """Speak for a rank that is gone, if nobody has spoken yet, and end what it left."""
        if self.gone:
            return
        self.gone = True
        self.loop.drop_timers("start", "ask", "kill", "closed")
        if self.process.ended >= 0:
            self.loop.forget(self.process.ended)
        if not self.settled and self.member is None:
            self.mourn(early_death(self.process, status))
        if self.settled or self.member is None:
            self.clean()
        elif not self.asked:
            self.accuse(brief(report_on(self.process, self.member, status, self.stacks))._asdict())

    def mourn(self, cause: str) -> None:
        """Say how the rank died in its start, of which no other can know, and do not let them wait for it."""
        if cause:
            self.say(f"{self.who} {cause}, in {self.stage}", whole_node=False)
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

    def clean(self) -> None:
        """Say what the rank could not say, end what it left behind, and go."""
        if self.unspoken is not None:
            self.speak(self.unspoken)
        if self.court:
            self.court.send(through=True)
        if self.coordinator is not None and self.gone:
            self.coordinator.finish()
        if self.failed_start:
            time.sleep(ASKING_S)  # for other nodes' sentinels to speak
            self.end_step()
        silence(2)  # a launcher waits until nobody holds it
        from .descendants import end, marked

        if self.member:
            self.children |= marked(f"TORCHELASTIC_RUN_ID={self.member.run_id}", f"RANK={self.member.rank}")
        end(self.children, CLEANING_S)
        self.loop.over = True

    def leave(self) -> None:
        """Go, because the rank leaves the job in order; what it has started lives on, as without us."""
        if self.coordinator is not None:
            self.coordinator.dismiss()
        elif self.court:
            self.court.send(bye=True)
        self.loop.over = True

    def end_step(self) -> None:
        """Cancel the Slurm step: srun waits on for other ranks where it has no PMIx to tell it of one."""
        cancel(self.step)


def place_of(error: Exception) -> str:
    """Return the innermost line of our own code that an exception came through."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def cancel(step: str | None) -> None:
    """Cancel a Slurm step, if there is one."""
    import subprocess

    if step is not None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           timeout=HARD_GRACE_S)


def knows_why(rank: Wire) -> bool:
    """Tell whether a rank that is gone has said that it knows why."""
    try:
        return any("settled" in message or "bye" in message for message in rank.receive())
    except (EOFError, OSError):
        return False
