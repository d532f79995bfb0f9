"""The sentinel process: it watches one rank from its first moment to its last.

It knows neither MPI nor torch. While the rank works it sleeps.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..facts.process import Process
from ..plan.report import Member
from ..plan.verdict import ENDED, Report, Verdict
from .coordinator import Coordinator, dial, read_verdict, verdict_message
from .detached import silence
from .failure import tell
from .wire import Message, Wire

if TYPE_CHECKING:
    import psutil

END = signal.SIGRTMAX  # asks a rank to end itself with the status that its sentinel tells it
HARD_GRACE_S = 15.0  # after the deadline of the start, in which ranks that can speak end the job themselves
RULING_S = 2.5  # for the coordinator's answer
ASKING_S = 1.0  # between one way to end a rank and the next, harder one
LAUNCHER_S = 2.0  # for the launcher to end a job that has lost its rank 0
MANY_CHILDREN = 1000
LAUNCHING = (f'File "{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}', "<frozen runpy>")
BY_WHOM = "by its launcher, by hand or by the kernel"
CLEANING_S = 0.7  # for what a rank left behind


def watch(channel: Wire, rank: int, who: str, speaks: bool, step: str | None, timeout_s: float) -> None:
    """Be the sentinel of process `rank` until it is gone."""
    silence(0, 1)
    Watcher(channel, rank, who, speaks, step, timeout_s).run()


class Watcher:
    """Holds what the sentinel knows of its rank, and does what the moment asks for."""

    def __init__(self, rank: Wire, pid: int, who: str, speaks: bool, step: str | None, timeout_s: float) -> None:
        self.rank, self.who, self.speaks, self.step, self.timeout_s = rank, who, speaks, step, timeout_s
        self.process = Process(pid)
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
        self.late = False  # it did not come through its start in time
        self.gone = False
        self.over = False
        self.selector = selectors.DefaultSelector()
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self.listen(rank, self.hear_rank)
        if self.process.ended >= 0:
            self.listen(self.process.ended, self.rank_closed)
        self.set_timer("warn", timeout_s / 4, self.warn)
        self.set_timer("start", timeout_s, self.end_start)

    def run(self) -> None:
        """Sleep and act until the rank is gone, and all that it left."""
        while not self.over:
            due = min((at for at, _ in self.timers.values()), default=math.inf)
            pause = None if due == math.inf else max(0.0, due - time.monotonic())
            for key, _ in self.selector.select(pause):
                if key.fd in self.selector.get_map():  # what came before may have ended this connection
                    key.data()
            now = time.monotonic()
            for name, (at, act) in list(self.timers.items()):
                if at <= now and name in self.timers:
                    del self.timers[name]
                    act()

    def listen(self, wire: Wire | socket.socket | int, act: Callable[[], None]) -> None:
        """Call `act` whenever something can be read."""
        self.selector.register(wire, selectors.EVENT_READ, act)

    def forget(self, wire: Wire) -> None:
        """Listen to a connection no more."""
        self.selector.unregister(wire)

    def set_timer(self, name: str, after_s: float, act: Callable[[], None]) -> None:
        """Call `act` once, `after_s` from now; one of the same name is replaced."""
        self.timers[name] = (time.monotonic() + after_s, act)

    def hear_rank(self) -> None:
        """Act on what the rank says."""
        try:
            messages = self.rank.receive()
        except (EOFError, OSError):
            self.forget(self.rank)
            self.rank_closed()
            return
        for message in messages:
            self.obey(message)

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
        elif "bye" in message:
            self.leave()
        elif self.court:
            self.court.send(**message)
        if "spoken" in message:
            self.unspoken = None

    def begin(self, stage: str) -> None:
        """Note what the rank does; the script, which has no name, has no deadline either."""
        self.stage = stage
        if stage != "MPI_Init":
            self.timers.pop("warn", None)
        if not stage:
            self.timers.pop("start", None)

    def warn(self) -> None:
        """Say that the rank waits in MPI_Init, if that is where it is."""
        if self.stage == "MPI_Init":
            self.say(f"{self.who} has waited {time.monotonic() - self.start:.0f} s in MPI_Init, "
                     "which returns when every rank of the job has reached it")

    def end_start(self) -> None:
        """End a rank that is not ready in time: at once in MPI_Init, after a grace anywhere else."""
        late_s = time.monotonic() - self.start
        in_mpi = self.stage == "MPI_Init"
        if not in_mpi and late_s < self.timeout_s + HARD_GRACE_S:
            self.set_timer("start", self.timeout_s + HARD_GRACE_S - late_s, self.end_start)
            return
        self.say(f"ending {self.who}: still in {self.stage} {late_s:.0f} s after its start", whole_node=in_mpi)
        self.settled = self.late = True
        self.press(signal.SIGTERM)
        self.set_timer("kill", ASKING_S, lambda: self.press(signal.SIGKILL))

    def say(self, line: str, whole_node: bool = True) -> None:
        """Print a line, but only on one rank of a node where it concerns the whole of it."""
        if self.speaks or not whole_node:
            write(f"mpiddp: {line}\n")

    def serve(self, address: str, token: str) -> None:
        """Become the coordinator of the job's sentinels."""
        try:
            self.coordinator = Coordinator(self, address, token)
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
            self.listen(self.court, self.hear_court)

    def accuse(self, report: Message) -> None:
        """Bring the reason for the rank's end before the coordinator."""
        self.set_timer("ruling", RULING_S, lambda: self.rule_alone(report))
        self.remember_children()
        if self.court is None or not self.court.send(failed=report, gone=self.gone):
            self.rule_alone(report)

    def rule_alone(self, report: Message) -> None:
        """Decide without the coordinator: it does not answer."""
        self.rule({"ruling": verdict_message(Verdict(Report(**report))), "abort": True})

    def rule(self, message: Message) -> None:
        """Pass a ruling on, or speak for the rank that is gone."""
        self.timers.pop("ruling", None)
        self.settled = True
        self.unspoken = read_verdict(message["ruling"]) if message["ruling"] else None
        if self.gone:
            self.clean()
        else:
            self.rank.send(**message)
            self.set_timer("kill", self.grace_s, lambda: self.press(signal.SIGKILL))

    def speak(self, verdict: Verdict) -> None:
        """Print the job's last words for the rank, which is gone."""
        tell(verdict, self.member, time.monotonic() - self.start, self.member.error_file if self.member else "")
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
            self.forget(self.court)
            self.court = None
            self.lose_coordinator(error)
            return
        for message in messages:
            if "ruling" in message:
                self.rule(message)
            elif "end" in message:
                self.end_rank(message["end"], message["abort"])
            elif "look" in message and self.court:
                self.court.send(stopped=self.process.is_stopped())
            elif "over" in message:
                self.settled = True

    def lose_coordinator(self, error: Exception) -> None:
        """End the rank where the coordinator is gone in the middle of the job, and rank 0 with it."""
        if not self.settled:
            self.settled = True
            gone = isinstance(error, EOFError)
            self.set_timer("lost", LAUNCHER_S, lambda: self.end_without_coordinator(gone))

    def end_without_coordinator(self, gone: bool) -> None:
        """End the rank, which its launcher has not ended although rank 0 and its sentinel are gone."""
        assert self.member
        if not self.gone:
            host = self.member.host
            self.say(f"rank 0 {'is gone' if gone else f'is out of reach of {host}'}: ending the ranks on {host}")
            self.end_rank(1, abort=True)

    def end_rank(self, status: int, abort: bool) -> None:
        """End the rank because the job ends: asked where it may do it itself, then ended by force."""
        self.settled = True
        if self.gone:
            return
        self.remember_children()
        if abort and not self.asked:
            self.rank.send(end=status)
            self.press(END)
            if self.process.is_stopped():
                self.press(signal.SIGCONT)
        self.set_timer("ask", min(ASKING_S, self.grace_s), self.ask_to_end)
        self.set_timer("kill", self.grace_s, lambda: self.press(signal.SIGKILL))

    def ask_to_end(self) -> None:
        """Let a script that handles SIGTERM come to its own end; any other would not notice it either."""
        with contextlib.suppress(OSError):
            self.press(signal.SIGTERM if self.process.handles(signal.SIGTERM) else signal.SIGKILL)

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
            self.set_timer("closed", ASKING_S, self.rank_closed)

    def rank_gone(self, status: int | None) -> None:
        """Speak for a rank that is gone, if nobody has spoken yet, and end what it left."""
        if self.gone:
            return
        self.gone = True
        for name in ("start", "ask", "kill", "closed"):
            self.timers.pop(name, None)
        if self.process.ended >= 0:
            self.selector.unregister(self.process.ended)
        if self.settled or self.member is None:
            self.clean()
        elif not self.asked:
            self.accuse(asdict(self.describe(self.member, status)))

    def describe(self, member: Member, status: int | None) -> Report:
        """Return the report on a rank that could not make one."""
        text = without_launch(self.stacks)
        if status is None:
            return Report(member.rank, member.host, ENDED, "ended; its launcher may know how", 1, text=text)
        if number := status & 0x7F:
            name = signal_name(number)
            cause = f"ended by {name} ({signal.strsignal(number)})"
            if number == signal.SIGKILL:
                cause += f": {'out of memory, as its cgroup counts' if self.process.was_out_of_memory() else BY_WHOM}"
            return Report(member.rank, member.host, ENDED, cause, 128 + number, text=text, signal=name)
        cause = f"the process left with status {status >> 8}, past Python and past its script's end"
        return Report(member.rank, member.host, ENDED, cause, status >> 8 or 1, text=text)

    def remember(self, child: int) -> None:
        """Note a process that the rank has forked: it shows no mark of the job, and soon perhaps no parent."""
        import psutil

        if len(self.children) > MANY_CHILDREN:
            self.children = {one for one in self.children if one.is_running()}
        with contextlib.suppress(psutil.Error):
            self.children.add(psutil.Process(child))

    def remember_children(self) -> None:
        """Note the rank's descendants while it is there to be their parent."""
        from .descendants import children

        if not self.gone:
            self.children |= children(self.process.pid)

    def clean(self) -> None:
        """Say what the rank could not say, end what it left behind, and go."""
        if self.unspoken is not None:
            self.speak(self.unspoken)
        if self.coordinator is not None and self.gone:
            self.coordinator.finish()
        if self.late:
            time.sleep(ASKING_S)  # for other nodes' sentinels to speak
            self.end_step()
        silence(2)  # a launcher waits until nobody holds it
        from .descendants import end, marked

        if self.member:
            self.children |= marked(f"TORCHELASTIC_RUN_ID={self.member.run_id}", f"RANK={self.member.rank}")
        end(self.children, CLEANING_S)
        self.over = True

    def leave(self) -> None:
        """Go, because the rank leaves the job in order."""
        if self.coordinator is not None:
            self.coordinator.dismiss()
        elif self.court:
            self.court.send(bye=True)
        if self.children or self.process.has_children():
            self.remember_children()
            self.rank.close()
            self.clean()
        self.over = True

    def end_step(self) -> None:
        """Cancel the Slurm step: srun waits on for other ranks where it has no PMIx to tell it of one."""
        import subprocess

        if self.step is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["scancel", self.step], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               timeout=HARD_GRACE_S)


def without_launch(stacks: list[str]) -> str:
    """Return what faulthandler printed, without the frames that lead to the script and the list of extensions."""
    lines = [line for line in stacks if line and not line.startswith("Extension modules:")]
    script = [line for line in lines if '  File "' in line and not any(words in line for words in LAUNCHING)]
    while script and lines[-1] != script[-1]:
        lines.pop()
    return "\n".join(lines)


def signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write(text: str) -> None:
    """Print on stderr, in one piece."""
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), text.encode())
