"""A job that fails leaves no shared memory of MPI's."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.agent.process_cleanup import mapped_segments, remove_unmapped
from tests.leftovers import remove_leftovers
from tests.support import (
    MPICH_FIRST,
    Mpi,
    mpiexec,
)

pytestmark = pytest.mark.light

SOON_S = 5
SHARED = Path("/dev/shm")
MAPS = """
import mmap, os, signal, sys, time
import torch.distributed as dist
with open(sys.argv[1], "r+b") as file:
    both = mmap.mmap(file.fileno(), 0)
paths = {line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line}
print("maps", *sorted(paths - {sys.argv[1]}), flush=True)
dist.barrier()
if dist.get_rank() == 1:
    END
time.sleep(60)
"""


@pytest.fixture
def segment() -> Iterator[Path]:
    """Yield a file in /dev/shm, named as a semaphore of multiprocessing."""
    path = SHARED / f"sem.mp-test{secrets.token_hex(4)}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError"], ids=["killed", "raises"])
def test_shared_memory_of_a_job_that_fails_is_removed(end: str, mpi: Mpi, segment: Path, tmp_path: Path) -> None:
    """Not what another process maps, too; nor, here, what no rank has mapped."""
    script, other = tmp_path / "script.py", SHARED / f"sem.mp-other{secrets.token_hex(4)}"
    script.write_text(MAPS.replace("END", end))
    other.touch()
    try:
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            done = mpiexec(mpi, 2, script, segment)
            paths = {Path(one) for line in done.stdout.splitlines() for one in line.split()[1:]}
            deadline = time.monotonic() + SOON_S
            while (left := [path for path in paths if path.exists()]) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left == []
            assert paths or mpi.name == "impi", done.stderr  # whose have no names any more
            assert segment.exists()
            assert other.exists()
    finally:
        other.unlink()


def test_a_segment_goes_with_the_last_process_that_maps_it(segment: Path) -> None:
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        found = {one for one in mapped_segments("self") if one.path == str(segment)}
        assert len(found) == 1
        remove_unmapped(found)
        assert segment.exists()
    remove_unmapped({one._replace(inode=one.inode + 1) for one in found})  # another file of that name
    assert segment.exists()
    remove_unmapped(found)
    assert not segment.exists()


def test_the_tests_leave_the_semaphores_of_other_jobs(tmp_path: Path) -> None:
    """A process maps them, and does not have them open."""
    (semaphore := tmp_path / "sem.mp-test").write_bytes(bytes(32))
    began_s = semaphore.stat().st_mtime - 1
    descriptor = os.open(semaphore, os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, ctypes.c_long(0))
    os.close(descriptor)  # Python's mmap would keep it
    remove_leftovers(began_s, tmp_path)
    assert semaphore.exists()
    libc.munmap(ctypes.c_void_p(address), mmap.PAGESIZE)
    remove_leftovers(began_s, tmp_path)
    assert not semaphore.exists()


def test_the_tests_leave_the_segments_of_other_jobs(tmp_path: Path) -> None:
    (segment := tmp_path / "mpich_shm_1_0").touch()
    began_s = segment.stat().st_mtime - 1
    with segment.open():
        remove_leftovers(began_s, tmp_path)
        assert segment.exists()
    remove_leftovers(began_s + 2, tmp_path)
    assert segment.exists()
    remove_leftovers(began_s, tmp_path)
    assert not segment.exists()
