"""The agents' meeting point: who gets in, what strangers can do, what a fault of its own does."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from mpiddp.agent.background import BackgroundTasks

from mpiddp.agent import connections, process, watcher
from mpiddp.agent.connections import CoordinatorChannel, send_hello, watch_rank_0
from mpiddp.agent.coordinator_server import CoordinatorServer
from mpiddp.agent.events import (
    CancelTimer,
    Due,
    FromCoordinator,
    FromRank,
    NoCoordinator,
    PrintLine,
    RankGone,
    SetTimer,
    ToRank,
    WatcherEvent,
)
from mpiddp.agent.protocol import (
    Admitted,
    AgentLost,
    CoordinatorToAgent,
    EndDecision,
    Failed,
    Hello,
    Leave,
    ReasonPrinted,
    RegisterRank,
    RegistrationDone,
    StartCoordinator,
    WatchedRank,
    WatchPeerProcess,
)
from mpiddp.base.ranks import RankIdentity
from mpiddp.base.stderr import write_line
from mpiddp.failure.root_cause import RootCause
from mpiddp.ipc import authentication
from mpiddp.ipc.authentication import NONCE_BYTES, PROOF_BYTES, ClientHandshake, authenticate, connect
from mpiddp.ipc.channel import Unreadable, encode, listen
from mpiddp.ipc.event_loop import EventLoop
from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import MPIS, PROGRAMS, ROOT, TWO_NAMES, Mpi, check, mpiexec, need, noise, srun
from tests.test_protocol import BRACKETS, NONSENSE, TOKEN, frame, member, report

pytestmark = pytest.mark.light

STRANGERS = {
    "brackets": BRACKETS, "half-a-token": TOKEN.encode()[:16], "megabyte": b"x" * 2**20, "nothing": b"",
    "another-token": TOKEN[::-1].encode() + BRACKETS, "the-token": TOKEN.encode() + BRACKETS,
}
WATCHED = WatchedRank("rank 0 on n0", True, None, list, False, 60.0)
WAIT_S = 10
SOON_S = 5  # from a fault to the end of its job, on a busy machine


def dial(request: RegisterRank) -> CoordinatorChannel:
    """Connect a member's agent to the coordinator; raise OSError or EOFError if that fails."""
    return send_hello(connect((request.address, request.port), request.token, WAIT_S, WAIT_S), request)


class Meeting:
    """A coordinator with its loop in a thread."""

    def __init__(self) -> None:
        self.excuses: list[Exception] = []
        self.loop = EventLoop(self.excuses.append)
        self._heard: queue.SimpleQueue[WatcherEvent] = queue.SimpleQueue()  # by the watcher of rank 0
        self.office = CoordinatorServer(self.loop, StartCoordinator("127.0.0.1", TOKEN, 2), WATCHED, self._heard.put,
                                        time.monotonic(), BackgroundTasks(self.loop))
        self.office.register_own_rank(member(0))
        self.heard()  # that it is its own neighbour
        self.thread = threading.Thread(target=self.loop.run)

    def heard(self) -> CoordinatorToAgent | Unreadable:
        """Return the next message to rank 0's watcher."""
        event = self._heard.get(timeout=WAIT_S)
        assert isinstance(event, FromCoordinator)
        return event.message

    def end(self) -> None:
        """Let the loop end at the next event."""
        self.loop.stop()
        self.call(b"").close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()

    def join(self, rank: int) -> CoordinatorChannel:
        """Connect the agent of a rank, and return its end when it is admitted."""
        wire = dial(RegisterRank(member(rank), "127.0.0.1", self.office.port, TOKEN))
        assert wire.receive(WAIT_S) == [Admitted()]
        return wire

    def call(self, data: bytes) -> socket.socket:
        """Connect a stranger that says something, and may be turned away before it has."""
        stranger = socket.create_connection(("127.0.0.1", self.office.port), timeout=WAIT_S)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        return stranger


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    one = Meeting()
    one.thread.start()
    yield one
    one.end()


def is_turned_away(stranger: socket.socket) -> bool:
    """Tell whether the other end closes a connection after at most its part of a handshake."""
    heard = b""
    try:
        while data := stranger.recv(100):
            heard += data
    except ConnectionResetError:  # it has not read all
        pass
    return len(heard) in (0, NONCE_BYTES + PROOF_BYTES)


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_turned_away_and_the_ranks_go_on(
    data: bytes, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 0.3)
    with meeting.call(data) as stranger:
        assert is_turned_away(stranger)
    meeting.join(1)
    assert meeting.heard() == WatchPeerProcess(1, os.getpid())
    assert meeting.excuses == []


def test_a_handshake_in_pieces_and_a_hello_behind_it(meeting: Meeting) -> None:
    hello, challenge, shown = encode(Hello(1, "n0", 77, "0")), ClientHandshake(TOKEN), b""
    with meeting.call(challenge.nonce[:5]) as one:
        time.sleep(0.1)
        one.sendall(challenge.nonce[5:])
        while not shown:
            shown = challenge.feed(one.recv(7))
        for piece in (shown[:5], shown[5:] + hello[:3], hello[3:]):
            time.sleep(0.1)
            one.sendall(piece)
        assert meeting.heard() == WatchPeerProcess(1, 77)


def test_who_had_to_wait_for_the_answer_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator may have been stopped, or too busy, between it took the connection and heard what was said."""
    excuses: list[Exception] = []
    admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    loop = EventLoop(excuses.append)
    monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", 0.0)
    door = authentication.AuthListener(loop, listen("127.0.0.1", 0), TOKEN, 2, admitted.put)
    with socket.create_connection(("127.0.0.1", door.port), timeout=WAIT_S) as one:
        proving = threading.Thread(target=authenticate, args=(one, TOKEN, WAIT_S), daemon=True)
        proving.start()
        select.select([door], [], [], WAIT_S)
        door._accept()
        assert select.select(list(door._pending), [], [], WAIT_S)[0]
        monkeypatch.setattr(authentication, "HANDSHAKE_TIMEOUT_S", WAIT_S)
        thread = threading.Thread(target=loop.run, daemon=True)
        thread.start()
        try:
            admitted.get(timeout=WAIT_S).close()
        finally:
            loop.stop()
            socket.create_connection(("127.0.0.1", door.port)).close()
        for other in (thread, proving):
            other.join(WAIT_S)
            assert not other.is_alive()
    assert excuses == []


def test_a_proof_is_good_for_one_connection(meeting: Meeting) -> None:
    """Neither the server's own proof nor one that a client has sent before lets anybody in."""
    challenge = ClientHandshake(TOKEN)
    with meeting.call(challenge.nonce) as one:
        answer = one.recv(100)
        known = challenge.feed(answer)
        one.sendall(answer[NONCE_BYTES:])
        assert one.recv(100) == b""
    with meeting.call(challenge.nonce + known) as one:
        assert is_turned_away(one)
    meeting.join(1)
    assert meeting.heard() == WatchPeerProcess(1, os.getpid())


def test_a_server_that_does_not_know_the_token_is_told_nothing_of_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        dialling = pool.submit(dial, RegisterRank(member(1), "127.0.0.1", port, TOKEN))
        connection, _ = server.accept()
        connection.settimeout(WAIT_S)
        with connection:
            assert len(connection.recv(100)) == NONCE_BYTES
            connection.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
            assert connection.recv(100) == b""
        with pytest.raises(PermissionError, match=re.escape(message("launch/foreign_listener"))):
            dialling.result(WAIT_S)


@pytest.mark.process
def test_a_crowd_of_strangers_does_not_keep_a_agent_out(meeting: Meeting) -> None:
    """All of them are there at once when the entrance looks; the agent may have to call again, as it does then."""
    meeting.loop.stop()
    meeting.call(b"").close()
    meeting.thread.join(WAIT_S)

    def join() -> CoordinatorChannel:
        for _ in range(connections.MAX_RECONNECTS + 1):
            with contextlib.suppress(EOFError, ConnectionError):
                return meeting.join(1)
        raise TimeoutError("the strangers have crowded it out each time")

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        time.sleep(0.2)
        strangers = [meeting.call(b"") for _ in range(3 * (2 * 2 + authentication.SPARE_CONNECTIONS))]
        meeting.loop.stopped = False
        meeting.thread = threading.Thread(target=meeting.loop.run)
        meeting.thread.start()
        wire = joining.result(WAIT_S)
    assert meeting.heard() == WatchPeerProcess(1, os.getpid())
    wire.send(Failed(report(1)))
    assert wire.receive(WAIT_S) == [EndDecision(RootCause(report(1)), 1, abort=True)]
    assert meeting.excuses == []
    for stranger in strangers:
        stranger.close()


def test_two_nodes_of_one_name_watch_their_own_processes(meeting: Meeting) -> None:
    """So do two containers on a node: a process's number is another's there."""
    other = member(1)._replace(namespace="1 pid:[4026531836]")
    wire = dial(RegisterRank(other, "127.0.0.1", meeting.office.port, TOKEN))
    heard: list[CoordinatorToAgent | Unreadable] = []
    while len(heard) < 2:
        heard += wire.receive(WAIT_S)
    assert heard == [Admitted(), WatchPeerProcess(1, os.getpid())]


def test_many_silent_strangers_keep_nobody_out(meeting: Meeting) -> None:
    """The one that has been silent for longest goes."""
    strangers = [meeting.call(b"") for _ in range(2 * 2 + authentication.SPARE_CONNECTIONS + 3)]
    meeting.join(1)
    assert meeting.heard() == WatchPeerProcess(1, os.getpid())
    assert is_turned_away(strangers[0])
    for stranger in strangers:
        stranger.close()


def test_a_coordinator_that_is_out_of_reach_is_told_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    answers: list[tuple[object, str]] = []
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    authentication.Connector(loop, "127.0.0.1", port, TOKEN, "rank 0's agent",
                        lambda *answer: answers.append(answer)).connect()
    loop.set_timer("end", authentication.MAX_ATTEMPTS * authentication.RETRY_INTERVAL_S + 1, loop.stop)
    loop.run()
    (none, error), = answers
    assert none is None
    assert error == message("launch/cannot_connect", server="rank 0's agent", address=f"127.0.0.1:{port}",
                            error=os.strerror(errno.ECONNREFUSED))
    warning = PrintLine(message("launch/no_coordinator", rank=0, host="n0", error=error))

    def rank_without_coordinator() -> watcher.Watcher:
        rank = watcher.Watcher(WATCHED, 0.0)
        rank.handle(FromRank(RegisterRank(member(0), "", 0, "")), 0.5)
        assert rank.handle(NoCoordinator(error), 1.0) == [
            ToRank(RegistrationDone()), SetTimer("no coordinator", watcher.NO_COORDINATOR_WARNING_S)]
        return rank

    rank = rank_without_coordinator()
    assert rank.handle(Due("no coordinator"), 11.0) == [warning]
    assert warning not in rank.handle(FromRank(Failed(report(0))), 12.0)
    failing = rank_without_coordinator()
    assert warning in failing.handle(FromRank(Failed(report(0))), 2.0)
    killed = rank_without_coordinator()
    actions = killed.handle(RankGone(signal.SIGKILL), 2.0)  # perhaps by the launcher, because another rank has failed
    assert CancelTimer("no coordinator") in actions
    assert warning not in actions
    for is_admitted in (False, True):
        early = watcher.Watcher(WATCHED, 0.0)
        early.handle(FromRank(RegisterRank(member(1), "", 0, "")), 0.5)
        if is_admitted:
            early.handle(FromCoordinator(Admitted()), 0.6)
        early.handle(FromRank(Failed(report(1))), 1.0)
        unanswered = PrintLine(message("launch/no_coordinator", rank=0, host="n0",
                                       error=f"no answer within {watcher.DECISION_TIMEOUT_S} s"))
        assert (unanswered in early.handle(Due("decision"), 3.5)) is not is_admitted
        early.handle(FromRank(ReasonPrinted()), 3.6)
        assert [one for one in early.handle(NoCoordinator(error), 6.6) if isinstance(one, PrintLine)] == []
    finished = rank_without_coordinator()
    finished.handle(FromRank(Leave()), 2.0)
    assert finished.handle(Due("no coordinator"), 11.0) == []


@pytest.mark.parametrize("other", [member(1)._replace(pid=1), member(2), member(-1), member(0)],
                         ids=["another-process", "too-high", "negative", "rank-0"])
def test_a_rank_that_cannot_be(other: RankIdentity, meeting: Meeting) -> None:
    first = meeting.join(1)
    meeting.heard()
    with pytest.raises(EOFError):
        dial(RegisterRank(other, "127.0.0.1", meeting.office.port, TOKEN)).receive(WAIT_S)
    first.send(Failed(report(1)))
    assert first.receive(WAIT_S) == [EndDecision(RootCause(report(1)), 1, abort=True)]


def test_a_rank_whose_agent_was_killed_speaks_for_itself(meeting: Meeting) -> None:
    """Nobody takes it for dead, another agent of its node is asked to watch, and its report counts."""
    wire = meeting.join(1)
    meeting.heard()
    wire.send(Hello(1, "n0", os.getpid(), "0"))  # it cannot know whether its agent has said that
    wire.send(AgentLost())
    wire.send(Failed(report(1)))
    assert wire.receive(WAIT_S) == [EndDecision(RootCause(report(1)), 1, abort=True)]


def test_rank_0_is_missed_when_it_ends_and_not_when_its_agent_does() -> None:
    """The port stays open as long as rank 0 has it, and the connection that nobody takes ends with that."""
    ended: list[bool] = []
    loop = EventLoop(lambda error: pytest.fail(str(error)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request = RegisterRank(member(1), "127.0.0.1", listener.getsockname()[1], TOKEN)
        watch_rank_0(loop, request, ended.append)
        loop.set_timer("look", 0.3, lambda: ended.append(False))
        loop.set_timer("end", 0.4, listener.close)
        loop.set_timer("over", 1.0, loop.stop)
        loop.run()
    assert ended == [False, True]
    watch_rank_0(loop, request, ended.append)
    assert ended == [False, True, True]


def test_a_agent_that_begins_with_something_else_is_turned_away(meeting: Meeting) -> None:
    with meeting.call(b"") as older:
        authenticate(older, TOKEN, WAIT_S)
        older.sendall(frame(b'{"rank": 1, "host": "n0", "pid": 77}'))
        assert is_turned_away(older)
    meeting.join(1)
    assert meeting.heard() == WatchPeerProcess(1, os.getpid())
    assert [type(one) for one in meeting.excuses] == [ValueError]


def test_a_peer_that_says_nonsense_is_heard_all_the_same(meeting: Meeting) -> None:
    wire = meeting.join(1)
    for nonsense in NONSENSE.values():
        wire._socket.sendall(frame(nonsense))
    wire.send(Failed(report(1)))
    assert wire.receive(WAIT_S) == [EndDecision(RootCause(report(1)), 1, abort=True)]
    assert [type(error) for error in meeting.excuses] == [ValueError] * len(NONSENSE)


def test_what_raises_again_and_again_is_dropped() -> None:
    """It could be read at once again, and nobody reads it."""
    excuses: list[Exception] = []
    loop = EventLoop(excuses.append)
    ours, its = socket.socketpair()

    def fail() -> None:
        raise ValueError("seven")

    its.send(b"x")
    loop.watch(ours, fail)
    loop.set_timer("fail", 0, fail)
    loop.set_timer("end", 0.2, loop.stop)
    loop.run()
    assert [str(one) for one in excuses] == ["seven"] * 2
    ours.close()
    its.close()


SCARCE = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
from tests.test_agent import WAIT_S, Meeting, WatchPeerProcess
meeting = Meeting()
meeting.thread.start()
strangers = [meeting.call(b"") for _ in range((30 - len(os.listdir("/proc/self/fd"))) // 2 + 1)]
while True:
    try:
        strangers.append(meeting.call(b""))
    except OSError:
        break
strangers.pop().close()  # one descriptor: either for this end or for the other
strangers.append(meeting.call(b""))
before = time.process_time()
time.sleep(1)
assert time.process_time() - before < 0.3
for one in strangers:
    one.close()
meeting.join(1)
assert meeting.heard() == WatchPeerProcess(1, os.getpid())
assert meeting.excuses == []
meeting.end()
"""


@pytest.mark.process
def test_without_descriptors_it_sleeps_until_there_are_some() -> None:
    done = subprocess.run([sys.executable, "-c", SCARCE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    check(done)


def test_strangers_at_the_port_of_a_running_job(quick: Mpi, tmp_path: Path) -> None:
    need(quick.missing())
    script, go = tmp_path / "waits.py", tmp_path / "go"
    script.write_text("import os, sys, time\nprint('READY', flush=True)\n"
                      "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(go.touch)
        job = pool.submit(mpiexec, quick, 2, script, go, env=(mark := processes.marked({})))
        address = port_of_agents(mark)
        limit_s = 2 * authentication.HANDSHAKE_TIMEOUT_S
        strangers = [stack.enter_context(socket.create_connection(address, timeout=limit_s)) for _ in range(200)]
        for data in STRANGERS.values():
            with socket.create_connection(address) as one, contextlib.suppress(ConnectionError):
                one.sendall(data)
        assert all(is_turned_away(stranger) for stranger in strangers)
        time.sleep(watcher.LAUNCHER_KILL_TIMEOUT_S + 1)  # which would end ranks that have lost their coordinator
        assert not job.done()
        go.touch()
        done = check(job.result())
    assert noise(done) == []
    assert done.stdout == "READY\n" * 2


def port_of_agents(mark: dict[str, str]) -> tuple[str, int]:
    """Return where the agent of rank 0 of a job listens; it has a title as soon as it has listened for a second."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for agent, title in beside(mark).items():
            for one in agent.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and title.startswith("mpiddp: agent of rank 0 on "):
                    return one.laddr
        time.sleep(0.1)
    raise TimeoutError("no agent listens")


def beside(mark: dict[str, str]) -> dict[psutil.Process, str]:
    """Return the agents and relays of a job that runs with a mark, and their titles, as far as they have one."""
    (value,) = mark.values()
    found = {process: " ".join(words).strip() for process, words in processes.with_mark(value).items()}
    return {process: title for process, title in found.items() if title.startswith("mpiddp: ")}


def failing(folder: Path, line: str, name: str = "fails.py") -> Path:
    """Return a script that says when its rank 1 fails, at a line, while the others sleep."""
    path = folder / name
    path.write_text("import os, sys, time\nif os.environ['RANK'] == '1':\n"
                    "    print(f'FAULT {time.time()}\\n', end='', file=sys.stderr, flush=True)\n"
                    f"    {line}\ntime.sleep(600)\n")
    return path


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
@pytest.mark.parametrize("line", ["raise ValueError({error})", "sys.exit({error})"], ids=["raise", "exit"])
def test_a_very_long_error_on_one_line(name: str, line: str, tmp_path: Path) -> None:
    """Open MPI 5's prterun forwards a megabyte in a second; on a busy machine the rank's grace would end meanwhile."""
    length = 2_000_000 if name == "mpich" else 300_000
    done = check(mpiexec(MPIS[name], 2, failing(tmp_path, line.format(error=f"'x' * {length}"))), 1)
    ended = time.time()
    said = re.search(r"FAULT ([\d.]+)", done.stderr)
    assert said is not None
    assert ended - float(said[1]) < SOON_S
    assert "x" * length in done.stderr
    (report,) = find("launch/failed_rank", done.stderr)
    assert re.search(r"xxx \.\.\. .* characters left out. \.\.\. xxx", report["cause"])
    assert len(report["cause"]) < 3000


def test_a_line_of_a_agent_that_is_no_text(capfd: pytest.CaptureFixture[str]) -> None:
    write_line("odd-\udcff.py\n")
    assert capfd.readouterr().err == "odd-?.py\n"


def test_a_script_whose_name_is_no_text(quick: Mpi, tmp_path: Path) -> None:
    path = failing(tmp_path, "raise ValueError('\\udc80')", os.fsdecode(b"odd-\xff.py"))
    done = check(mpiexec(quick, 2, path), 1)
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
    assert re.search(r"where +\S+odd-\?\.py:4 <module>\n", done.stderr), done.stderr


@pytest.mark.alone
def test_a_package_that_is_missing_everywhere(quick: Mpi) -> None:
    done = check(mpiexec(quick, 4, PROGRAMS / "lacks_package.py"), 1)
    assert done.stderr.count("Traceback (most recent call last)") == done.stderr.count("mpiddp: failed: ") == 1
    assert f"  others   {message('launch/same_error_everywhere', number=4)}\n" in done.stderr


@pytest.mark.thorough("a package that is missing everywhere")
def test_a_package_that_is_missing_on_a_node(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", PROGRAMS / "lacks_package.py", "node2"), 1)
    (report,) = find("launch/failed_rank", done.stderr, host="node2")
    assert report["cause"].startswith("ModuleNotFoundError: ")
    assert f"  others   {message('launch/same_error_on_nodes', number=2, hosts='node2')}\n" in done.stderr


SHOWS_MODULES = """
import os, signal, sys
def show(*_):
    path = f"{os.environ['SHOWN']}/{os.getpid()}"
    with open(path + ".part", "w") as file:
        file.write(" ".join(sys.modules))
    os.rename(path + ".part", path)
signal.signal(signal.SIGRTMIN, show)
"""  # in sitecustomize.py; who is forked has the handler too


@pytest.mark.torch
def test_a_running_agent_and_a_running_relay_have_neither_torch_nor_mpi(quick: Mpi, tmp_path: Path) -> None:
    """Their ranks have both: so the look would see them."""
    need(quick.missing())
    (tmp_path / "sitecustomize.py").write_text(SHOWS_MODULES)
    script, go = tmp_path / "waits.py", tmp_path / "go"
    script.write_text("import os, sys, time\nname = sys.argv[1] + os.environ['RANK']\n"
                      "with open(name + '.part', 'w') as file:\n    file.write(str(os.getpid()))\n"
                      "os.rename(name + '.part', name)\nwhile not os.path.exists(sys.argv[1]):\n    time.sleep(0.05)\n")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
        stack.callback(go.touch)
        job = pool.submit(mpiexec, quick, 2, "--prefix", "--stop-before=1", "--log-dir", tmp_path / "logs", script, go,
                          env={"PYTHONPATH": str(tmp_path), "SHOWN": str(tmp_path), **(mark := processes.marked({}))})
        await_files(tmp_path / "go0", tmp_path / "go1")
        deadline = time.monotonic() + 30
        while len(titles := beside(mark)) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        looks = [look_into(one, tmp_path) for one in titles]
        threads = [one.num_threads() for one in titles]
        ranks = [look_into(psutil.Process(int(path.read_text())), tmp_path)
                 for path in (tmp_path / "go0", tmp_path / "go1")]
        go.touch()
        check(job.result())
    assert sorted(title.partition(" on ")[0] for title in titles.values()) == [
        f"mpiddp: {what} of rank {rank}" for what in ("agent", "output") for rank in (0, 1)]
    assert [(look.foreign, look.libraries) for look in ranks] == [({"torch", "mpi4py"}, {"torch", "mpi"})] * 2
    assert [(look.foreign, look.libraries) for look in looks] == [(set(), set())] * 4
    assert threads == [1] * 4
    assert ["mpiddp.agent.watcher" in look.modules for look in looks] == [
        title.startswith("mpiddp: agent") for title in titles.values()]
    assert all("mpiddp.output.forwarder" in look.modules for look in looks)


class Look(NamedTuple):
    """What a process has loaded."""

    modules: set[str]
    foreign: set[str]
    libraries: set[str]


def look_into(process: psutil.Process, folder: Path) -> Look:
    """Return what a process has loaded, in Python and by the dynamic linker."""
    process.send_signal(signal.SIGRTMIN)
    shown = folder / str(process.pid)
    await_files(shown)
    modules = set(shown.read_text().split())
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return Look(modules, {"torch", "mpi4py"} & modules, set(re.findall(r"/lib(torch|mpi)[^/\n]*\.so", maps)))


def await_files(*paths: Path) -> None:
    """Return when all of these files are there."""
    deadline = time.monotonic() + 60
    while missing := [path for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.05)


IMPORTS_ALL = """
import importlib, pkgutil, sys
import mpiddp.agent, mpiddp.output.forwarder
for one in pkgutil.iter_modules(mpiddp.agent.__path__, "mpiddp.agent."):
    importlib.import_module(one.name)
print(*sys.modules)
"""


@pytest.mark.process
def test_no_module_of_a_agent_imports_torch_or_mpi() -> None:
    """Some of them are imported only when the rank ends."""
    done = subprocess.run([sys.executable, "-c", IMPORTS_ALL], cwd=ROOT, capture_output=True, text=True, timeout=60)
    modules = set(check(done).stdout.split())
    assert {"mpiddp.output.forwarder", "mpiddp.agent.watcher", "mpiddp.agent.process_cleanup"} <= modules
    assert not modules & {"torch", "mpi4py"}


def test_where_something_went_wrong_is_told_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may have no descriptor left for it."""
    monkeypatch.setitem(sys.modules, "traceback", None)
    try:
        int("x")
    except ValueError as error:
        assert re.fullmatch(rf"{re.escape(__file__)}:\d+ test_where_something_.*", process.location_of(error))
