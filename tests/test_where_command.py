"""Where the ranks of a running job are: by the command, and by --stall."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from mpiddp.base.files import user_folder
from mpiddp.base.version import __version__
from mpiddp.ipc.authentication import NONCE_BYTES, ServerHandshake
from mpiddp.ipc.channel import encode
from mpiddp.where import client, registry
from mpiddp.where.protocol import SnapshotReply
from mpiddp.where.registry import JobEndpoint, read_endpoints
from mpiddp.where.sampler import INSTALL_HINT, try_reap
from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN, ip, namespace
from tests.faults.matrix import LAUNCHERS, Launcher
from tests.faults.test_signals import Job, started
from tests.hangs.test_hangs import ZOO
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    ROOT,
    VENVS,
    Done,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    on_path,
)

pytestmark = pytest.mark.light

WHERE = ("-m", "mpiddp.where")
ABSENT = "  " + message("where/not_in_collective", ranks="rank 1 is", collective="all_reduce")
SIX = [replace(launcher, whole=True) for launcher in LAUNCHERS]
CARD = JobEndpoint("mpiddp-1234abcd", "", False, "", socket.gethostname(), "127.0.0.1", 1, "secret", 4, __version__,
                   "train.py", time.mktime((2026, 11, 28, 20, 0, 0, 0, 0, -1)))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the environment with a state folder of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return {"XDG_STATE_HOME": str(tmp_path)}


def refused(quick: Mpi, state: dict[str, str], *arguments: str) -> str:
    """Return the one line with which a request is refused."""
    done = check(alone(quick, *WHERE, *arguments, env=state), 1)
    assert done.stdout == ""
    assert done.stderr.startswith("mpiddp.where: ")
    return done.stderr.removeprefix("mpiddp.where: ").rstrip("\n")


def test_no_job(quick: Mpi, state: dict[str, str]) -> None:
    assert refused(quick, state) == message("where/no_job")
    assert refused(quick, state, "48211") == message("where/no_such_job", job=48211)


def test_a_job_that_was_killed_is_forgotten(quick: Mpi, state: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    registry.write_endpoint(CARD._replace(port=port))
    (file,) = Path(registry.registry_folder()).iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert refused(quick, state) == message("where/job_killed", job=CARD.run_id)
    assert not file.exists()


def test_a_job_is_found_where_the_users_group_may_write_above_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                       ) -> None:
    """As a umask of 002 leaves folders, and so do sites at which home folders are a group's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".local/state"))
    before = os.umask(0o002)
    try:
        (tmp_path / ".local/state").mkdir(parents=True)
        registry.write_endpoint(CARD)
    finally:
        os.umask(before)
    assert list(read_endpoints().values()) == [CARD]
    assert Path(registry.registry_folder()).stat().st_mode & 0o777 == 0o700


def test_a_job_of_another_version(quick: Mpi, state: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        registry.write_endpoint(CARD._replace(version="0.0.1", port=server.getsockname()[1]))
        assert refused(quick, state) == message("where/other_version", version="0.0.1", own=__version__)


def test_a_port_that_is_somebody_elses_by_now(quick: Mpi, state: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        def turn_away() -> None:
            connection, _ = server.accept()
            connection.close()

        threading.Thread(target=turn_away, daemon=True).start()
        registry.write_endpoint(CARD._replace(port=server.getsockname()[1]))
        assert refused(quick, state) == message("where/job_ended_or_agent_killed", job=CARD.run_id)


def test_a_network_that_cannot_be_reached_from_here(state: dict[str, str]) -> None:
    """The token of a job that listens on another node's loopback interface is sent to nobody here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        card = CARD._replace(number="48211", by_slurm=True, host="n005", port=server.getsockname()[1])
        with pytest.raises(client.UnansweredError) as caught:
            client.request_snapshot(card)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert str(caught.value) == message(
        "where/unreachable_job", job=48211, address="127.0.0.1", host="n005", reason="loopback interface",
        run_id=CARD.run_id)


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve whoever connects, each by a thread of its own, and return the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def accept() -> None:
            with suppress(OSError):  # closed
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

        def serve_one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                connection.settimeout(DEADLINE_S)
                serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def answer_as_job(connection: socket.socket, picture: str = "") -> None:
    """Prove to know the token of CARD; answer a question by a picture."""
    response = ServerHandshake(CARD.token)
    while not response.is_authenticated:
        connection.sendall(response.feed(connection.recv(response.missing_bytes)))
    if connection.recv(1000):
        connection.sendall(encode(SnapshotReply(picture)))


def test_which_of_several(state: dict[str, str]) -> None:
    """Jobs that were killed are forgotten."""
    names = [f"mpiddp-{number}234abcd" for number in range(4)]
    with listening(answer_as_job) as port:
        for name in names:
            registry.write_endpoint(CARD._replace(run_id=name, port=port if name in names[:2] else 1))
        assert client.find_endpoint("mpiddp-3").run_id == names[3]
        assert len(read_endpoints()) == 4
        assert several_jobs("") == set(names[:2])
        assert sorted(card.run_id for card in read_endpoints().values()) == names[:2]
        registry.remove_file(registry.endpoint_path(CARD._replace(run_id=names[0])))
        registry.write_endpoint(CARD._replace(run_id=names[3]))
        assert client.find_endpoint("").run_id == names[1]
    for name in names:
        registry.write_endpoint(CARD._replace(run_id=name))
    with pytest.raises(client.UnansweredError, match=message("where/no_job")):
        client.find_endpoint("")
    assert read_endpoints() == {}


def several_jobs(job: str, answer: bool = True, host: str = CARD.host) -> set[str]:
    """Return the jobs that a refused request lists; the name that it proposes is that of one alone."""
    with pytest.raises(client.UnansweredError) as caught:
        client.find_endpoint(job)
    known = {"job": job} if job else {}
    matches = "where/several_matches" if answer else "where/silent_matches"
    jobs = "where/several_jobs" if answer else "where/silent_jobs"
    (refusal,) = find(matches if job else jobs, str(caught.value), **known)
    rows = [re.split("  +", line.strip()) for line in str(caught.value).splitlines()[1:]]
    assert rows[0] == ["job", "script", "host", "started"]
    assert refusal["number"] == str(len(rows) - 1)
    assert {tuple(row[1:]) for row in rows[1:]} == {("train.py", host, "2026-11-28 20:00")}
    client.find_endpoint(refusal["proposed"])
    return {row[0] for row in rows[1:]}


def test_jobs_that_were_killed_on_another_host_do_not_count_as_running(state: dict[str, str]) -> None:
    """Nobody listens on their ports any more; from here a firewall looks the same."""
    for name in ("mpiddp-1", "mpiddp-2"):
        registry.write_endpoint(CARD._replace(run_id=name, host="n005"))
    assert several_jobs("", answer=False, host="n005") == {"mpiddp-1", "mpiddp-2"}
    with listening(answer_as_job) as port:
        registry.write_endpoint(CARD._replace(port=port))
        assert client.find_endpoint("").run_id == CARD.run_id


def test_a_job_without_a_scheduler_shows_its_name(quick: Mpi, state: dict[str, str]) -> None:
    """By that name and by its script the list shows it; with a scheduler, the number is known."""
    waits = "from mpiddp.where.registry import read_endpoints as read\nwhile not (found := read()): pass\nprint(found)"
    done = check(mpiexec(quick, 1, "-c", waits, env=state))
    (name,) = re.findall(r"^mpiddp \S+: 1 rank on 1 node, .*, job (mpiddp-\w+)$", done.stderr, re.MULTILINE)
    assert f"run_id='{name}'" in done.stdout
    assert "script='-c'" in done.stdout
    numbered = check(mpiexec(quick, 1, "-c", "pass", env={**state, "PBS_JOBID": "5.pbs"}))
    assert "mpiddp-" not in numbered.stderr


def test_a_job_that_cannot_be_seen_from_here_is_named(quick: Mpi, state: dict[str, str]) -> None:
    """It may be the one that hangs; a job that is over is not named."""
    with listening(partial(answer_as_job, picture=json.dumps({**json.loads(HUGE), "groups": []}))) as port:
        registry.write_endpoint(CARD._replace(port=port))
        registry.write_endpoint(CARD._replace(run_id="mpiddp-7038e271", number="2", host="n005"))
        registry.write_endpoint(CARD._replace(run_id="mpiddp-over", port=1))
        done = check(alone(quick, *WHERE, env=state))
        assert check(alone(quick, *WHERE, CARD.run_id, env=state)).stderr == ""
    assert done.stderr == "mpiddp.where: " + message(
        "where/unseen_jobs", jobs="2 (mpiddp-7038e271) on n005", proposed="2") + "\n"


def test_silent_jobs_are_asked_side_by_side(state: dict[str, str]) -> None:
    with listening(lambda _: time.sleep(DEADLINE_S)) as silent, listening(answer_as_job) as port:
        for number in range(99):
            registry.write_endpoint(CARD._replace(run_id=f"mpiddp-{number}", port=silent))
        registry.write_endpoint(CARD._replace(run_id="mpiddp-live", port=port))
        began_s = time.monotonic()
        assert client.find_endpoint("").run_id == "mpiddp-live"
        assert time.monotonic() - began_s < 50 * client.PROBE_TIMEOUT_S
        assert len(read_endpoints()) == 100


def test_a_card_that_nobody_answers_for_is_forgotten_in_the_end(state: dict[str, str]) -> None:
    """When it is older than any job, or than what runs on this host."""
    with listening(lambda _: time.sleep(DEADLINE_S)) as silent:
        for number, (host, age_s) in enumerate([("n005", 0.0), ("n005", 40 * 86400.0), (CARD.host, 1e9)]):
            registry.write_endpoint(card := CARD._replace(run_id=f"mpiddp-{number}", host=host, port=silent))
            os.utime(registry.endpoint_path(card), (time.time() - age_s,) * 2)
        assert client.find_endpoint("").run_id == "mpiddp-0"
        assert [card.run_id for card in read_endpoints().values()] == ["mpiddp-0"]


def test_slurm_tells_which_jobs_are_over(cluster: Cluster, quick: Mpi, state: dict[str, str]) -> None:
    """Of jobs that cannot be seen from the login node."""
    env = {**quick.environ(), **state}
    held = check(cluster.run("sbatch", "--parsable", "--hold", "--wrap=true", timeout=30, cwd=ROOT)).stdout.strip()
    for number in (held, "99999998", "99999999"):
        registry.write_endpoint(CARD._replace(run_id=f"mpiddp-{number}", number=number, by_slurm=True, host="n005"))

    def asked_for() -> str:
        return check(cluster.run(str(quick.python), *WHERE, timeout=DEADLINE_S, env=env, cwd=ROOT), 1).stderr

    assert find("where/unreachable_job", asked_for(), job=held, address="127.0.0.1", host="n005")
    check(cluster.run("scancel", held, timeout=30))
    assert asked_for() == f"mpiddp.where: {message('where/no_job')}\n"


def test_who_has_the_port_of_a_dead_job_learns_nothing(quick: Mpi, state: dict[str, str]) -> None:
    heard: list[bytes] = []

    def pretend(connection: socket.socket) -> None:
        heard.append(connection.recv(1000))
        connection.sendall(b"x" * 48 + encode(SnapshotReply(HUGE)))
        while heard[-1]:
            heard.append(connection.recv(1000))

    with listening(pretend) as port:
        registry.write_endpoint(CARD._replace(port=port))
        assert refused(quick, state) == message("where/job_killed", job=CARD.run_id)
    assert len(b"".join(heard)) == NONCE_BYTES
    assert read_endpoints() == {}


GROUP = {"at": "busy", "place": "", "collective": "", "hosts": ["n0"], "odd": False, "sequence": None}
HUGE = json.dumps({"step": "", "findings": [], "threads": {}, "groups": [{**GROUP, "ranks": [[0, 10**11]]}]})


@pytest.mark.parametrize("ranks", [[[0, 10**11]], [[0, 3], [0, 3]], [[-9, 0]], [[3, 0]], [[0.0, 1.0]], [["0", "1"]],
                                   [7]])
def test_an_answer_that_cannot_be_is_not_expanded(ranks: list[object], state: dict[str, str]) -> None:
    text = json.dumps({**json.loads(HUGE), "groups": [{**GROUP, "ranks": ranks}]})
    words = message("where/unreadable_answer", job=CARD.run_id)
    with listening(partial(answer_as_job, picture=text)) as port, pytest.raises(client.UnansweredError, match=words):
        client.request_snapshot(CARD._replace(port=port))


@pytest.mark.parametrize("change", [{"port": "80"}, {"port": 2**16}, {"address": "n[0-99999999]"}, {"ranks": -1},
                                    {"token": None}, {"host": 7}, {"more": 1}])
def test_a_card_that_cannot_be_is_left_out(change: dict[str, object], state: dict[str, str]) -> None:
    registry.write_endpoint(CARD)
    (path,) = read_endpoints()
    Path(path).write_text(json.dumps({**CARD._asdict(), **change}))
    assert read_endpoints() == {}


@pytest.mark.process
def test_steps_of_one_job(state: dict[str, str]) -> None:
    for step in "01":
        registry.write_endpoint(
            CARD._replace(run_id=f"mpiddp-{step}", number="48211", by_slurm=True, step=step, host="n005"))
    assert [client.find_endpoint(f"48211.{step}").name for step in "01"] == ["48211", "48211.1"]
    assert several_jobs("48211", answer=False, host="n005") == {"48211 (mpiddp-0)", "48211.1 (mpiddp-1)"}


def test_something_else_in_the_folder(quick: Mpi, state: dict[str, str]) -> None:
    Path(registry.registry_folder()).mkdir(parents=True)
    Path(registry.registry_folder(), "notes.txt").write_text("milk")
    Path(registry.registry_folder(), "notes.json").write_text("{}")
    Path(registry.registry_folder(), "lost.json").symlink_to("nowhere")
    assert refused(quick, state) == message("where/no_job")


def answers_here() -> bool:
    """Ask the job that runs, and tell whether it has answered."""
    try:
        return bool(client.request_snapshot(client.find_endpoint(""))[0].groups)
    except client.UnansweredError:
        return False


@contextmanager
def asked(pause_s: float, path: Path, answers_now: Callable[[], bool] = answers_here) -> Iterator[list[int]]:
    """Ask the job that runs again and again, as long as the block lasts; count the answers, at three make a file."""
    over, answers = threading.Event(), [0]

    def ask() -> None:
        while not over.wait(pause_s):
            answers[0] += answers_now()
            if answers[0] >= 3:
                path.touch()

    thread = threading.Thread(target=ask)
    thread.start()
    yield answers
    over.set()
    thread.join()


ODD_CHILDREN = """
import os, subprocess, sys, torch, torch.distributed as dist
names = [b"a\\xc2\\x85b\\rc", b"d\\xe2\\x80\\xa8e\\nf", b"g\\xff) R 1"]
folder = os.fsencode(sys.argv[1])
if dist.get_rank() == 0:
    dist.barrier()
else:
    for name in names:
        os.symlink("/bin/sleep", os.path.join(folder, name))
    dist.barrier()
    children = [subprocess.Popen([os.path.join(folder, name), "600"]) for name in names]
    children[0].wait()
dist.all_reduce(torch.ones(1))
"""


def test_children_whose_names_break_lines(quick: Mpi, state: dict[str, str], tmp_path: Path) -> None:
    (script := tmp_path / "odd.py").write_text(ODD_CHILDREN)
    with started(LAUNCHERS[2], None, script, tmp_path, env=state):
        deadline = time.monotonic() + DEADLINE_S
        while "its child: g" not in (done := alone(quick, *WHERE, env=state)).stdout and time.monotonic() < deadline:
            time.sleep(0.3)
        shown = check(done).stdout
        for name in ("a?b?c", "d?e?f", "g\N{REPLACEMENT CHARACTER}) R 1"):
            assert f"its child: {name} " in shown
        assert find("where/not_in_collective", shown, collective="all_reduce")


@pytest.mark.parametrize(("path", "where"), [
    (f"{VENVS / 'base/bin'}:/usr/bin:/bin", r"zoo\.py:\d+ train → zoo\.py:\d+ sleep_in_native_code"),
    ("/usr/bin:/bin", message("where/native_code"))], ids=["py-spy", "without"])
def test_a_rank_whose_interpreter_native_code_holds(path: str, where: str, quick: Mpi, state: dict[str, str]) -> None:
    with started(LAUNCHERS[2], None, ZOO, "native", env={**state, "PATH": path}) as job:
        job.await_ready(2)
        deadline = time.monotonic() + DEADLINE_S
        while not re.search(where, (done := alone(quick, *WHERE, env=state)).stdout) and time.monotonic() < deadline:
            time.sleep(0.3)
        _, outlier, waiting, *findings = check(done).stdout.splitlines()
        assert re.match(rf"  1 rank +1 .* outlier +.*{where}", outlier), done.stdout
        assert re.match(r"  1 rank +0 .* waiting +zoo.py:", waiting)
        assert findings[0] == ABSENT
        hidden = ["  " + message("where/native_stack_hidden", ranks="rank 1", reason=INSTALL_HINT)]
        assert findings[1:] == (hidden if where == message("where/native_code") else [])
        assert job.process.poll() is None


@pytest.mark.thorough("stacks of main threads")
def test_threads(quick: Mpi, state: dict[str, str]) -> None:
    """Both threads of a dead-lock are shown, where py-spy is on the path of the job, and else how to get it."""
    for path, threads in ((f"{VENVS / 'base/bin'}:/usr/bin:/bin", ["take_second", "lock_against_each_other.<locals>"]),
                          ("/usr/bin:/bin", [INSTALL_HINT])):
        with started(SIX[2], None, ZOO, "lock", env={**state, "PATH": path}) as job:
            job.await_ready(SIX[2].ranks)
            while "outlier" not in alone(quick, *WHERE, env=state).stdout:
                time.sleep(0.3)
            done = check(alone(quick, *WHERE, "--threads", env=state))
        shown = done.stdout[done.stdout.index("rank 1:\n"):]
        assert all(one in shown for one in threads), shown
        assert "rank 0:" not in shown


@pytest.mark.long
@pytest.mark.torch
def test_asking_changes_nothing(quick: Mpi, state: dict[str, str], tmp_path: Path) -> None:
    """The weights are the same to the bit, of a training whose ranks fork DataLoader workers and programs.

    It continues, so that --stall reports nothing.
    """
    alone_ = check(mpiexec(quick, 2, PROGRAMS / "weights.py", env=state)).stdout
    with asked(0.05, path := tmp_path / "asked") as answers:
        watched = check(mpiexec(quick, 2, "--stall=1", PROGRAMS / "weights.py", path, env=state))
    assert watched.stdout == alone_
    assert find("where/no_progress", watched.stderr) == []
    assert len(alone_.splitlines()) == 2
    assert answers[0] >= 3


FINDS_CARD = """
import glob, os, time
deadline = time.monotonic() + 30
while not (found := glob.glob(os.environ["HOME"] + "/.local/state/mpiddp/*.json")) and time.monotonic() < deadline:
    time.sleep(0.1)
print(len(found))
"""


def test_a_state_folder_that_is_not_absolute_does_not_count(quick: Mpi, tmp_path: Path) -> None:
    """What is beside the rank stands in another folder than the rank."""
    name = f"mpiddp-tests-{os.getpid()}"
    try:
        done = check(mpiexec(quick, 1, "--no-init", "-c", FINDS_CARD, cwd=tmp_path,
                             env={"XDG_STATE_HOME": name, "HOME": str(tmp_path), **on_path(ROOT)}))
        assert done.stdout == "1\n"
        assert not Path("/", name).exists()
        assert not (tmp_path / name).exists()
    finally:
        shutil.rmtree(f"/{name}", ignore_errors=True)


@pytest.mark.parametrize("variable", ["XDG_STATE_HOME", "XDG_CACHE_HOME"])
def test_the_users_folders(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_folder({variable: "/state"}, variable, ".local", "state") == "/state/mpiddp"
    for relative in ({}, {variable: ""}, {variable: "state"}, {variable: "./state"}):
        assert user_folder(relative, variable, ".local", "state") == "/home/me/.local/state/mpiddp"
    monkeypatch.setenv("HOME", "me")
    with pytest.raises(NotADirectoryError):
        Path(user_folder({}, variable, ".local", "state")).mkdir(parents=True)


@pytest.mark.torch
@pytest.mark.thorough("test_asking_changes_nothing on one node")
def test_asking_changes_nothing_on_three_nodes(cluster: Cluster) -> None:
    env = {"XDG_STATE_HOME": f"{RUN}/state"}

    def digests(*arguments: object) -> list[str]:
        with started(SIX[3], cluster, "--quiet", PROGRAMS / "weights.py", *arguments, env=env) as job:
            return [line for line in job.output().splitlines() if " steps, " in line]

    def answers_there() -> bool:
        return all("6 ranks" in ask_from(cluster, SIX[3], host, env).stdout for host in ("login", "node3"))

    alone_ = digests()
    with asked(0.1, path := RUN / "asked", answers_there) as answers:
        assert digests(path) == alone_
    assert len(alone_) == 6
    assert answers[0] >= 3


def test_a_deep_stack_in_a_folder_with_an_umlaut(quick: Mpi, state: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "Jürgens 数据"
    folder.mkdir()
    (folder / "deep.py").write_text(
        "import os, time\nimport torch.distributed as dist\ndef deeper(depth):\n    if depth:\n"
        "        deeper(depth - 1)\n    else:\n"
        "        print('READY\\n', end='', flush=True); time.sleep(100 * int(os.environ['RANK']))\n"
        "dist.barrier()\ndeeper(70)\ndist.barrier()\n")
    with started(LAUNCHERS[2], None, folder / "deep.py", env=state) as job:
        job.await_ready(2)
        deadline = time.monotonic() + DEADLINE_S
        while not (read_endpoints() and "barrier" in collectives()):  # rank 0 is on its way there
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for _ in range(5):
            found, _ = client.request_snapshot(client.find_endpoint(""))
            outlier, waiting = found.groups
            assert outlier.ranks == (1,)
            assert outlier.location.line.startswith("deep.py:9 <module> → … → deep.py:5 deeper → deep.py:7 deeper")
            assert waiting.location.collective == "barrier"


def collectives() -> list[str]:
    """Ask the job that runs, and return the collectives in which its ranks are."""
    return [group.location.collective for group in client.request_snapshot(client.find_endpoint(""))[0].groups]


def test_a_hang_is_reported_and_ends_the_job(quick: Mpi, state: dict[str, str]) -> None:
    done = mpiexec(quick, 2, "--stall=4", "--stall-abort", ZOO, "python", env=state)
    assert done.returncode != 0
    printed, cause = find("where/no_progress", done.stderr)
    assert cause["time"].partition("; ")[0] == printed["time"]
    assert re.fullmatch(r"\d+(\.\d)? s", printed["time"])
    hang = message("where/no_progress", **printed)
    table = done.stderr.partition(f"mpiddp: {hang}\n")[2].splitlines()
    assert re.fullmatch(r"  1 rank +1 +\S+ +outlier +zoo\.py:\d+ <module> → zoo\.py:\d+ train → zoo\.py:\d+ "
                        r"sleep_in_python( → \w+\(\))?", table[0]), table
    assert table[2] == ABSENT
    assert re.fullmatch(rf"mpiddp: failed: rank 1 on \S+: {re.escape(hang)}; {ABSENT.strip()}", table[3])
    assert "  status   124" in table


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize("launcher", first_of([
    LAUNCHERS[2], SIX[3], SIX[4], Launcher("Intel MPI mpiexec", MPIS["impi"], False)]), ids=lambda one: one.name)
def test_a_sigquit_asks_and_ends_nothing(
    launcher: Launcher, state: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Hydra passes it on; srun and Open MPI's mpirun end by it, and Slurm sends it otherwise.

    Then MPICH's job is ended by SIGINT, and says where it was.
    """
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    with started(launcher, cluster, ZOO, "python", env=state) as job:
        job.await_ready(launcher.ranks)
        time.sleep(1)  # in which rank 1 has come to where it sleeps
        if cluster is None:
            job.process.send_signal(signal.SIGQUIT)
        else:
            cluster.run("scancel", "--signal=QUIT", "--user=root", timeout=30)
        table = table_after(job, message("launch/sigquit") + "\n")
        assert re.match(r"  1 rank +1 .* outlier +zoo.py:", table[0])
        time.sleep(2)
        assert job.process.poll() is None
        if launcher.mpi.name == "mpich":
            job.process.send_signal(signal.SIGINT)
            check_interrupted(job.output().splitlines())


def check_interrupted(lines: list[str]) -> None:
    """Fail unless a job of two ranks that was ended by SIGINT says where it was."""
    begin = next(at for at, line in enumerate(lines) if find("launch/outside_signal", line, signal="SIGINT"))
    assert re.match(r"  1 rank +1 .* outlier +zoo.py:\d+ sleep_in_python$", lines[begin + 1])
    assert re.match(r"  1 rank +0 .* waiting +zoo.py:", lines[begin + 2])
    assert lines[begin + 3] == ABSENT


@pytest.mark.torch
@pytest.mark.thorough("test_a_sigquit_asks_and_ends_nothing, whose job SIGINT ends")
def test_a_sigint_to_a_job_whose_ranks_are_all_in_a_collective(quick: Mpi, state: dict[str, str]) -> None:
    """No rank can obey it, and the launcher waits for a second one."""
    with started(SIX[2], None, ZOO, "network", env=state) as job:
        job.await_ready(SIX[2].ranks)
        time.sleep(1)
        job.process.send_signal(signal.SIGINT)
        table = table_after(job, message("launch/sigint_blocked") + "\n")
    assert re.match(r"  4 ranks +0-3 .* waiting +zoo.py:", table[0])


def table_after(job: Job, head: str) -> list[str]:
    """Return the lines of a table that a running job prints below a line."""
    assert job.process.stdout
    lines: list[str] = []
    for line in job.process.stdout:
        if line == head or lines:
            lines.append(line)
        if lines and (find("where/not_in_collective", line) or find("where/all_in_collective", line)):
            return lines[1:]
    raise AssertionError(f"the job has ended without {head}")


@pytest.mark.torch
@pytest.mark.thorough("test_a_sigquit_asks_and_ends_nothing, whose job SIGINT ends")
def test_a_timeout_names_the_rank_that_was_waited_for(quick: Mpi, state: dict[str, str]) -> None:
    done = mpiexec(quick, 3, "--group-timeout=4", ZOO, "python", env=state)
    report = done.stderr[done.stderr.index("mpiddp: failed: "):].splitlines()
    (failed,) = find("launch/failed_rank", report[0], rank=1)
    (late,) = find("launch/late_rank", failed["cause"])
    assert late["ranks"] in ("rank 0", "rank 2", "2 ranks")
    assert re.fullmatch(r"\S+zoo.py:\d+ train", late["call"])
    assert re.match(r"  where    zoo.py:\d+ <module> → zoo.py:\d+ train → zoo.py:\d+ sleep_in_python", report[1])


@pytest.mark.torch
@pytest.mark.parametrize("launcher", first_of([LAUNCHERS[3], SIX[4]]), ids=lambda one: one.name)
def test_a_job_of_three_nodes_answers(launcher: Launcher, cluster: Cluster) -> None:
    """From the login node, and from a node of the job."""
    env = {"XDG_STATE_HOME": f"{RUN}/state"}
    with started(launcher, cluster, ZOO, "python", env=env) as job:
        job.await_ready(launcher.ranks)
        for host in ("login", "node3"):
            done = hanging(job, cluster, launcher, host, env)
            head, outlier, waiting, finding = done.stdout.splitlines()
            others, count, where = ("0,2-5", 5, r"node\[1-3\]") if launcher.whole else ("0,2", 2, r"node\[1,3\]")
            assert re.fullmatch(rf"job \d+, {launcher.ranks} ranks", head)
            assert re.match(rf"  1 rank +1 +node{1 if launcher.whole else 2} +outlier +zoo.py:", outlier), outlier
            assert re.match(rf"  {count} ranks +{others} +{where} +waiting +zoo.py:", waiting), waiting
            assert finding == ABSENT
        records = json.loads(ask_from(cluster, launcher, "login", env, "--json").stdout)
        assert [one["ranks"] for one in records["groups"] if one["odd"]] == [[[1, 1]]]


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize("launcher", first_of([
    LAUNCHERS[1], LAUNCHERS[4], LAUNCHERS[0], Launcher("Intel MPI mpiexec", MPIS["impi"], False)], 2),
    ids=lambda one: one.name)
def test_a_job_that_makes_steps_answers(
    launcher: Launcher, state: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """Other tests ask under MPICH's mpiexec and under srun with pmix."""
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    env = {"XDG_STATE_HOME": f"{RUN}/state"} if cluster else state
    with started(launcher, cluster, ZOO, "none", env=env) as job:
        job.await_ready(launcher.ranks)
        deadline = time.monotonic() + DEADLINE_S
        while f", {launcher.ranks} ranks\n" not in (
                ask_from(cluster, launcher, "node1", env) if cluster else alone(launcher.mpi, *WHERE, env=env)).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.3)


@pytest.mark.torch
def test_a_node_that_is_out_of_reach(cluster: Cluster) -> None:
    env = {"XDG_STATE_HOME": f"{RUN}/state"}
    with started(LAUNCHERS[3], cluster, ZOO, "none", env=env) as job:
        job.await_ready(3)
        while "3 ranks" not in ask_from(cluster, LAUNCHERS[3], "node1", env).stdout:
            time.sleep(0.2)
        ip("-n", namespace("node3"), "link", "set", "eth0", "down")
        try:
            found = ask_from(cluster, LAUNCHERS[3], "node1", env).stdout.splitlines()
        finally:
            ip("-n", namespace("node3"), "link", "set", "eth0", "up")
    lost = message("where/rank_unreachable")
    assert re.match(rf"  \d ranks? +[\d-]+ +node3 +outlier +{lost}$", found[1]), found


def hanging(job: Job, cluster: Cluster, launcher: Launcher, host: str, env: dict[str, str]) -> Done:
    """Return a job's answer when rank 1 is an outlier."""
    deadline = time.monotonic() + 30
    while True:
        done = ask_from(cluster, launcher, host, env)
        if "outlier" in done.stdout or time.monotonic() > deadline:
            return check(done)
        time.sleep(0.3)


def ask_from(cluster: Cluster, launcher: Launcher, host: str, env: dict[str, str], *options: str) -> Done:
    """Ask the only job from a node."""
    return processes.run(*cluster.at(host, ROOT), str(launcher.mpi.python), *WHERE, *options, timeout=30,
                         env={**launcher.environ(), **env})


@pytest.mark.process
def test_a_child_that_was_reaped_elsewhere_is_gone() -> None:
    child = os.posix_spawn("/bin/true", ["true"], os.environ)
    os.waitpid(child, 0)
    assert try_reap(child)
