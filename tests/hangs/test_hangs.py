"""A zoo of jobs that hang, or seem to: which rank is the outlier, and where."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.where import client
from mpiddp.where.registry import read_endpoints
from mpiddp.where.snapshot import Snapshot
from tests.cluster.cluster import RUN
from tests.faults.matrix import LAUNCHERS, WHOLE, Launcher
from tests.faults.test_signals import Job, started
from tests.messages import find, message
from tests.support import VENVS, Mpi, check, first_of, mpiexec, need

ZOO = Path(__file__).with_name("zoo.py")
OTHERS = [WHOLE[at] for at in (0, 1, 3, 4)]
HYDRA = replace(LAUNCHERS[2], count=3)  # two are a majority
SETTLING_S = 60
STALL_S, WITHIN_S, SLOW_S = 4, 60, 10
DEADLOCKS, QUIET_S = ("mismatch", "uneven", "left"), 25
ABSENT = "where/not_in_collective", {"collective": "all_reduce"}
ZOO_OF = [  # what rank 1 does, a part of its line (empty if no rank is an outlier), and a finding about it
    ("worker", "read_sample", ("where/waiting_for_loader", {})),
    ("mismatch", "broadcast", ("where/in_collective", {"collective": "broadcast"})),
    ("stop", "rank 1", ("where/stopped", {})),
    ("network", "", ("where/all_in_collective", {"collective": "all_reduce"})),
    ("python", "sleep_in_python", ABSENT),
    ("c", "sleep_in_c", ABSENT),
    ("left", "rank 1", ("where/at_script_end", {})),
    ("uneven", "validate → barrier", ("where/in_collective", {"collective": "barrier"})),
    ("pool", "lose_pool_worker", ABSENT),
    ("lock", "take_second", ABSENT),
    ("fork", "log_in_child", ABSENT),
    ("input", "ask", ABSENT),
    ("disk", "fuse", ABSENT),
    ("slow", "compute", ("where/busy_outside_collective", {"collective": "all_reduce"})),
    ("native", message("where/native_code"), ABSENT),
    ("order", "", ("where/sequence_behind_in_named_group", {"number": 0})),
]
Finding = tuple[str, dict[str, object]]
NEEDS_PY_SPY = "worker", "fork"  # a child waits in a system call: its handler does not run


def hanging(place: str, finding: Finding) -> Snapshot:
    """Return the job's snapshot as soon as it has that finding, or the last one at the deadline."""
    deadline = time.monotonic() + SETTLING_S
    while not read_endpoints():  # it is written a second after the start
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while True:
        found, _ = client.request_snapshot(client.find_endpoint(""))
        if is_found(found, place, finding) or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def is_found(found: Snapshot, place: str, finding: Finding) -> bool:
    """Return whether a snapshot has the finding, and rank 1 at `place` as its only outlier; none if that is empty."""
    outliers = [(group.ranks, f"rank 1: {group.location.line}") for group in found.groups if group.is_outlier]
    is_right = (len(outliers) == 1 and outliers[0][0] == (1,) and place in outliers[0][1]) if place else not outliers
    name, fields = finding
    ranks = {} if name == "where/all_in_collective" else {"ranks": "rank 1 is"}
    return is_right and find(name, "\n".join(found.findings), **ranks, **fields) != []


@contextlib.contextmanager
def zoo_job(
    kind: str, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    *options: str,
) -> Iterator[Job]:
    """Hold a job that hangs, and let this process find it."""
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    folder = RUN / f"hang-{time.monotonic_ns()}" if launcher.srun else tmp_path  # which nodes see, too
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    os.mkfifo(folder / "fifo")
    need(["root, to mount a file system"] if kind == "disk" and os.geteuid() else [])
    env = {"XDG_STATE_HOME": str(folder)}
    if kind in NEEDS_PY_SPY:
        env["PATH"] = f"{launcher.environ()['PATH']}:{VENVS / 'base/bin'}"
    with started(launcher, cluster, *options, ZOO, kind, folder, env=env) as job:
        job.await_ready(launcher.ranks)
        yield job
    if launcher != HYDRA:
        return  # other launchers kill the agents before these can remove the job's file
    deadline = time.monotonic() + SETTLING_S  # the agents end after the ranks
    while list((folder / "mpiddp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert list((folder / "mpiddp").iterdir()) == []


CELLS = [(*row, HYDRA) for row in ZOO_OF] + [(*row, OTHERS[at % len(OTHERS)]) for at, row in enumerate(ZOO_OF)]


@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "place", "finding", "launcher"), first_of(CELLS, 2),
                         ids=[f"{kind}-{launcher.name}" for kind, _, _, launcher in CELLS])
def test_a_job_that_hangs(
    kind: str, place: str, finding: Finding, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    with zoo_job(kind, launcher, tmp_path, monkeypatch, request):
        found = hanging(place, finding)
    assert is_found(found, place, finding), found


@pytest.mark.thorough("test_a_hang_is_reported_and_ends_the_job, and where a rank hangs in test_a_job_that_hangs")
@pytest.mark.mpi
@pytest.mark.parametrize("kind", [kind for kind, _, _ in ZOO_OF])
def test_a_hang_is_reported_in_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A job that is only slow is not reported."""
    with zoo_job(kind, HYDRA, tmp_path, monkeypatch, request, f"--stall={STALL_S}") as job:
        said = read_until("where/no_progress", job, STALL_S + (SLOW_S if kind == "slow" else WITHIN_S))
        assert bool(find("where/no_progress", said)) == (kind != "slow"), said


def read_until(name: str, job: Job, limit_s: float) -> str:
    """Return what a job prints until it has printed a message, or up to the limit."""
    assert job.process.stdout
    end, said = time.monotonic() + limit_s, ""
    while not find(name, said) and (left_s := end - time.monotonic()) > 0:
        if select.select([job.process.stdout], [], [], left_s)[0]:
            said += os.read(job.process.stdout.fileno(), 65536).decode(errors="replace")
    return said


@pytest.mark.thorough("test_a_test_runner_that_goes_on_after_a_failure")
@pytest.mark.mpi
@pytest.mark.parametrize("kind", [kind for kind, _, _ in ZOO_OF])
def test_a_deadlock_is_reported_without_an_option(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """And nothing else is."""
    wanted = kind in DEADLOCKS
    with zoo_job(kind, HYDRA, tmp_path, monkeypatch, request) as job:
        said = read_until("launch/deadlock", job, WITHIN_S if wanted else QUIET_S)
    assert bool(find("launch/deadlock", said)) == wanted, said


@pytest.mark.thorough("test_asking_changes_nothing")
def test_a_training_is_not_reported_as_hanging(quick: Mpi, tmp_path: Path) -> None:
    """With validations, checkpoints, and a worker that sleeps, ten times, half as long as a hang would last."""
    done = check(mpiexec(quick, 2, "--stall=4", ZOO.with_name("training.py"), 30, 2, tmp_path / "digits.pt"))
    assert len(re.findall(r"^rank [01]: \d+ epochs, \d+ pauses, ", done.stdout, re.MULTILINE)) == 2
    assert find("where/no_progress", done.stderr) == find("launch/deadlock", done.stderr) == []
