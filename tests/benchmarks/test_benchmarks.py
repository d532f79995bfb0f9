"""Each benchmark runs; its figures are for people."""

from __future__ import annotations

import re

from tests.support import ROOT, Mpi, alone, check, mpiexec


def test_planning(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.planning", "--quick")).stdout
    assert re.search(r"^ +1,000 +\d+\.\d+ +\d+\.\d+$", table, re.MULTILINE)
    assert re.search(r"checks before torch: \d+\.\d ms", table)


def test_failure(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.failure", "--quick")).stdout
    for name in ("mpiddp, MPICH mpiexec", "torchrun"):
        assert re.search(rf"^{name} +\d+\.\d\d s +\d+\.\d\d of torchrun's   exit status 1$", table, re.MULTILINE), table


def test_threads(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.threads", "--quick", timeout=120)).stdout
    assert len(re.findall(r"^1 rank  .* steps/s +\d\.\d\d of torchrun's$", table, re.MULTILINE)) == 5, table


def test_stopping(quick: Mpi) -> None:
    told = check(mpiexec(quick, 2, ROOT / "tests/benchmarks/stopping.py", 200)).stdout
    assert re.search(r"^should_stop\(\) \d+\.\d us, gloo all-reduce \d+\.\d us, median of 200 calls$", told), told
