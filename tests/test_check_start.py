"""--check: nodes are measured before the script; what is odd is a warning, or why the job does not start."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpiddp.check import history, start
from mpiddp.check.start import Answer, Judgement, Turn
from mpiddp.cli import read_config
from mpiddp.compare.figures import Figures, Finding, Who
from mpiddp.config import LaunchConfig, Script
from mpiddp.measure.own import Own
from tests import processes
from tests.cgroups import quota
from tests.cluster import Cluster
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    ROOT,
    Done,
    Mpi,
    check,
    check_hello,
    mpiexec,
    mpiexec_command,
    need,
    noise,
    single_node_environ,
)

HELLO = EXAMPLES / "hello_world.py"
COST_S = 2.0
KIND = "1 core of X"


def figures(*hosts: str, **own: Sequence[float]) -> Figures:
    """Return figures of one rank a node."""
    ranks = tuple(Who(host, node, 0, "cpu", KIND) for node, host in enumerate(hosts))
    values = {name: {rank: [value] for rank, value in enumerate(some)} for name, some in own.items()}
    return Figures(ranks, values, {}, {}, {}, {}, {}, [])


def finding(host: str, quantity: str = "matrix", words: str = "") -> Finding:
    words = words or f"{host}: matrix product at 0.71 of the median of 503"
    return Finding("node", words, (host,), (0,), (), quantity, 0.7)


def one_rank_in(group: Path, mpi: Mpi, *arguments: object) -> Done:
    """Run two ranks, the second of which is in a cgroup; the first is one core's share ahead of nobody."""
    put = f'if [ "${{PMI_RANK}}" = 1 ]; then echo $$ > {group}/cgroup.procs; fi; exec "$@"'
    job = mpiexec_command(mpi, 2)
    command = [*job[:-1], "sh", "-c", put, "sh", str(mpi.python), "-m", "mpiddp", *map(str, arguments)]
    return processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)


@pytest.mark.parametrize(("arguments", "environ", "mode"), [
    (["t.py"], {}, ""),
    (["--check", "t.py"], {}, "warn"),
    (["--check", "strict", "t.py"], {}, "strict"),
    (["--check=strict", "t.py"], {}, "strict"),
    (["--check", "warn", "t.py"], {}, "warn"),
    (["t.py"], {"MPIDDP_CHECK": "1"}, "warn"),
    (["t.py"], {"MPIDDP_CHECK": "strict"}, "strict"),
    (["--check=0", "t.py"], {"MPIDDP_CHECK": "strict"}, ""),
])
def test_the_option(arguments: list[str], environ: dict[str, str], mode: str) -> None:
    assert read_config(arguments, environ) == LaunchConfig(Script("t.py"), check=mode)


@pytest.mark.parametrize(("arguments", "words"), [
    (["--check=hard", "t.py"], "must be warn, strict or 0, got 'hard'"),
    (["--check-history", "f", "t.py"], "--check-history needs --check"),
])
def test_wrong_options(arguments: list[str], words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(words)):
        read_config(arguments, {})


def test_ranks_have_to_have_the_same(quick: Mpi) -> None:
    parts = [[*map(str, (quick.python, "-m", "mpiddp", *options, HELLO))] for options in ([], ["--check"])]
    done = processes.run(str(quick.mpiexec), "-n", "1", *parts[0], ":", "-n", "1", *parts[1], timeout=DEADLINE_S,
                         env=single_node_environ(quick), cwd=ROOT)
    check(done, 3)
    assert "options-differ\n  found    check is not set on rank 0, but warn on rank 1" in done.stderr


@pytest.mark.alone
def test_where_nothing_is_odd_nothing_is_said(quick: Mpi, tmp_path: Path) -> None:
    done = mpiexec(quick, 2, "--check", "--trace", tmp_path / "trace.json", HELLO)
    check_hello(done, 2)
    assert [line for line in noise(done) if "warning" in line or "cannot" in line] == []
    assert spent_s(tmp_path / "trace.json") < COST_S


def spent_s(trace: Path) -> float:
    """Return how long the longest rank was in the stages of the check."""
    found: dict[int, float] = {}
    for one in json.loads(trace.read_text())["traceEvents"]:
        if one.get("ph") == "X" and ("its node" in one["name"] or "its machine" in one["name"]):
            found[one["pid"]] = found.get(one["pid"], 0.0) + one["dur"] / 1e6
    assert len(found) == 2
    return max(found.values())


def test_without_it_nothing_of_it_is_imported(quick: Mpi) -> None:
    code = ("import sys\nours = 'mpiddp.check', 'mpiddp.measure', 'mpiddp.compare'\n"
            "print(any(one.startswith(ours) for one in sys.modules))")
    for options, loaded in ([], "False"), (["--check"], "True"):
        assert check(mpiexec(quick, 1, *options, "-c", code)).stdout == f"{loaded}\n"


@pytest.mark.alone
def test_a_rank_with_a_fifth_of_a_core_is_refused_once(quick: Mpi, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    with quota(0.2) as group:
        done = check(one_rank_in(group, quick, "--check=strict", HELLO), 3)
    assert done.stdout == ""
    assert done.stderr.count("mpiddp: cannot start: slow-node") == 1, done.stderr
    host = os.uname().nodename
    assert re.search(rf"  {host}: rank 1 \(cpu\): matrix product at 0\.\d+ of", done.stderr), done.stderr
    assert "rank 0 (cpu)" not in done.stderr
    assert f"--exclude={host}" in done.stderr


@pytest.mark.alone
@pytest.mark.thorough
def test_a_rank_with_a_fifth_of_a_core_is_warned_of(quick: Mpi, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    with quota(0.2) as group:
        done = one_rank_in(group, quick, "--check", HELLO)
    check_hello(done, 2)
    said = [line for line in noise(done) if line.startswith("mpiddp: warning: slow-node: ")]
    assert [line for line in said if "rank 1 (cpu): matrix product at 0." in line], done.stderr
    assert "rank 0 (cpu)" not in done.stderr


def test_a_full_folder_is_refused(quick: Mpi, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    full = tmp_path / "full"
    prepare = f"mkdir {full} && mount -t tmpfs -o size=32m tmpfs {full} && exec \"$@\""
    job = mpiexec_command(quick, 2, "-m", "mpiddp", "--check=strict", HELLO)
    done = processes.run("unshare", "--mount", "sh", "-c", prepare, "sh", *job, timeout=DEADLINE_S,
                         env={**single_node_environ(quick), "TMPDIR": str(full)}, cwd=ROOT)
    check(done, 3)
    said = f"cannot start: bad-node\n  found    {os.uname().nodename}: {full} is small: 32 MiB\n"
    assert done.stderr.count(said) == 1, done.stderr


@pytest.mark.alone
def test_a_second_start_compares_with_the_first(quick: Mpi, tmp_path: Path) -> None:
    """Figures of ten former checks, four times as good as this node is."""
    file = tmp_path / "checks.jsonl"
    check_hello(mpiexec(quick, 2, "--check", "--check-history", file, HELLO), 2)
    first = json.loads(file.read_text())
    assert first["host"] == os.uname().nodename and first["values"]["matrix"] > 1e9
    assert re.fullmatch(r"2 x \d+ cores? of .+", first["kind"])
    better = {**first, "values": {**first["values"], "matrix": 4 * first["values"]["matrix"]}}
    file.write_text("".join(f"{json.dumps(better)}\n" for _ in range(10)) + "torn")
    done = mpiexec(quick, 2, "--check", "--check-history", file, HELLO)
    check_hello(done, 2)
    assert f"mpiddp: warning: check-history: 1 damaged line of {file} left out" in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("mpiddp: warning: slow-node: ")]
    assert any(re.search(r"matrix product at 0\.[0-6]\d* of its own median", line) for line in said), done.stderr
    assert len(history.read(str(file))[0]) == 11


def test_a_history_that_cannot_be_written_is_said_once(quick: Mpi, tmp_path: Path) -> None:
    done = mpiexec(quick, 2, "--check", "--check-history", tmp_path / "none" / "f", HELLO)
    check_hello(done, 2)
    assert done.stderr.count("mpiddp: warning: check-history: cannot keep figures in ") == 1, done.stderr


def entry(host: str, at: float, kind: str = f"1 x {KIND}", **values: float) -> history.Entry:
    return history.Entry(at, host, kind, values)


def test_a_history_is_read_back_and_bounded(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    assert history.read(path) == ([], 0)
    for at in range(60):
        history.append(path, [entry("n1", at, matrix=at), entry("n2", at, matrix=1.0)][: 1 if at > 5 else 2])
    known, damaged = history.read(path)
    assert damaged == 0
    assert [one.time for one in known if one.host == "n1"] == list(range(10, 60))
    assert len([one for one in known if one.host == "n2"]) == 6
    found = history.past(known, [entry("n1", 99), entry("n2", 99, kind="8 x GPU")])
    assert found == {"n1": {"matrix": [*range(10, 60)]}}


@pytest.mark.parametrize("damage", ['{"time": 1, "ho', "[]", "null", '{"time": 1}', "word\n",
                                    '{"time": 1, "host": "a", "kind": "", "values": {"matrix": "x"}}\n',
                                    pytest.param('{"time": 1' + "0" * 400 + ', "host": "a", "kind": "", "values": {}}',
                                                 id="a number too large"),
                                    pytest.param("[" * 100_000 + "\n", id="too deep")])
def test_a_damaged_line_is_left_out_and_then_gone(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "f"
    history.append(str(path), [entry("n1", 1, matrix=1)])
    with path.open("a") as file:
        file.write(damage)
    assert history.read(str(path)) == ([entry("n1", 1, matrix=1)], 1)
    history.append(str(path), [entry("n1", 2, matrix=2)])
    assert history.read(str(path)) == ([entry("n1", 1, matrix=1), entry("n1", 2, matrix=2)], 0)


def test_a_history_that_another_job_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PATIENCE_S", 0.1)
    with (tmp_path / "f").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another job holds it"):
            history.append(str(tmp_path / "f"), [entry("n1", 1)])


def test_jobs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    code = ("import sys; from mpiddp.check import history\nfor at in range(25):\n"
            "    history.append(sys.argv[1], [history.Entry(at, sys.argv[2], '', {})])")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [processes.start([sys.executable, "-c", code, f"{tmp_path}/f", f"n{at}"], env) for at in range(3)]
    assert [one.wait(60) for one in jobs] == [0, 0, 0]
    known, damaged = history.read(f"{tmp_path}/f")
    assert damaged == 0 and len(known) == 75


def full(path: Path) -> str:
    """Make a file to which nothing can be added but in the place of what is old; return what it says."""
    history.append(str(path), [entry("n1", at) for at in range(history.KEPT)])
    path.chmod(0o664)
    return path.read_text()


def test_jobs_that_replace_the_file_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each puts another file in the place of the one that the others wait for."""
    path = tmp_path / "f"
    full(path)
    code = ("import sys; from mpiddp.check import history\nfor at in range(10):\n"
            "    history.append(sys.argv[1], [history.Entry(100 + at, host, '', {}) for host in ('n1', sys.argv[2])])")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    jobs = [processes.start([sys.executable, "-c", code, str(path), f"m{at}"], env) for at in range(3)]
    assert [one.wait(60) for one in jobs] == [0, 0, 0]
    known, damaged = history.read(str(path))
    assert damaged == 0 and len(known) == history.KEPT + 3 * 10
    assert len([one for one in known if one.host == "n1" and one.time >= 100]) == 3 * 10
    assert [one.name for one in tmp_path.iterdir()] == ["f"]
    assert path.stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("moment", ["write_all", "fsync", "replace"])
def test_a_job_that_is_killed_while_it_replaces_the_file_loses_nothing(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "f"
    before = full(path)
    code = ("import os, signal, sys; from mpiddp.check import history\n"
            "where = history if hasattr(history, sys.argv[2]) and sys.argv[2] != 'replace' else os\n"
            "real, calls = getattr(where, sys.argv[2]), []\n"
            "def dies(*some):\n"
            "    calls.append(some)\n"
            "    if len(calls) == 2 or where is os: os.kill(os.getpid(), signal.SIGKILL)\n"  # the first one appends
            "    return real(*some)\n"
            "setattr(where, sys.argv[2], dies)\n"
            "history.append(sys.argv[1], [history.Entry(99, 'n1', '', {})])")
    job = processes.start([sys.executable, "-c", code, str(path), moment], {**os.environ, "PYTHONPATH": str(ROOT)})
    assert job.wait(60) == -9
    assert path.read_text().startswith(before)
    history.append(str(path), [entry("n1", 100)])
    known, damaged = history.read(str(path))
    assert damaged == 0 and [one.time for one in known] == [*range(2, history.KEPT), 99, 100]
    assert [one.name for one in tmp_path.iterdir()] == ["f"]


def test_a_link_of_ours_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "f").symlink_to("kept/f")
    full(tmp_path / "f")
    history.append(str(tmp_path / "f"), [entry("n1", 99)])
    assert (tmp_path / "f").is_symlink()
    assert len((tmp_path / "kept/f").read_text().splitlines()) == history.KEPT


def test_a_file_that_cannot_be_replaced_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder that is not ours: what has no end has one then, and the rest is left to others."""
    path = tmp_path / "f"
    before = full(path)
    path.write_text(before + "torn")

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    history.append(str(path), [entry("n1", 99)])
    assert path.read_text().startswith(before + "torn\n{")
    assert [one.name for one in tmp_path.iterdir()] == ["f"]
    assert history.read(str(path))[0][-1].time == 99


def test_entries_are_medians_over_a_node() -> None:
    ranks = tuple(Who("n1", 0, at, "cpu", KIND) for at in range(3))
    one = Figures(ranks, {"matrix": {0: [1.0, 4.0], 1: [2.0], 2: [9.0]}, "throttled": {0: [0.5, 0.1]}}, {}, {}, {}, {},
                  {}, [])
    assert history.entries(one, 7.0) == [
        history.Entry(7.0, "n1", f"3 x {KIND}", {"matrix": 4.0, "throttled": 0.1})]


def test_a_host_is_accused_by_its_past_when_it_stays_so(tmp_path: Path) -> None:
    """And what was slow in the first look alone is not; nor is a figure of other ranks a measure."""
    path = str(tmp_path / "f")
    history.append(path, [entry("n1", at, matrix=100.0 + at % 3) for at in range(9)])
    past = history.OwnPast(path)
    now = figures("n1", matrix=[60.0])
    assert past.doubt(now) == {"matrix": frozenset({0})}
    now.own["matrix"][0].append(61.0)
    assert [one.words for one in past.judge(now)] == ["n1: matrix product at 0.60 of its own median of 9 checks"]
    now.own["matrix"][0].append(100.0)
    assert past.judge(now) == []
    eight = figures("n1", matrix=[60.0])._replace(ranks=(Who("n1", 0, 0, "cpu", "8 cores of X"),))
    assert past.doubt(eight) == {}


def test_findings_are_warned_of() -> None:
    full = finding("n018", "", "n018: /tmp is full: 12 MiB free")
    assert start.warnings([finding("n017"), full]) == [
        "bad-node: n018: /tmp is full: 12 MiB free",
        "slow-node: n017: matrix product at 0.71 of the median of 503"]
    many = [finding("n1", words=f"n1: {at}") for at in range(9)]
    assert start.warnings(many)[-1] == "slow-node: 4 more like these"


def test_findings_are_refused() -> None:
    slow = start.refusal([finding("n017"), finding("n018", words="n018: y")])
    assert slow and slow.name == "slow-node" and "--exclude=n[017-018]" in slow.do
    assert slow.found == "n017: matrix product at 0.71 of the median of 503\nn018: y"
    bad = start.refusal([finding("n017"), finding("n3", "shm-size", "n3: size of /dev/shm is 16 MiB")])
    assert bad and bad.name == "bad-node" and bad.found.startswith("n3: size")
    assert start.refusal([]) is None


def judgement(machines: Sequence[str], **options: Any) -> Judgement:
    """Return rank 0's part for one rank a node on these machines, which have their turns."""
    found = Judgement(len(machines), LaunchConfig(**options))
    found.give_turns([(Who(f"n{node}", node, 0, "cpu", KIND), name) for node, name in enumerate(machines)])
    return found


def test_nodes_of_one_machine_take_turns() -> None:
    facts = [(Who(f"n{node}", node, at, "cpu", KIND), name)
             for node, name in enumerate(["a", "b", "a", ""]) for at in range(2)]
    turns = Judgement(8, LaunchConfig()).give_turns(facts)
    assert turns == [Turn(0, 2)] * 2 + [Turn(0, 2)] * 2 + [Turn(1, 2)] * 2 + [Turn(0, 2)] * 2


def look(judge: Judgement, values: Sequence[float | None]) -> list[Answer]:
    return judge.take([None if one is None else Own({"matrix": one}, []) for one in values])


def test_a_suspect_is_measured_again_before_it_is_accused() -> None:
    """What was slow for a moment is not, once others have been measured beside it."""
    judge = judgement("abcdef", check="strict")
    answers = look(judge, [100, 101, 99, 40, 100, 100])
    assert answers[3] == Answer(True, True) and all(one.again for one in answers)
    values = [99.0 if one.measures else None for one in answers]
    assert look(judge, values)[0].again
    assert look(judge, values) == [Answer()] * 6


def test_a_device_that_has_not_answered_is_not_asked_again() -> None:
    """Its node's disk seems slow as well; another look would wait for the device as long as the first one."""
    judge = judgement("abcdef", check="warn")
    told = ["cuda:0 has not answered within 10 s"]
    some = [Own({"matrix": rate, "tmp-write": 1e9}, []) for rate in (100.0, 100.0, 100.0, 100.0, 40.0)]
    answers = judge.take([*some, Own({"tmp-write": 1e8}, told, False)])
    assert [one.measures for one in answers] == [True] * 5 + [False]
    while (answers := look(judge, [100.0 if one.measures else None for one in answers]))[0].again:
        assert not answers[5].measures
    assert answers[0].warnings == (f"bad-node: n5: {told[0]}",)


def test_one_that_stays_slow_is_accused() -> None:
    judge = judgement("abcdef", check="warn")
    values: list[float | None] = [100, 101, 99, 40, 100, 100]
    while (answers := look(judge, values))[0].again:
        values = [40.0 if rank == 3 else 100.0 if one.measures else None for rank, one in enumerate(answers)]
    assert len(answers[0].warnings) == 1
    assert answers[0].warnings[0].startswith("slow-node: n3: matrix product at 0.40 of the median of 5")
    assert all(one == Answer() for one in answers[1:])


def test_nothing_odd_takes_one_look() -> None:
    judge = judgement("aabb", check="strict")  # of two turns
    assert look(judge, [100, None, 100, None]) == [Answer()] * 4
    assert look(judge, [None, 101, None, 102]) == [Answer()] * 4


SMALL_SHM = "unshare --mount sh -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm; exec \"$@\"' sh"


@pytest.mark.thorough
def test_a_node_with_a_small_shared_memory_is_refused_by_name(cluster: Cluster) -> None:
    """Three nodes, which are of one machine and take turns."""
    mpi = MPIS["openmpi4"]
    command = (f'if [ "$SLURMD_NODENAME" = node2 ]; then set -- {SMALL_SHM}; fi; '
               f'exec "$@" {mpi.python} -m mpiddp --check=strict {HELLO}')
    done = check(cluster.run("srun", "--mpi=pmix", "-N3", "--ntasks-per-node=2", "sh", "-c", command,
                             timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT), 3)
    assert done.stderr.count("mpiddp: cannot start: bad-node\n  found    node2: /dev/shm is small: 16 MiB") == 1
    assert "--exclude=node2" in done.stderr
    own = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("srun: "))
    assert "node1:" not in own
    assert "node3:" not in own
