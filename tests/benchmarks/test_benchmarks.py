"""Each benchmark runs; its figures are for people."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cluster import missing_components
from tests.support import ROOT, Mpi, alone, check, mpiexec, need


def test_planning(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.planning", "--quick")).stdout
    assert re.search(r"^ +1,000 +\d+\.\d+ +\d+\.\d+$", table, re.MULTILINE)
    assert re.search(r"checks before torch: \d+\.\d ms", table)


def test_site(quick: Mpi, tmp_path: Path) -> None:
    """An unpacked archive may let the group write to its files, and such a profile is refused."""
    shutil.copyfile(ROOT / "batch/sites/frontier.toml", file := tmp_path / "frontier.toml")
    file.chmod(0o644)
    table = check(alone(quick, "-m", "tests.benchmarks.site", "--quick", file)).stdout
    for name in ("no profile", "frontier.toml"):
        assert re.search(rf"^{name} +(\d+\.\d\d +){{3}}\d+\.\d\d$", table, re.MULTILINE), table


def test_accusing(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.accusing", "20")).stdout
    assert re.search(r"^mpiddp.check +4-1,024 +20 +\d+ +0 +0 +0 ", table, re.MULTILINE), table


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_hold(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.hold", "--quick")).stdout
    for name in ("mpiddp.run", "mpiddp", "torchrun"):
        assert re.search(rf"^{name} +\d+\.\d+ s +\d+\.\d+ of torchrun's$", table, re.MULTILINE), table


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_failure(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.failure", "--quick")).stdout
    for name in ("mpiddp, MPICH mpiexec", "torchrun"):
        assert re.search(rf"^{name} +\d+\.\d\d s +\d+\.\d\d of torchrun's   exit status 1$", table, re.MULTILINE), table


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_flood(quick: Mpi) -> None:
    need(missing_components())
    table = check(alone(quick, "-m", "tests.benchmarks.flood", "--quick", timeout=180)).stdout
    for name in ("steps/s", "start, s"):
        assert re.search(rf"^{name} +[\d.]+ without, +[\d.]+ with a flood, ratio \d\.\d\d$", table, re.MULTILINE), table


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_threads(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.threads", "--quick", timeout=120)).stdout
    assert len(re.findall(r"^1 rank  .* steps/s +\d\.\d\d of torchrun's$", table, re.MULTILINE)) == 6, table


@pytest.mark.thorough("benchmarks run with --all alone")
def test_stopping(quick: Mpi) -> None:
    told = check(mpiexec(quick, 2, ROOT / "tests/benchmarks/stopping.py", 200)).stdout
    assert re.search(r"^should_stop\(\) \d+\.\d us, gloo all-reduce \d+\.\d us, median of 200 calls$", told), told


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_asking(quick: Mpi) -> None:
    told = check(alone(quick, "-m", "tests.benchmarks.asking", "--quick", timeout=120)).stdout
    assert re.search(r"^\d+ steps/s; asked every 0\.\d\d s \d\.\d{4} of that \(median of 1 pairs\), so every 10 s "
                     r"\d\.\d{5}$", told), told


@pytest.mark.thorough("test_asking_changes_nothing, which compares weights, too")
def test_questions(quick: Mpi) -> None:
    told = check(alone(quick, "-m", "tests.benchmarks.questions", "100", timeout=900)).stdout
    for kind in ("plain", "busy"):
        assert re.search(rf"^{kind}: 50 questions in \d+ s, \d+ answers with all stacks; the same weights after [\d,]+ "
                         r"steps$", told, re.MULTILINE), told


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_startup(quick: Mpi, tmp_path: Path) -> None:
    files = tmp_path / "costs.json", tmp_path / "costs.svg"
    options = ["--quick", "--json", files[0], "--svg", files[1]]
    table = check(alone(quick, "-m", "tests.benchmarks.startup", *options)).stdout
    peers = ["mpiddp", "torchrun", "plain recipe", "floor"]
    assert re.findall(r"^  (\w+ ?\w+) +\d+\.\d\d s +\d\.\d\d +\d+\.\d\d s", table, re.MULTILINE) == peers
    assert list(json.loads(files[0].read_text())["2 ranks"]) == peers
    assert "floor" in files[1].read_text()


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_scale(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.scale", "--quick")).stdout
    rows = re.findall(r"^ +(\d) +[\d.]+ +([\d.]+) +[\d.]+ +([\d.]+) +[\d.]+ +[\d.]+ +([\d.]+)$", table, re.MULTILINE)
    assert rows == [("2", "2.0", "5.0", "1.5"), ("4", "2.0", "9.0", "1.2")]
    assert re.search(r"^growth exponent: mpiddp -?\d\.\d\d, env:// -?\d\.\d\d, mpiddp as for NCCL -?\d\.\d\d$", table,
                     re.MULTILINE)
    *parts, whole = map(float, re.findall(r"^ +([\d.]+) s  ", table, re.MULTILINE))
    assert len(parts) == 5 and min(parts) > 0
    assert sum(parts) == pytest.approx(whole, abs=0.03)


@pytest.mark.thorough("benchmarks run with --all alone")
def test_recovery(quick: Mpi, tmp_path: Path) -> None:
    picture = tmp_path / "months.svg"
    told = check(alone(quick, "-m", "tests.benchmarks.recovery", "--quick", "--svg", picture)).stdout
    assert re.findall(r"^(\w\S*(?: \w+)*) +[\d.]+ h lost in a month, \d\.\d\d; \d+ attempts; ", told, re.MULTILINE) == [
        "mpiddp.supervise", "always requeue", "swap the first node"]
    assert "always requeue" in picture.read_text()


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_restarts(quick: Mpi) -> None:
    told = check(alone(quick, "-m", "tests.benchmarks.restarts", "--quick", timeout=300)).stdout
    line = r"^(\w.*?) +\d+\.\d\d s +\d+\.\d\d of torchrun's   back in \d of 1 runs$"
    assert re.findall(line, told, re.MULTILINE) == ["mpiddp.supervise, MPICH", "torchrun"]


@pytest.mark.alone
@pytest.mark.thorough("benchmarks run with --all alone")
def test_output(quick: Mpi) -> None:
    table = check(alone(quick, "-m", "tests.benchmarks.output", "--quick", timeout=200)).stdout
    for name in ("mpiddp --show fold", "torchrun --tee 3 --log-dir", "mpirun --tag-output"):
        assert len(re.findall(rf"^  {name} +[\d.]+ MB/s +\d+ ms of CPU per MB ", table, re.MULTILINE)) == 2, table
    assert len(re.findall(r"^  mpiddp: line-buffered \d+\.\d\d of block-buffered$", table, re.MULTILINE)) == 2, table
    delays = [float(one) for one in re.findall(r"(?:plain|--prefix|--log-dir|--show fold) (\d\.\d+) s", table)]
    assert len(delays) == 4
    assert max(delays) < 1.5, table  # block-buffered, the first of four lines appears after three seconds
