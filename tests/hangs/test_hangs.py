"""A zoo of jobs that stand still, or seem to: who is odd, and where."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.where import client
from mpiddp.where.cards import read_all
from mpiddp.where.merge import Picture
from tests.faults.matrix import WHOLE
from tests.faults.test_signals import started
from tests.support import first_of, need

ZOO = Path(__file__).with_name("zoo.py")
OMPI4, OMPI5, HYDRA, PMIX, PMI2 = WHOLE
SETTLING_S = 20
MNT_DETACH = 2  # (sys/mount.h)


@contextlib.contextmanager
def stuck(folder: Path) -> Iterator[None]:
    """Hold a file system that does not answer: nobody reads what the kernel asks of /dev/fuse."""
    need(["root, to mount a file system"] if os.geteuid() else [])
    folder.mkdir()
    library = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        assert library.mount(b"stuck", str(folder).encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        os.close(device)  # those who wait for it go on
        library.umount2(str(folder).encode(), MNT_DETACH)


def standing(odd: int) -> Picture:
    """Return where the ranks of the job are as soon as that one is odd, or as they are in the end."""
    deadline = time.monotonic() + SETTLING_S
    while not read_all():  # it is written a second after the start
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while True:
        found = client.ask(client.find(""))
        if [group.ranks for group in found.groups if group.odd] == [(odd,)] or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


@pytest.mark.parametrize(("kind", "place", "finding"), first_of([
    ("worker", "read_sample", "rank 1 is waiting for a worker of its DataLoader"),
    ("mismatch", "broadcast", "rank 1 is in broadcast ("),
    ("stop", "", "rank 1 is stopped, by SIGSTOP or a debugger"),
    ("python", "sleep_in_python", "rank 1 is not in all_reduce, where others wait"),
    ("c", "sleep_in_c", "rank 1 is not in all_reduce, where others wait"),
    ("left", "", "rank 1 is at the end of the script"),
    ("uneven", "validate → barrier", "rank 1 is in barrier (zoo.py:"),
    ("pool", "lose_pool_worker", "rank 1 is not in all_reduce, where others wait"),
    ("lock", "take_second", "rank 1 is not in all_reduce, where others wait"),
    ("fork", "log_in_child", "rank 1 is not in all_reduce, where others wait"),
    ("input", "ask", "rank 1 is not in all_reduce, where others wait"),
    ("disk", "fuse", "rank 1 is held by the kernel"),
    ("slow", "compute", "rank 1 is busy, and not in all_reduce, where others wait: slow, or spinning"),
], 3))
def test_a_job_that_stands_still(
    kind: str, place: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    with (stuck(tmp_path / "stuck") if kind == "disk" else contextlib.nullcontext(),
          started(HYDRA, None, ZOO, kind, tmp_path, env={"XDG_STATE_HOME": str(tmp_path)}) as job):
        job.await_ready(HYDRA.ranks)
        found = standing(1)
    (odd,) = (group for group in found.groups if group.odd)
    assert odd.ranks == (1,)
    assert place in odd.place.words
    assert any(finding in one for one in found.findings), found.findings
    assert list((tmp_path / "mpiddp").iterdir()) == []
