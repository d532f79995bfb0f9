"""A clock, a network, a kernel and a launcher, in which ranks, their agents and a coordinator run, from a seed."""

from __future__ import annotations

import heapq
import signal
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from mpiddp.agent import events, protocol
from mpiddp.agent.coordinator import Coordinator, Ending, Over
from mpiddp.agent.coordinator_server import OWN_LINK, is_for_own_watcher
from mpiddp.agent.protocol import AgentConfig, CoordinatorToAgent
from mpiddp.agent.state_machine import StateMachine
from mpiddp.agent.timeouts import DESCENDANTS_TIMEOUT_S
from mpiddp.agent.watcher import Watcher
from mpiddp.base.ranks import RankIdentity
from mpiddp.failure.root_cause import NOBODY, JobActivity, Report, ReportKind, RootCause

StateMachine.raises = True

LOCAL_S = (0.0001, 0.002)  # for a message on a node
COLLECTIVE_S = 3.0  # after which a collective gives up
LOST_LINK_S = 60.0  # until the kernel gives up a connection whose other end is silent
LOST_LINK_SPREAD_S = 15.0  # between two kernels that do
MOST_CONNECTING_S = 0.4  # from a rank's registration until its agent has a connection to the coordinator
MOST_NOTICED = 20  # ranks whose end or stall others notice by themselves: by then everybody has noticed one
MOST_EVENTS = 1000  # of a rank; a job with more has no end


class Launcher(NamedTuple):
    """What was measured of a launcher.

    When an agent has ended with a status, or by a signal, all others get SIGTERM after `terminate_s` and SIGKILL after
    `kill_s`; with `only_killed`, when it was killed, or had not agreed with the others. A stop signal reaches the
    agents, with `signals_all` the ranks, too; SIGKILL follows after `stop_kill_s`. None for never. `stops` are the
    signals that come of a stop. A rank that has failed ends the job by MPI_Abort if the launcher `takes_abort`: then
    the agents get SIGTERM at once. An agent can cancel the step of a launcher that `has_step`.
    """

    terminate_s: float | None = None
    kill_s: float | None = None
    only_killed: bool = False
    signals_all: bool = False
    stop_kill_s: float | None = None
    stops: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    takes_abort: bool = False
    has_step: bool = False


LAUNCHERS = {
    "mpirun of Open MPI 4.1": Launcher(1.0, 2.0, stop_kill_s=1.0, takes_abort=True),
    "mpirun of Open MPI 5.0": Launcher(0.25, 0.5, stop_kill_s=0.5, takes_abort=True),
    "mpiexec of MPICH": Launcher(None, 0.002, only_killed=True, stops=(signal.SIGTERM, signal.SIGINT)),
    "srun --mpi=pmix": Launcher(None, 1.0, signals_all=True, stop_kill_s=2.0, has_step=True),
    "srun --mpi=pmi2": Launcher(signals_all=True, stop_kill_s=2.0, has_step=True),
}


class Shape(NamedTuple):
    """A job.

    `script_s`: how long the script runs. `slow_s`: the most by which a slow node's messages are late. `collectives`:
    ranks notice in their next collective that one is gone or late. `busy`: the share of the other ranks that a fault
    finds in native code, from which they never come back. `leaving_s`: in which time a rank leaves at the end.
    `watchdog`: a rank whose collective takes too long is ended by SIGABRT, as NCCL's watchdog does. `exit_timeout_s` is
    --exit-timeout's, 0 for none.
    """

    nodes: int
    per_node: int
    launcher: str = "srun --mpi=pmi2"
    grace_s: float = 5.0
    script_s: float = 30.0
    slow_s: float = 0.02
    collectives: bool = True
    busy: float = 0.0
    leaving_s: float = 0.05
    watchdog: bool = False
    exit_timeout_s: float = 0.0

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node


class Printed(NamedTuple):
    """A report that somebody has printed; `is_isolated`: on a node that has lost its network."""

    at_s: float
    by: str
    is_isolated: bool
    root_cause: RootCause


class World:
    """Runs one job from its start to its end."""

    def __init__(self, shape: Shape, random: Random, tell: Callable[[str], object] | None = None) -> None:
        self.shape, self.random, self._tell = shape, random, tell
        self.launcher = LAUNCHERS[shape.launcher]
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._last: dict[Any, float] = {}  # delivery on each channel, which keeps the order
        self.lost_nodes: set[int] = set()
        self.isolated: int | None = None  # a lost node that runs on without its network
        self.slow_nodes: set[int] = set()
        self.cut_off: dict[int, float] = {}  # nodes of which nothing comes through before a time
        self.effects: list[tuple[float, Any]] = []  # the faults that had one, and when
        self.vanished: list[tuple[float, Any]] = []  # the same for ranks that ended with status 0
        self.printed: list[Printed] = []
        self.said: list[str] = []
        self.coordinator_is_lost = False
        self.deputies: set[int] = set()  # the ranks whose agents were appointed
        self.was_stopped = False  # by the launcher's user
        self.kills_s: float | None = None  # when the launcher began to end all
        self._stalled = self._gone = 0  # ranks
        self.ranks = [Rank(self, number) for number in range(shape.ranks)]
        self.agents = [Agent(self, rank) for rank in self.ranks]
        self.server = Server(self)
        for rank in self.ranks:
            self.schedule(random.uniform(0, 0.05), rank.begin)

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
        due = self._last[channel] = max(self._last.get(channel, 0.0), self.now + delay_s)
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
        most = self._count + MOST_EVENTS * len(self.ranks)
        while self._queue and self._queue[0][0] <= until_s:
            assert self._count < most, "there is no end to the events"
            self.now, _, act, arguments = heapq.heappop(self._queue)
            act(*arguments)

    def print_report(self, by: str, node: int, root_cause: RootCause) -> None:
        """Note that somebody prints why the job failed."""
        self.trace(by, "prints", root_cause)
        self.printed.append(Printed(self.now, by, node == self.isolated, root_cause))

    def on_agent_end(self, is_alone: bool, status: int) -> None:
        """Do what the launcher does when an agent has ended; `is_alone`: without the others, it may be killed."""
        if self.kills_s is None and status and (is_alone or not self.launcher.only_killed):
            self.signal_agents(self.launcher.terminate_s, signal.SIGTERM)
            self.signal_agents(self.launcher.kill_s, signal.SIGKILL)

    def abort(self) -> None:
        """Do what the launcher does when a rank calls MPI_Abort."""
        self.signal_agents(0.002, signal.SIGTERM)
        self.signal_agents(self.launcher.kill_s, signal.SIGKILL)

    def stop(self, number: signal.Signals) -> None:
        """Stop the job from outside."""
        self.was_stopped = True
        self.signal_agents(0.0, number)
        if self.launcher.signals_all:
            for rank in self.ranks:
                if rank.node not in self.lost_nodes:
                    self.schedule(self.random.uniform(0, 0.05), rank.take_signal, number)
        self.signal_agents(self.launcher.stop_kill_s, signal.SIGKILL)

    def signal_agents(self, after_s: float | None, number: int) -> None:
        """Send all agents that the launcher reaches a signal, node by node."""
        if after_s is None:
            return
        if number == signal.SIGKILL:
            self.kills_s = min(self.kills_s or 1e9, self.now + after_s)
        for node in [node for node in range(self.shape.nodes) if node not in self.lost_nodes]:
            reached_s = after_s + self.random.uniform(0, 0.005)
            for agent in self.agents[node * self.shape.per_node:(node + 1) * self.shape.per_node]:
                self.schedule(reached_s + self.random.uniform(0, 0.002), agent.take_signal, number)

    def hold_busy_ranks(self, but: Rank) -> None:
        """Draw which of the other ranks stay in native code."""
        for rank in self.ranks:
            rank.busy |= rank is not but and self.random.random() < self.shape.busy

    def lose_node(self, node: int) -> None:
        """Let a node vanish without closing its connections."""
        self.trace("node", node, "is lost")
        self.lost_nodes.add(node)
        for rank in self.ranks[node * self.shape.per_node:(node + 1) * self.shape.per_node]:
            rank.alive = False
            self.agents[rank.number].vanish()
            self.on_stall(rank)

    def isolate(self, node: int) -> None:
        """Let a node lose its network, and run on; it may be that of the coordinator."""
        self.trace("node", node, "has lost its network")
        self.lost_nodes.add(node)
        self.isolated = node
        self.coordinator_is_lost |= node == 0 and not isinstance(self.server.coordinator.phase, Over)
        for other in range(self.shape.nodes):
            self.on_stall(self.ranks[other * self.shape.per_node])
        for agent in self.agents:
            if agent.is_linked and agent.rank.node and node in (0, agent.rank.node):
                agent.lose_link()

    def on_stall(self, rank: Rank) -> None:
        """Let the other ranks notice, at the end of their collective's time, that one does not come."""
        self._stalled += 1
        if self._stalled > MOST_NOTICED:
            return
        for other in self.ranks:
            if other is not rank:
                self.schedule(COLLECTIVE_S + self.random.uniform(0, 0.2), other.notice_loss, rank, "timed out waiting")

    def on_gone(self, rank: Rank) -> None:
        """Let the other ranks notice that one is gone: some at once, by its connections, others in time."""
        self._gone += 1
        if self._gone > MOST_NOTICED:
            return
        for other in self.ranks:
            if other is not rank and not other.reporting:
                after_s = self.random.uniform(0.0005, 0.05) if self.random.random() < 0.5 else COLLECTIVE_S
                self.schedule(after_s, other.notice_loss, rank, "connection closed by peer")


class Rank:
    """A rank's process: its script, and what mpiddp does in it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        shape = world.shape
        self.node = number // shape.per_node
        self.host = f"n{self.node}"
        self.alive, self.stopped, self.left, self.script_over = True, False, False, False
        self.busy = False  # in native code, which lets no handler of Python's run
        self.wait_status: int | None = None
        self.gone_s: float | None = None
        self.reporting: Report | None = None
        self.last_words_s = 0.0
        self.waits = False  # in a collective, for others
        self.crashes_late = False  # when it has left
        self.member = RankIdentity(number, shape.ranks, number % shape.per_node, self.host, "cpu", 1000 + number, "run",
                                   shape.grace_s, namespace=self.host)

    @property
    def agent(self) -> Agent:
        """The agent, also if it was killed."""
        return self.world.agents[self.number]

    @property
    def can_act(self) -> bool:
        """Return whether Python runs in this process."""
        return self.alive and not self.stopped and not self.busy

    def send(self, message: protocol.RankToAgent) -> None:
        """Send a message to the agent."""
        if self.alive:
            self.world.trace(f"rank {self.number} sends", message)
            self._post(events.FromRank(message))

    def _post(self, event: events.AgentEvent) -> None:
        self.world.send(("rank", self.number), self.world.random.uniform(*LOCAL_S), self.agent.post, event)

    def begin(self) -> None:
        """Start, and join the job."""
        shape, random = self.world.shape, self.world.random
        self.send(protocol.Stage("MPI_Init"))
        if self.number == 0:
            self.send(protocol.StartCoordinator("a", "t", shape.ranks))
        after_s = 0.2 + random.uniform(0, 0.1)
        self.world.schedule(after_s, self.send, protocol.RegisterRank(self.member, "a", 1, "t"))
        self.world.schedule(after_s, self.send, protocol.Stage(""))
        self.world.schedule(after_s + shape.script_s + random.uniform(0, 0.3), self.end_script)

    def end_script(self) -> None:
        """Finish the script, and wait for the others."""
        if self.can_act and not self.reporting:
            self.script_over = True
            self.send(protocol.ScriptEnded())

    def leave(self) -> None:
        """Leave the job in order."""
        if self.can_act and not self.reporting:
            self.left = True
            self.send(protocol.Leave(0))
            after_s = self.world.random.uniform(0.001, 0.1)
            self.world.schedule(after_s, self.end, signal.SIGSEGV if self.crashes_late else 0)

    def fail(self, cause: str, status: int, last_words_s: float = 0.0, kind: str = ReportKind.ERROR,
             signal_name: str = "") -> bool:
        """Report an error, wait for what follows, and return whether this rank still could."""
        if not self.can_act or self.reporting or self.left:
            return False
        self.reporting = Report(self.number, self.host, kind, cause, status, signal=signal_name)
        self.last_words_s = last_words_s
        self.send(protocol.Failed(self.reporting))
        if kind == ReportKind.ERROR:
            self.world.on_stall(self)
        return True

    def notice_loss(self, lost: Rank, words: str) -> None:
        """Fail, or be ended by a watchdog, because another rank is gone or late."""
        if not self.world.shape.collectives or self.script_over or not self.alive or self.stopped or self.reporting:
            return
        if self.world.shape.watchdog and words != "connection closed by peer":
            self.end(signal.SIGABRT)
        else:
            self.fail(f"{words}: rank {lost.number}", 1, kind=ReportKind.SECONDARY)

    def receive(self, message: protocol.AgentToRank) -> None:
        """Take a message of the agent."""
        if not self.can_act:
            return
        self.world.trace(f"rank {self.number} receives", message)
        match message:
            case protocol.PrintStack():
                self.world.schedule(self.world.random.uniform(0.001, 0.1), self.send, protocol.StackPrinted("stack"))
            case protocol.JobEnds(status) if self.reporting:
                self.world.schedule(self.last_words_s, self.exit, status)
            case protocol.Abort(status):
                self.world.abort()
                self.end(status << 8)
            case protocol.AllFinished():
                self.world.schedule(self.world.random.uniform(0.001, self.world.shape.leaving_s), self.leave)

    def exit(self, status: int) -> None:
        """End as Python does, if that runs, or be ready to end the job."""
        if self.can_act and self.world.launcher.takes_abort:
            self.send(protocol.ReadyToAbort())
        elif self.can_act:
            self.end(status << 8)

    def take_signal(self, number: int) -> None:
        """Do what a signal does."""
        if not self.alive:
            return
        if number == signal.SIGINT and not self.stopped:
            self.fail("KeyboardInterrupt", 130, signal_name="SIGINT")
        elif number in (signal.SIGTERM, signal.SIGKILL):
            self.end(number)

    def end(self, wait_status: int) -> None:
        """End the process; its agent may see the end of the connection first."""
        world = self.world
        if not self.alive:
            return
        world.trace(f"rank {self.number} ends, wait status {wait_status}")
        self.alive, self.wait_status, self.gone_s = False, wait_status, world.now
        if world.random.random() < 0.5:
            self._post(events.RankClosed())
        self._post(events.RankGone(int(wait_status)))
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
        self.config = AgentConfig(f"rank {rank.number} on {rank.host}", rank.number % shape.per_node == 0, "1.0", list,
                                   world.launcher.has_step, 60.0, has_own_group=not world.launcher.signals_all,
                                   exit_timeout_s=shape.exit_timeout_s)
        self.watcher = Watcher(self.config, 0.0)
        self.alive = True
        self.status: int | None = None  # with which it has ended by itself
        self.gone_s: float | None = None
        self.is_linked = False
        self._is_over = False  # the coordinator has said so
        self._events: deque[events.AgentEvent] = deque()
        self._timers = Timers(world, self.post)
        self._do_all(self.watcher.take_actions())

    @property
    def link(self) -> int:
        """The coordinator's number of the connection."""
        return OWN_LINK if self.number == 0 else self.number

    def vanish(self) -> None:
        """Vanish without closing the connections."""
        self.alive = False
        if self.number == 0:
            self._leave_others(LOST_LINK_S)
        elif self.is_linked:
            self._be_missed()

    def _be_missed(self) -> None:
        self.world.schedule(LOST_LINK_S + self.world.random.uniform(0, LOST_LINK_SPREAD_S),
                            self.world.server.post, events.PeerLost(self.link, "timed out"))

    def lose_link(self) -> None:
        """Lose the network between this agent and the coordinator."""
        self._be_missed()
        self.world.schedule(LOST_LINK_S + self.world.random.uniform(0, LOST_LINK_SPREAD_S), self.lose_coordinator,
                            "timed out")

    def take_signal(self, number: int) -> None:
        """Do what a signal does."""
        if self.alive and number == signal.SIGKILL:
            self.world.trace(f"agent {self.number} is killed")
            self._end()
            self.world.on_agent_end(True, 137)
        elif self.alive:
            self.post(events.Signalled(number))

    def _end(self) -> None:
        """End, with the rank; the kernel closes the connections."""
        self.alive, self.gone_s = False, self.world.now
        self.rank.end(signal.SIGKILL)
        if self.number == 0:
            self._leave_others(0.0)
        elif self.is_linked:
            self.send_to_coordinator(events.PeerLost(self.link))

    def _leave_others(self, after_s: float) -> None:
        """Let the other agents lose the coordinator: at once, or when their kernels give up."""
        server = self.world.server.coordinator
        self.world.coordinator_is_lost |= not isinstance(server.phase, Over)
        for other in self.world.agents[1:]:
            if other.is_linked and (delay := self.world.between(self.rank.node, other.rank.node)) is not None:
                self.world.send(("down", other.number), after_s + delay, other.lose_coordinator)
            elif other.is_linked:
                self.world.schedule(after_s + self.world.random.uniform(0, LOST_LINK_SPREAD_S), other.lose_coordinator,
                                    "timed out")

    def lose_coordinator(self, error: str = "") -> None:
        """See the end of the connection."""
        if not self._is_over:
            self.post(events.CoordinatorLost(error))

    def post(self, event: events.AgentEvent) -> None:
        """Pass an event to the logic, and do what it wants; an event that comes meanwhile follows afterwards."""
        self._events.append(event)
        if len(self._events) == 1:
            while self._events:
                if self.alive:
                    self.world.trace(f"agent {self.number} <-", self._events[0])
                    self._do_all(self.watcher.handle(self._events[0], self.world.now))
                self._events.popleft()

    def receive(self, message: CoordinatorToAgent) -> None:
        """Take a message of the coordinator."""
        self._is_over |= isinstance(message, protocol.JobOver)
        if isinstance(message, protocol.Deputy):
            self.world.deputies.add(self.number)
        self.post(events.FromCoordinator(message))

    def send_to_coordinator(self, event: events.CoordinatorEvent) -> None:
        """Pass an event to the coordinator."""
        if self.number == 0:
            self.world.server.post(event)
        elif (delay := self.world.between(self.rank.node, 0)) is not None:
            self.world.send(("up", self.number), delay, self.world.server.post, event)

    def _do_all(self, actions: list[events.AgentAction]) -> None:
        for action in actions:
            if self.alive:
                self._do(action)

    def _do(self, action: events.AgentAction) -> None:
        world, rank = self.world, self.rank
        match action:
            case events.SetTimer(name, after_s):
                self._timers.set(name, after_s)
            case events.CancelTimer(name):
                self._timers.drop(name)
            case events.PrintLine(text):
                world.trace(text)
                world.said.append(text)
            case events.PrintReport(root_cause):
                world.print_report(f"agent {self.number}", rank.node, root_cause)
                self.post(events.Printed())
            case events.ToRank(message):
                world.send(("to rank", self.number), world.random.uniform(*LOCAL_S), rank.receive, message)
            case events.ToCoordinator(message):
                if self.is_linked:
                    self.send_to_coordinator(events.FromPeer(self.link, message))
            case events.CarryOut(protocol.RegisterRank() as request):
                self._join(request.member)
            case events.ObserveRank(protocol.QueryStopped()):
                self._do(events.ToCoordinator(protocol.StoppedStatus(rank.alive and rank.stopped)))
            case events.Exit(status):
                world.trace(f"agent {self.number} exits with {status}")
                self.status = status
                self._end()
                if rank.node not in world.lost_nodes:
                    is_agreed = self._is_over or (self.number == 0 and isinstance(world.server.coordinator.phase, Over))
                    world.on_agent_end(not is_agreed, status)
            case _:
                self._do_to_rank(action)

    def _do_to_rank(self, action: events.AgentAction) -> None:
        world, rank = self.world, self.rank
        match action:
            case events.SignalRank(number):
                world.schedule(0.0001, rank.take_signal, number)
            case events.AgentCommand.REQUEST_END:
                if rank.can_act:
                    world.schedule(world.random.uniform(0.001, 0.3), rank.end, signal.SIGKILL)
            case events.AgentCommand.END_RANK:
                world.schedule(0.0001, rank.end, signal.SIGKILL)
            case events.AgentCommand.CANCEL_STEP if world.launcher.has_step:
                world.signal_agents(0.1, signal.SIGKILL)
            case events.AgentCommand.FINISH_OUTPUT:
                after_s = world.random.choice([0.0001, 0.3])
                world.schedule(after_s, self.post, events.OutputFinished(is_lost=False))
            case events.AgentCommand.END_DESCENDANTS:
                after_s = world.random.choice([0.01, DESCENDANTS_TIMEOUT_S])
                world.schedule(after_s, self.post, events.DescendantsGone())

    def _join(self, member: RankIdentity) -> None:
        self.is_linked = True
        if self.number == 0:
            self.world.server.post(events.OwnRankJoined(OWN_LINK, member))
        else:
            hello = protocol.Hello(member.rank, member.host, member.pid, member.namespace)
            connecting_s = self.world.random.choice([0.001, 0.001, 0.001, MOST_CONNECTING_S])
            self.world.send(("up", self.number), connecting_s, self.world.server.post,
                            events.PeerGreeted(self.link, hello))
            if not self.world.agents[0].alive:
                self.world.schedule(LOCAL_S[0], self.lose_coordinator)


class Server:
    """The coordinator's process, which is that of rank 0's agent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._process = world.agents[0]
        self.coordinator = Coordinator(self._process.config, 0.0)
        self.has_ordered_end = False
        self._timers = Timers(world, self.post)

    def post(self, event: events.CoordinatorEvent) -> None:
        """Pass an event to the logic, and do what it wants."""
        if self._process.alive:
            self.world.trace("coordinator <-", event)
            actions = self.coordinator.handle(event, self.world.now)
            self.has_ordered_end |= isinstance(self.coordinator.phase, Ending)
            for action in sorted(actions, key=is_for_own_watcher):
                self._do(action)

    def _do(self, action: events.CoordinatorAction) -> None:
        world = self.world
        match action:
            case events.ToPeer(link, message) if link == OWN_LINK:
                self._process.receive(message)
            case events.ToPeer(link, message):
                other = world.agents[link]
                if (delay := world.between(0, other.rank.node)) is not None:
                    world.send(("down", link), delay, other.receive, message)
            case events.ToPeers(links, message):
                for link in sorted(links, key=OWN_LINK.__eq__):
                    self._do(events.ToPeer(link, message))
            case events.SetTimer(name, after_s):
                self._timers.set(name, after_s)
            case events.PrintOwnReport(root_cause):
                world.print_report("coordinator", 0, root_cause)
            case events.PrintLine(text):
                world.trace(text)
                world.said.append(text)
            case events.CoordinatorCommand.CHECK_DEADLOCK:
                world.schedule(world.random.uniform(0.2, 2.0), self._post_deadlock)
            case events.CoordinatorCommand.TAKE_SNAPSHOT:
                world.schedule(world.random.uniform(0.2, 2.0), self.post, events.SnapshotTaken(JobActivity()))

    def _post_deadlock(self) -> None:
        """Post whether all ranks that have not finished wait."""
        living = [rank for rank in self.world.ranks if not rank.script_over]
        waits = living and all(rank.waits for rank in living)
        report = Report(NOBODY, "", ReportKind.UNREACHABLE, "others wait in vain", 1)
        self.post(events.DeadlockChecked(report if waits else None))
