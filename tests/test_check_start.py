"""--check: benchmarks before the script; findings are warnings, or the job does not start."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpiddp.base.config import CheckMode, LaunchConfig, Script
from mpiddp.base.errors import LaunchError
from mpiddp.check import PASSES, preflight
from mpiddp.check.bench.rank import RankResult
from mpiddp.check.stats.schema import CheckFinding, RankInfo, Subject
from mpiddp.cli import read_config
from tests import processes
from tests.cgroups import quota
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    ROOT,
    Done,
    Mpi,
    check,
    check_hello,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    noise,
    single_node_environ,
)

HELLO = EXAMPLES / "hello_world.py"
COST_S = 2.0
KIND = "1 core of X"


def finding(host: str, quantity: str = "matrix", words: str = "") -> CheckFinding:
    return CheckFinding(Subject.NODE, words, (host,), (0,), (), quantity, 0.7)


def one_rank_in(group: Path, mpi: Mpi, *arguments: object) -> Done:
    """Run two ranks, the second of which is in a cgroup from its start."""
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
def test_where_nothing_is_odd_nothing_is_said(tmp_path: Path) -> None:
    done = mpiexec(MPIS["mpich"], 2, "--check", "--trace", tmp_path / "trace.json", HELLO)
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


IS_LOADED = "import sys\nprint(any(one.startswith('mpiddp.check') for one in sys.modules))"


@pytest.mark.light
def test_without_it_nothing_of_it_is_imported(quick: Mpi) -> None:
    assert check(mpiexec(quick, 1, "-c", IS_LOADED)).stdout == "False\n"


@pytest.mark.thorough("test_a_quota_is_seen")
@pytest.mark.alone
def test_a_rank_with_a_fifth_of_a_core_is_refused_once(quick: Mpi, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    with quota(0.2) as group:
        done = check(one_rank_in(group, quick, "--check=strict", HELLO), 3)
    assert done.stdout == ""
    assert done.stderr.count("mpiddp: cannot start: slow-node") == 1, done.stderr
    host = os.uname().nodename
    assert find("check/slow_rank_of_two", done.stderr, host=f"  {host}", rank=1, metric="matrix product"), done.stderr
    assert "rank 0 (cpu)" not in done.stderr
    assert f"--exclude={host}" in done.stderr


@pytest.mark.alone
@pytest.mark.thorough("test_a_quota_is_seen")
def test_a_rank_with_a_fifth_of_a_core_is_warned_of(quick: Mpi, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    with quota(0.2) as group:
        done = one_rank_in(group, quick, "--check", HELLO)
    check_hello(done, 2)
    said = [line for line in noise(done) if line.startswith("mpiddp: warning: slow-node: ")]
    assert any(find("check/slow_rank_of_two", line, rank=1, metric="matrix product") for line in said), done.stderr
    assert "rank 0 (cpu)" not in done.stderr


def test_a_full_folder_is_refused(quick: Mpi, tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    full = tmp_path / "full"
    prepare = f"mkdir {full} && mount -t tmpfs -o size=32m tmpfs {full} && exec \"$@\""
    job = mpiexec_command(quick, 2, "-m", "mpiddp", "--check=strict", HELLO)
    done = processes.run("unshare", "--mount", "sh", "-c", prepare, "sh", *job, timeout=DEADLINE_S,
                         env={**single_node_environ(quick), "TMPDIR": str(full)}, cwd=ROOT)
    check(done, 3)
    small = message("check/folder_small", folder=full, size="32 MiB")
    said = f"cannot start: bad-node\n  found    {os.uname().nodename}: {small}\n"
    assert done.stderr.count(said) == 1, done.stderr


def test_findings_are_warned_of() -> None:
    full = finding("n018", "", "n018: a fault")
    assert preflight.warnings([finding("n017", words="n017: slow"), full]) == [
        "bad-node: n018: a fault", "slow-node: n017: slow"]
    many = [finding("n1", words=f"n1: {at}") for at in range(9)]
    assert preflight.warnings(many)[5:] == [f"slow-node: {message('check/more_findings', count=4)}"]


def test_findings_are_refused() -> None:
    slow = preflight.refusal([finding("n017", words="n017: x"), finding("n018", words="n018: y")])
    assert slow and (slow.name, slow.needed) == ("slow-node", message("check/slow_node_needed"))
    assert slow.actual == "n017: x\nn018: y"
    assert find("check/refusal_advice", slow.do)[0]["option"].endswith("--exclude=n[017-018]")
    bad = preflight.refusal([finding("n017", words="n017: x"), finding("n3", "shm-size", "n3: z")])
    assert bad and (bad.name, bad.needed) == ("bad-node", message("check/bad_node_needed"))
    assert bad.actual == "n3: z\nn017: x"
    assert preflight.refusal([]) is None


SLOW, ALIKE = (100.0, 101.0, 99.0, 40.0, 100.0, 100.0), (100.0, 101.0, 99.0, 99.0, 100.0, 100.0)


def judged(passes: Sequence[Sequence[float]], mode: str) -> tuple[int, Sequence[str]]:
    """Return after how many passes with these matrix products there is no other one, and the warnings then."""
    judge = preflight.Judge(LaunchConfig(check=CheckMode(mode)))
    judge.assign_turns([(RankInfo(f"n{node}", node, 0, "cpu", KIND), f"machine {node}") for node in range(6)])
    for number, values in enumerate(passes, 1):
        warnings, *others = judge.add_results([RankResult({"matrix": value}, []) for value in values])
        assert others == [None if warnings is None else ()] * 5
        if warnings is not None:
            return number, warnings
    raise AssertionError("there is another pass")


@pytest.mark.parametrize(("passes", "made"), [((ALIKE,), 1), ((SLOW, ALIKE), 2), ((SLOW, SLOW, ALIKE), 3)])
@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_no_pass_follows_one_in_which_nothing_was_odd(
    passes: Sequence[Sequence[float]], made: int, mode: str
) -> None:
    assert judged(passes, mode) == (made, [])


def test_who_is_odd_in_each_pass_is_accused() -> None:
    words = message("check/slow_node", host="n3", metric="matrix product", ratio="0.40", peers="5 ranks")
    assert judged([SLOW] * PASSES, "warn") == (PASSES, [f"slow-node: {words}"])
    with pytest.raises(LaunchError) as raised:
        judged([SLOW] * PASSES, "strict")
    assert (raised.value.name, raised.value.actual) == ("slow-node", words)


def test_nodes_of_one_machine_take_turns() -> None:
    """Two ranks on each of three nodes, of which two are containers of one machine."""
    judge = preflight.Judge(LaunchConfig(check=CheckMode.WARN))
    given = judge.assign_turns([(RankInfo(f"n{rank // 2}", rank // 2, rank % 2), "ab"[rank > 3]) for rank in range(6)])
    assert given == [(0, 2), (0, 2), (1, 2), (1, 2), (0, 2), (0, 2)]
    assert judge.add_results([None if own else RankResult({"matrix": 1.0}, []) for own, _ in given])[0] is None
    assert judge.add_results([RankResult({"matrix": 1.0}, []) if own else None for own, _ in given]) == [
        [], (), (), (), (), ()]
    unknown = preflight.Judge(LaunchConfig(check=CheckMode.WARN)).assign_turns(
        [(RankInfo("n", rank // 2, rank % 2), "") for rank in range(4)])
    assert unknown == [(0, 1)] * 4


@pytest.mark.light
@pytest.mark.long
@pytest.mark.parametrize(("stopped", "words"), first_of([
    ("1 2", r"2 of 3 ranks: rank 1 on \S+ \(measuring its node\), rank 2 on \S+ \(measuring its node\)"),
    ("0", ""), ("1", r"1 of 3 ranks: rank 1 on \S+ \(measuring its node\)"),
], 2))
def test_ranks_that_stand_still_are_named_and_nobody_else(quick: Mpi, stopped: str, words: str) -> None:
    done = mpiexec(quick, 3, "--check=strict", HELLO, module="tests.programs.stopped_check", env={"STOPPED": stopped})
    assert done.returncode
    if words:
        check(done, 3)
        missing, names = words.split(" of 3 ranks: ")
        for name in ("launch/waiting_for_ranks", "launch/startup_timeout"):
            late = find(name, done.stderr, missing=missing, ranks=3)
            assert late, done.stderr
            assert all(re.fullmatch(names, fields["names"]) for fields in late)
        assert done.stderr.count("mpiddp: cannot start: startup-timeout\n") == len(late) == 1, done.stderr
    else:
        assert len(find("launch/startup_timeout_of_plan", done.stderr, seconds=8)) == 1, done.stderr
    blamed = {*re.findall(r"(rank \d) on \S+ \(", done.stderr)}
    assert blamed == {f"rank {one}" for one in stopped.split() if one != "0"}


SMALL_SHM = "unshare --mount sh -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm; exec \"$@\"' sh"


@pytest.mark.thorough("test_a_full_folder_is_refused")
def test_a_node_with_a_small_shared_memory_is_refused_by_name(cluster: Cluster) -> None:
    """Three nodes, which are of one machine and take turns."""
    mpi = MPIS["openmpi4"]
    command = (f'if [ "$SLURMD_NODENAME" = node2 ]; then set -- {SMALL_SHM}; fi; '
               f'exec "$@" {mpi.python} -m mpiddp --check=strict {HELLO}')
    done = check(cluster.run("srun", "--mpi=pmix", "-N3", "--ntasks-per-node=2", "sh", "-c", command,
                             timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT), 3)
    small = message("check/folder_small", folder="node2: /dev/shm", size="16 MiB")
    assert done.stderr.count(f"mpiddp: cannot start: bad-node\n  found    {small}") == 1
    assert "--exclude=node2" in done.stderr
    own = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("srun: "))
    assert "node1:" not in own
    assert "node3:" not in own
