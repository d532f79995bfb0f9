"""A rank without memory or descriptors ends as under Python, and its own line is named."""

from __future__ import annotations

import pytest

from tests.messages import find
from tests.support import MPICH_FIRST, Mpi, check, first_of, mpiexec

MEMORY = """
import os, resource
if os.environ["RANK"] == "1":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
    kept = []
    while True:
        kept.append({piece})
import torch.distributed as dist
dist.barrier()
"""
FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
kept = []
while True:
    kept.append(open("/dev/null"))
"""


@pytest.mark.torch
@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("piece", "is_line_known"), first_of(
    [("str(len(kept)) * 10", True), ("bytearray(64)", False), ("bytearray(10**6)", True)], 2))
def test_without_memory(mpi: Mpi, piece: str, is_line_known: bool) -> None:
    """Python itself has no memory to note the line if no object of any size fits any more."""
    done = check(mpiexec(mpi, 2, "-c", MEMORY.format(piece=piece)), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    assert report["cause"] == "MemoryError", done.stderr
    if is_line_known:
        assert "  where    <string>:8 <module>\n" in done.stderr
        assert done.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.light
def test_without_descriptors(quick: Mpi) -> None:
    done = check(mpiexec(quick, 1, "-c", FILES), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=0)
    assert report["cause"].startswith("OSError: [Errno 24] Too many open files"), done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert "Error in sys.excepthook" not in done.stderr
