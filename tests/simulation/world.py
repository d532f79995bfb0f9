"""A clock, a network and a kernel, in which ranks, their agents and a coordinator run. All comes from a seed."""

from __future__ import annotations

import heapq
import signal
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from mpiddp.agent import events, protocol
from mpiddp.agent.coordinator import Coordinator, EndOrdered
from mpiddp.agent.coordinator_server import OWN_LINK, is_for_own_watcher
from mpiddp.agent.protocol import FINAL_EXIT_TIMEOUT_S, LAUNCHER_KILL_TIMEOUT_S, WatchedRank
from mpiddp.agent.state_machine import StateMachine
from mpiddp.agent.watcher import Watcher
from mpiddp.base.ranks import RankIdentity
from mpiddp.failure.root_cause import NOBODY, JobActivity, Report, ReportKind, RootCause
from mpiddp.ipc.channel import Unreadable

StateMachine.raises = True
CoordinatorMessage = protocol.CoordinatorToAgent | Unreadable

NOTICING_S = 0.005  # for a launcher to notice that a rank is gone
CLEANING_S = 0.7  # that an agent may take to end what its rank left
ANSWER_S = 4.0  # that a rank waits for its agent
MOST_NOTICED = 20  # ranks whose end others notice by themselves: by then everybody has noticed one
COLLECTIVE_S = 3.0  # after which a collective gives up
LOCAL_S = (0.0001, 0.002)
EXIT_TIMEOUT_S = 4.0  # after which a rank at its end gives up
LOST_LINK_S = 60.0  # until the kernel gives up a connection of which nothing is heard


class Shape(NamedTuple):
    """A job: its ranks and nodes, and how its launcher is.

    `exits`: ranks end each by itself. `kills_s`: in which time the launcher kills the others where one is gone, None
    for never. `script_s`: how long the script runs. `slow_s`: the most by which a slow node's messages are late.
    `collectives`: ranks notice in their next collective that one is gone or late. `busy`: the share of the other ranks
    that a fault finds in native code, from which they never come back. `leaving_s`: in which time all leave at the end.
    `watchdog`: a rank whose collective takes too long is ended by SIGABRT, as NCCL's watchdog does. `gives_up`: a rank
    at its end waits no longer than EXIT_TIMEOUT_S for others.
    """

    nodes: int
    per_node: int
    exits: bool
    by_srun: bool
    kills_s: float | None
    grace_s: float
    script_s: float
    slow_s: float
    collectives: bool = True
    busy: float = 0.0
    leaving_s: float = 0.05
    watchdog: bool = False
    gives_up: bool = True

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node


class Printed(NamedTuple):
    """A report that somebody has printed."""

    at_s: float
    by: str
    verdict: RootCause


class World:
    """Runs one job from its start to its end."""

    def __init__(self, shape: Shape, random: Random, tell: Callable[[str], object] | None = None) -> None:
        self.shape, self.random, self._tell = shape, random, tell
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._last: dict[Any, float] = {}  # delivery on each channel, which keeps the order
        self.lost_nodes: set[int] = set()
        self.slow_nodes: set[int] = set()
        self.cut_off: dict[int, float] = {}  # nodes of which nothing comes through before a time
        self.without_agent: set[int] = set()  # the ranks whose agents were killed alone
        self.effects: list[tuple[float, Any]] = []  # the faults that had one, and when
        self.printed: list[Printed] = []
        self.doubtful: list[Printed] = []  # whoever printed these was lost before it could say so
        self.said: list[str] = []
        self.ended_with: int | None = None  # the status that the launcher has
        self.cancelled = False
        self._aborting = False
        self._gone = 0
        self.callers: dict[int, Agent] = {}  # by link
        self.coordinator_gone_s: float | None = None  # before it had told all to end
        self.ranks = [Rank(self, number) for number in range(shape.ranks)]
        self.agents = [Agent(self, rank) for rank in self.ranks]
        self.server = Server(self)
        for rank in self.ranks:
            self.schedule(random.uniform(0, 0.05), rank.begin)

    def link(self, caller: Agent) -> int:
        """Return a number for a new connection to the coordinator."""
        self.callers[len(self.callers) + 1] = caller
        return len(self.callers)

    def trace(self, *words: object) -> None:
        """Pass on what happens, if a trace is wanted."""
        if self._tell:
            self._tell(f"{self.now:9.4f}  " + " ".join(map(str, words)))

    def schedule(self, after_s: float, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act` so long from now."""
        self._schedule_at(self.now + after_s, act, *arguments)

    def _schedule_at(self, at_s: float, act: Callable[..., object], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, act, arguments))

    def send(self, channel: Any, delay_s: float, act: Callable[..., object], *arguments: Any) -> None:
        """Call `act` so long from now, but never before what was sent over this channel earlier."""
        due = max(self._last.get(channel, 0.0), self.now + delay_s)
        self._last[channel] = due
        self._schedule_at(due, act, *arguments)

    def between(self, node: int, other: int) -> float | None:
        """Return the delay of a message between two nodes, None if it never arrives."""
        if node != other and {node, other} & self.lost_nodes:
            return None
        delay = self.random.uniform(*LOCAL_S)
        if node != other and self.cut_off:
            delay += max(0.0, max(self.cut_off.get(node, 0.0), self.cut_off.get(other, 0.0)) - self.now)
        if node != other and {node, other} & self.slow_nodes:
            delay += self.random.uniform(0, self.shape.slow_s)
        return delay

    def run(self, until_s: float) -> None:
        """Process the events up to a time."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, act, arguments = heapq.heappop(self._queue)
            act(*arguments)

    def print_report(self, by: str, verdict: RootCause) -> None:
        """Note that somebody prints why the job failed."""
        self.trace(by, "prints", verdict)
        self.printed.append(Printed(self.now, by, verdict))

    def abort(self, status: int) -> None:
        """Do what a launcher does at MPI_Abort: it kills all ranks."""
        if self.ended_with is None:
            self.ended_with = status
        if not self._aborting:
            self._aborting = True
            self.kill_all(self.random.uniform(0.0, 0.3))

    def on_exit(self, rank: Rank) -> None:
        """Do what a launcher does when a rank has ended."""
        if rank.wait_status and self.ended_with is None:
            self.ended_with = rank.wait_status >> 8 or 128 + (rank.wait_status & 0x7F)
        if rank.wait_status and self.shape.kills_s is not None and not self._aborting:
            self._aborting = True
            self.kill_all(NOTICING_S + self.random.uniform(0, self.shape.kills_s))

    def hold_busy_ranks(self, but: Rank) -> None:
        """Draw which of the other ranks stay in native code."""
        for rank in self.ranks:
            rank.busy |= rank is not but and self.random.random() < self.shape.busy

    def note_coordinator_lost(self) -> None:
        """Note when a fault took the coordinator, if that was before it had told all ranks to end."""
        if not isinstance(self.server.coordinator.phase, EndOrdered) and not all(rank.left for rank in self.ranks):
            self.coordinator_gone_s = self.now

    def kill_all(self, after_s: float) -> None:
        """Kill every rank, node by node."""
        for node in range(self.shape.nodes):
            reached_s = after_s + self.random.uniform(0, 0.05)
            if node not in self.lost_nodes:
                for rank in self.ranks[node * self.shape.per_node:(node + 1) * self.shape.per_node]:
                    self.schedule(reached_s + self.random.uniform(0, 0.01), rank.die, signal.SIGKILL)

    def lose_node(self, node: int) -> None:
        """Let a node vanish without closing its connections."""
        self.trace("node", node, "is lost")
        self.lost_nodes.add(node)
        ranks = self.ranks[node * self.shape.per_node:(node + 1) * self.shape.per_node]
        self.doubt(*(name for rank in ranks for name in rank.names))
        for rank in ranks:
            rank.alive, rank.vanished = False, True
            self.agents[rank.number].vanish()
            self.on_stall(rank)

    def doubt(self, *lost: str) -> None:
        """Put aside the reports of lost processes that may not have reported any more that it is printed."""
        if self.server.coordinator.has_unprinted_verdict:
            self.doubtful += [report for report in self.printed if report.by in lost]
            self.printed = [report for report in self.printed if report.by not in lost]

    def on_stall(self, rank: Rank) -> None:
        """Let the other ranks notice, at the end of their collective's time, that one does not come."""
        for other in self.ranks:
            if other is not rank:
                self.schedule(COLLECTIVE_S + self.random.uniform(0, 0.2), other.notice_loss, rank)

    def on_gone(self, rank: Rank) -> None:
        """Let the other ranks notice that one is gone: some at once, by its connections, others in time."""
        self._gone += 1
        if self._gone > MOST_NOTICED:
            return
        for other in self.ranks:
            if other is not rank and not other.reporting:
                soon = self.random.random() < 0.5
                after_s = self.random.uniform(0.0005, 0.05) if soon else COLLECTIVE_S
                self.schedule(after_s, other.notice_loss, rank)


class Rank:
    """A rank's process: its script, and what mpiddp does in it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.node = number // world.shape.per_node
        self.host = f"n{self.node}"
        self.names = f"rank {number}", f"agent {number}"  # of this process, and of the one that watches it
        self.alive, self.stopped, self.vanished, self.left = True, False, False, False
        self.unwatched = False  # its agent was killed, and it speaks for itself
        self.ends = False  # it was told that the job ends
        self.busy = False  # in native code, which lets no handler of Python's run
        self.wait_status: int | None = None
        self.watched_by: list[Agent] = []  # besides its own
        self.killed_by_agent = False
        self.gone_s: float | None = None
        self.reporting: Report | None = None
        self.decision: protocol.EndDecision | None = None
        self.last_words_s = 0.0
        self.script_over = False
        self.waits = False  # in a collective, for others
        shape = world.shape
        self.member = RankIdentity(number, shape.ranks, number % shape.per_node, self.host, "cpu", 1000 + number, "run",
                                   shape.grace_s, shape.exits, namespace=self.host)

    @property
    def agent(self) -> Agent:
        """The agent, also if it was killed."""
        return self.world.agents[self.number]

    def notice_agent_death(self) -> None:
        """Notice that the agent was killed, and use its connection to the coordinator."""
        if not self.alive or self.left or self.stopped or self.busy or self.decision is not None:
            return
        self.world.trace(f"rank {self.number} goes on unwatched")
        self.unwatched = True
        self.send(protocol.AgentLost())
        if self.script_over:
            self.send(protocol.ScriptEnded())
        if self.reporting:
            self.send(protocol.Failed(self.reporting))
            self.expect_answer()
        held, self.agent.held = self.agent.held, []
        for message in held:
            self.receive(message)

    def send(self, message: protocol.RankToAgent | protocol.AgentLost) -> None:
        """Send a message to the agent, or to the coordinator."""
        world = self.world
        if not self.alive:
            return
        world.trace(f"rank {self.number} sends", message)
        if not self.unwatched:
            world.send(("rank", self.number), world.random.uniform(*LOCAL_S), self.agent.post,
                       events.FromRank(message))
        elif self.number:
            self.agent.send_to_coordinator(events.FromPeer(self.agent.link, message))

    def expect_answer(self) -> None:
        """Decide alone if nobody answers; nobody can answer a rank 0 without an agent."""
        assert self.reporting
        alone_s = LAUNCHER_KILL_TIMEOUT_S if self.reporting.kind == ReportKind.SECONDARY else 0.001
        self.world.schedule(alone_s if self.unwatched and not self.number else ANSWER_S, self.give_up)

    def begin(self) -> None:
        """Start, and join the job."""
        shape = self.world.shape
        self.send(protocol.Stage("MPI_Init"))
        if self.number == 0:
            self.send(protocol.StartCoordinator("a", "t", shape.ranks))
        after_s = 0.2 + self.world.random.uniform(0, 0.1)
        self.world.schedule(after_s, self.send, protocol.RegisterRank(self.member, "a", 1, "t"))
        self.world.schedule(after_s, self.send, protocol.Stage(""))
        self.world.schedule(after_s + shape.script_s + self.world.random.uniform(0, 0.3), self.end_script)

    def end_script(self) -> None:
        """Finish the script, and wait for the others."""
        if not self.alive or self.reporting or self.stopped or self.busy:
            return
        self.script_over = True
        self.send(protocol.ScriptEnded())
        if self.world.shape.gives_up:
            self.world.schedule(EXIT_TIMEOUT_S, self.give_up_others)
        if all(other.script_over for other in self.world.ranks):
            for rank in self.world.ranks:
                after_s = self.world.random.uniform(0.001, self.world.shape.leaving_s)
                self.world.schedule(after_s, rank.leave)

    def give_up_others(self) -> None:
        """Fail if others have not finished by now."""
        if not all(other.script_over for other in self.world.ranks):
            self.fail("waited in vain for the end of others", 1, kind=ReportKind.SECONDARY)

    def leave(self) -> None:
        """Leave the job in order."""
        if self.alive and not self.reporting and not self.stopped:
            if not self.agent.alive:
                self.notice_agent_death()
            self.left = True
            self.send(protocol.Leave())
            self.world.schedule(0.005, self.exit, 0)

    def fail(self, cause: str, status: int, last_words_s: float = 0.0, kind: str = ReportKind.ERROR) -> bool:
        """Report an error, wait for what follows, and return whether this rank still could."""
        if not self.alive or self.reporting or self.left or self.stopped or self.busy:
            return False
        self.reporting = Report(self.number, self.host, kind, cause, status)
        self.last_words_s = last_words_s
        self.send(protocol.Failed(self.reporting))
        self.expect_answer()
        if kind == ReportKind.ERROR:
            self.world.on_stall(self)
        return True

    def notice_loss(self, other: Rank) -> None:
        """Notice in a collective that another rank is gone, or late."""
        missing = not other.alive or other.stopped or other.reporting
        if missing and self.world.shape.watchdog and other.alive and not self.busy and not self.stopped:
            if not self.reporting and not self.left:
                self.die(signal.SIGABRT)
        elif missing and self.world.shape.collectives and not self.script_over:
            self.fail(f"connection closed by peer (rank {other.number})", 1, kind=ReportKind.SECONDARY)

    def give_up(self) -> None:
        """Decide alone: nobody answers."""
        if self.alive and not self.stopped and self.decision is None:
            assert self.reporting
            self.follow(protocol.EndDecision(RootCause(self.reporting), self.reporting.status, True))

    def receive(self, message: protocol.AgentToRank | CoordinatorMessage) -> None:
        """Take a message of the agent, or of the coordinator."""
        if not self.alive:
            return
        self.world.trace(f"rank {self.number} receives", message)
        if isinstance(message, protocol.EndDecision) and self.decision is None:
            self.follow(message)
        elif isinstance(message, protocol.EndRank):
            self.told_to_end = message.status
        elif isinstance(message, protocol.JobEnds):
            if not self.ends:
                self.world.schedule(self.world.shape.grace_s + FINAL_EXIT_TIMEOUT_S, self.die, signal.SIGKILL, True)
            self.ends = True
            is_parked = self.decision is not None and not self.decision.abort
            if message.abort and (message.waits or is_parked or not self.reporting):
                self.world.schedule(0.001, self.end_job, message.status)

    def follow(self, decision: protocol.EndDecision) -> None:
        """Do what follows from a failure."""
        if self.stopped or self.busy:
            return
        self.decision = decision
        if decision.verdict is not None:
            self.world.print_report(self.names[0], decision.verdict)
            self.send(protocol.ReasonPrinted())
        self.world.schedule(min(self.last_words_s, self.world.shape.grace_s), self.finish_failed)

    def finish_failed(self) -> None:
        """End the job, or wait for the rank that does."""
        if not self.alive or self.stopped or self.busy:
            return
        assert self.decision
        self.send(protocol.CleanupDone())
        after_s = 0.1 if self.decision.abort else self.world.shape.grace_s + 1
        self.world.schedule(after_s, self.end_job, self.decision.status)

    def alert(self) -> None:
        """Get END_SIGNAL, after an `EndRank`."""
        self.stopped = False
        if self.alive and not self.busy:
            self.world.schedule(0.001, self.end_job, getattr(self, "told_to_end", 1))

    def end_job(self, status: int) -> None:
        """End by oneself, or by MPI_Abort with all others."""
        if not self.alive or self.stopped or self.busy:
            return
        if not self.world.shape.exits:
            self.world.abort(status)
        self.exit(status)

    def exit(self, status: int) -> None:
        """End the process with a status."""
        self._end(status << 8)

    def die(self, number: int, by_agent: bool = False) -> None:
        """End by a signal."""
        if self.alive:
            self.killed_by_agent |= by_agent
        self._end(int(number))

    def _end(self, wait_status: int) -> None:
        if not self.alive:
            return
        world = self.world
        world.trace(f"rank {self.number} ends, wait status {wait_status}")
        self.alive, self.wait_status, self.gone_s = False, wait_status, world.now
        world.send(("rank", self.number), 0.0005, self.agent.post, events.RankGone(wait_status))
        if not self.agent.alive:
            if self.left and self.number:
                self.agent.send_to_coordinator(events.FromPeer(self.agent.link, protocol.Leave()))
            self.agent.hang_up()
        for other in self.watched_by:
            ended = events.Observed(protocol.PeerProcessEnded(self.number))
            world.schedule(world.random.uniform(*LOCAL_S), other.post, ended)
        world.on_exit(self)
        if not self.left:
            world.on_gone(self)


class Timers:
    """Posts `Due` to a process, once for each time that a timer is set."""

    def __init__(self, world: World, post: Callable[[events.Due], object]) -> None:
        self._world, self._post = world, post
        self._turns: dict[str, int] = {}
        self._last_turn = 0

    def set(self, name: str, after_s: float) -> None:
        """Set a timer; one of the same name is replaced."""
        self._last_turn += 1
        self._turns[name] = self._last_turn
        self._world.schedule(after_s, self._due, name, self._last_turn)

    def drop(self, name: str) -> None:
        """Cancel a timer."""
        self._turns.pop(name, None)

    def _due(self, name: str, turn: int) -> None:
        if self._turns.get(name) == turn:
            del self._turns[name]
            self._post(events.Due(name))


class Agent:
    """An agent's process: the real logic, and simulated hands."""

    def __init__(self, world: World, rank: Rank) -> None:
        self.world, self.rank, self.number = world, rank, rank.number
        shape = world.shape
        watched = WatchedRank(f"rank {rank.number} on {rank.host}", rank.number % shape.per_node == 0,
                          "1.0" if shape.by_srun else None, list, shape.by_srun, 60.0)
        self.watched = watched
        self.watcher = Watcher(watched, 0.0)
        self.alive = True
        self.linked = False
        self.link = 0  # as the coordinator numbers the connection
        self.held: list[CoordinatorMessage] = []  # what the coordinator has said since it was killed
        self._events: deque[events.WatcherEvent] = deque()
        self._timers = Timers(world, self.post)
        self._do_all(self.watcher.take_actions())

    def vanish(self) -> None:
        """Vanish without closing the connections."""
        self.alive = False
        if self.number == 0:
            self.world.note_coordinator_lost()
            for other in self.world.agents[1:]:
                if other.linked:
                    self.world.schedule(LOST_LINK_S, other.post, events.Rank0Lost(closed=False))
        elif self.linked:
            self.world.schedule(LOST_LINK_S, self.world.server.post, events.PeerLost(self.link, "timed out"))

    def die(self) -> None:
        """End; if the rank is gone too, the kernel closes the connections."""
        if not self.alive:
            return
        self.world.trace(f"agent {self.number} ends")
        self.alive = False
        if not self.rank.alive:
            self.hang_up()
            return
        self.world.schedule(self.world.random.uniform(0.001, 0.1), self.rank.notice_agent_death)
        for other in self.world.agents[1:] if self.number == 0 else []:
            if other.linked:
                self._send(other, other.post, events.CoordinatorLost())

    def hang_up(self) -> None:
        """Close the connections, which nobody has any more."""
        if self.number == 0:
            for other in self.world.agents[1:]:
                if other.linked:
                    self._send(other, other.post, events.Rank0Lost(closed=True))
        elif self.linked:
            self.send_to_coordinator(events.PeerLost(self.link))

    def post(self, event: events.WatcherEvent) -> None:
        """Pass an event to the logic, and do what it wants; an event that comes meanwhile follows afterwards."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                if self.alive:
                    self.world.trace(f"agent {self.number} <-", self._events[0])
                    self._do_all(self.watcher.handle(self._events[0], self.world.now))
                elif isinstance(self._events[0], events.FromCoordinator):
                    self._receive_for_rank(self._events[0].message)
                self._events.popleft()

    def _receive_for_rank(self, message: CoordinatorMessage) -> None:
        """Pass the rank what has come over the connection since this agent was killed."""
        if not self.rank.unwatched:
            self.held.append(message)
        else:
            self.rank.receive(message)

    def _send(self, other: Agent, act: Callable[..., object], *arguments: Any) -> None:
        delay = self.world.between(self.rank.node, other.rank.node)
        if delay is not None:
            self.world.send(("down", other.number), delay, act, *arguments)

    def send_to_coordinator(self, event: events.CoordinatorEvent) -> None:
        """Pass an event to the coordinator."""
        if self.number == 0:
            self.world.server.post(event)
        elif (delay := self.world.between(self.rank.node, 0)) is not None:
            self.world.send(("up", self.number), delay, self.world.server.post, event)

    def _do_all(self, actions: list[events.WatcherAction]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: events.WatcherAction) -> None:
        world, rank = self.world, self.rank
        match action:
            case events.SetTimer(name, after_s):
                self._timers.set(name, after_s)
            case events.CancelTimer(name):
                self._timers.drop(name)
            case events.PrintLine(text):
                world.trace(text)
                world.said.append(text)
            case events.PrintReason(verdict):
                world.print_report(rank.names[1], verdict)
            case events.ToRank(message):
                world.send(("to rank", self.number), world.random.uniform(*LOCAL_S), rank.receive, message)
            case events.ToCoordinator(message):
                if self.linked:
                    self.send_to_coordinator(events.FromPeer(self.link, message))
            case events.CarryOut(protocol.RegisterRank() as request):
                self._meet(request.member)
            case events.ObserveRank(protocol.QueryStopped()):
                self._do(events.ToCoordinator(protocol.StoppedStatus(rank.stopped)))
            case events.WatchProcess(number):
                self._watch(number)
            case _:
                self._do_to_rank(action)

    def _do_to_rank(self, action: events.WatcherAction) -> None:
        world, rank = self.world, self.rank
        match action:
            case events.WatcherCommand.SIGNAL_END:
                world.send(("to rank", self.number), 0.0005, rank.alert)
            case events.WatcherCommand.REQUEST_TERMINATION:
                if world.random.random() < 0.3 and not rank.stopped and not rank.busy:
                    world.schedule(world.random.uniform(0, 1), rank.fail, "sys.exit(143)", 143)
            case events.WatcherCommand.TERMINATE | events.WatcherCommand.KILL:
                rank.die(signal.SIGKILL, by_agent=True)
            case events.WatcherCommand.LEAVE_JOB:
                if self.number == 0:
                    world.server.post(events.OwnRankEnded(in_order=True))
                else:
                    self._do(events.ToCoordinator(protocol.Leave()))
                self._die_when_idle()
            case events.WatcherCommand.END_OTHERS:
                if self.number == 0:
                    world.server.post(events.OwnRankEnded(in_order=False))
            case events.WatcherCommand.CANCEL_STEP:
                world.cancelled = True
                world.kill_all(0.1)
            case events.WatcherCommand.CLEAN_UP:
                world.schedule(world.random.uniform(0.01, CLEANING_S), self._die_when_idle)

    def _die_when_idle(self) -> None:
        if self.number == 0 and self.world.server.coordinator.has_unprinted_verdict:
            self.world.schedule(0.05, self._die_when_idle)
        else:
            self.die()

    def _meet(self, member: RankIdentity) -> None:
        self.linked = True
        if self.number == 0:
            self.world.server.post(events.OwnRankJoined(0, member))
        else:
            self.link = self.world.link(self)
            hello = protocol.Hello(member.rank, member.host, member.pid, member.namespace)
            self.send_to_coordinator(events.PeerGreeted(self.link, hello))
            if not (self.world.ranks[0].alive or self.world.agents[0].alive):
                self.world.schedule(LOCAL_S[0], self.post, events.Rank0Lost(closed=True))

    def _watch(self, number: int) -> None:
        self.world.ranks[number].watched_by.append(self)
        if not self.world.ranks[number].alive:
            self.world.schedule(0.001, self.post, events.Observed(protocol.PeerProcessEnded(number)))


class Server:
    """The coordinator's process, which is that of rank 0's agent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._process = world.agents[0]
        self.coordinator = Coordinator(self._process.watched, 0.0)
        self._timers = Timers(world, self.post)

    @property
    def is_gone(self) -> bool:
        """Whether the process is gone."""
        return not self._process.alive

    def post(self, event: events.CoordinatorEvent) -> None:
        """Pass an event to the logic, and do what it wants."""
        if not self.is_gone:
            self.world.trace("coordinator <-", event)
            actions = self.coordinator.handle(event, self.world.now)
            for action in sorted(actions, key=is_for_own_watcher):
                self._do(action)

    def _do(self, action: events.CoordinatorAction) -> None:
        world = self.world
        match action:
            case events.ToPeer(link, message):
                if link == OWN_LINK:
                    self._process.post(events.FromCoordinator(message))
                elif (delay := world.between(0, world.callers[link].rank.node)) is not None:
                    other = world.callers[link]
                    world.send(("down", other.number), delay, other.post, events.FromCoordinator(message))
            case events.SetTimer(name, after_s):
                self._timers.set(name, after_s)
            case events.PrintReason(verdict):
                world.print_report("coordinator", verdict)
            case events.CoordinatorCommand.CANCEL_STEP:
                world.cancelled = True
                world.kill_all(0.1)
            case events.PrintLine(text):
                world.said.append(text)
            case events.CoordinatorCommand.CHECK_WAIT_FOR_FINISHED:
                world.schedule(world.random.uniform(0.2, 2.0), self._post_wait_for_finished)
            case events.CoordinatorCommand.TAKE_SNAPSHOT:
                world.schedule(world.random.uniform(0.2, 2.0), self.post, events.SnapshotTaken(JobActivity()))
            case events.CloseConnection():
                pass

    def _post_wait_for_finished(self) -> None:
        """Post whether all unfinished ranks wait for those that have finished."""
        living = [rank for rank in self.world.ranks if not rank.script_over]
        waits = living and all(rank.waits for rank in living)
        report = Report(NOBODY, "", ReportKind.UNREACHABLE, "others wait in vain", 1)
        self.post(events.WaitForFinishedRank(report if waits else None))
