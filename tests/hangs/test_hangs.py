"""A zoo of jobs that stand still, or seem to: who is odd, and where."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.where import client
from mpiddp.where.registry import read_endpoints
from mpiddp.where.snapshot import Snapshot
from tests.cluster.cluster import RUN
from tests.faults.matrix import WHOLE, Launcher
from tests.faults.test_signals import Job, started
from tests.support import VENVS, Mpi, check, first_of, mpiexec, need

ZOO = Path(__file__).with_name("zoo.py")
OMPI4, OMPI5, HYDRA, PMIX, PMI2 = WHOLE
SETTLING_S = 20
STALL_S, WITHIN_S = 4, 10
ABSENT = "rank 1 is not in all_reduce, where others wait"
ZOO_OF = [  # what rank 1 does, a part of its line, empty for no odd rank, and of a sentence
    ("worker", "read_sample", "rank 1 is waiting for a worker of its DataLoader"),
    ("mismatch", "broadcast", "rank 1 is in broadcast (zoo.py:"),
    ("stop", "rank 1", "rank 1 is stopped, by SIGSTOP or a debugger"),
    ("network", "", "all ranks are in all_reduce (zoo.py:"),
    ("python", "sleep_in_python", ABSENT),
    ("c", "sleep_in_c", ABSENT),
    ("left", "rank 1", "rank 1 is at the end of the script"),
    ("uneven", "validate → barrier", "rank 1 is in barrier (zoo.py:"),
    ("pool", "lose_pool_worker", ABSENT),
    ("lock", "take_second", ABSENT),
    ("fork", "log_in_child", ABSENT),
    ("input", "ask", ABSENT),
    ("disk", "fuse", ABSENT),
    ("slow", "compute", "rank 1 is busy, and not in all_reduce, where others wait: slow, or spinning"),
    ("native", "native code, which holds the interpreter", ABSENT),
    ("order", "", "rank 1 is at sequence 0 of ranks 0-"),
]
NEEDS_PY_SPY = "worker", "fork"  # a child waits in a system call: its handler does not run


def standing(place: str, finding: str) -> Snapshot:
    """Return where the ranks of the job are as soon as that is found, or as they are in the end."""
    deadline = time.monotonic() + SETTLING_S
    while not read_endpoints():  # it is written a second after the start
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while True:
        found, _ = client.request_snapshot(client.find_endpoint(""))
        if is_found(found, place, finding) or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def is_found(found: Snapshot, place: str, finding: str) -> bool:
    """Tell whether rank 1 alone is odd, at a place, or no rank if that is empty; and whether a sentence says so."""
    odd = [(f"rank {group.ranks[0]}: {group.location.line}", len(group.ranks))
           for group in found.groups if group.is_odd]
    right = len(odd) == 1 and odd[0][0].startswith("rank 1: ") and place in odd[0][0] if place else not odd
    return right and any(finding in one for one in found.findings)


@contextlib.contextmanager
def zoo_job(
    kind: str, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest,
    *options: str,
) -> Iterator[Job]:
    """Hold a job that stands still, and let this process find it."""
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
    assert list((folder / "mpiddp").iterdir()) == []


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", first_of([HYDRA, OMPI4, OMPI5, PMIX, PMI2]), ids=lambda one: one.name)
@pytest.mark.parametrize(("kind", "place", "finding"), first_of(ZOO_OF, 4), ids=[kind for kind, _, _ in ZOO_OF])
def test_a_job_that_stands_still(
    kind: str, place: str, finding: str, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    with zoo_job(kind, launcher, tmp_path, monkeypatch, request):
        found = standing(place, finding)
    assert is_found(found, place, finding), found


@pytest.mark.alone
@pytest.mark.parametrize("kind", first_of([kind for kind, _, _ in ZOO_OF]))
def test_a_job_that_stands_still_says_so_in_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One that is slow says nothing."""
    with zoo_job(kind, HYDRA, tmp_path, monkeypatch, request, f"--stall={STALL_S}") as job:
        assert job.process.stdout
        end, said = time.monotonic() + STALL_S + WITHIN_S, b""
        while b"mpiddp: no rank has moved for " not in said and (left_s := end - time.monotonic()) > 0:
            if select.select([job.process.stdout], [], [], left_s)[0]:
                said += os.read(job.process.stdout.fileno(), 65536)
        assert (b"mpiddp: no rank has moved for " in said) == (kind != "slow"), said


@pytest.mark.thorough("test_a_job_that_goes_on_is_not_said_to_stand_still")
def test_a_training_is_not_said_to_stand_still(quick: Mpi, tmp_path: Path) -> None:
    """With validations, checkpoints, and a worker that stands still, ten times, half as long as a hang would last."""
    done = check(mpiexec(quick, 2, "--stall=4", ZOO.with_name("training.py"), 30, 2, tmp_path / "digits.pt"))
    assert len(re.findall(r"^rank [01]: \d+ epochs, \d+ pauses, ", done.stdout, re.MULTILINE)) == 2
    assert "no rank has moved" not in done.stderr
