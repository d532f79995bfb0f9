"""What jobs say, folded: on one node and on three, at the end, after a crash, faster than it can be shown."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    TWO_NAMES,
    Done,
    Mpi,
    check,
    first_of,
    free_port,
    mpiexec,
    mpiexec_command,
    noise,
    single_node_environ,
    srun,
)

pytestmark = pytest.mark.light

FOLDED = PROGRAMS / "folded.py"


def run(mpi: Mpi, ranks: int, kind: str, *arguments: object, options: Sequence[object] = (), timeout: float = 60
        ) -> Done:
    environ = processes.marked(single_node_environ(mpi))
    done = mpiexec(mpi, ranks, "--quiet", "--show", "fold", *options, FOLDED, kind, *arguments, timeout=timeout,
                   env={**environ, "OMP_NUM_THREADS": "1"})
    assert not processes.leftovers(environ)
    return done


@pytest.mark.parametrize("ranks", first_of([4, 64]))
def test_the_same_lines_are_shown_once(quick: Mpi, ranks: int) -> None:
    """As of one rank, and the odd line of another one in its place."""
    done = check(run(quick, ranks, "same", options=("--fold-window", 100), timeout=240))
    expected = [f"[0-{ranks - 1}] line {number}" for number in range(1000)]
    assert done.stdout.splitlines() == [*expected[:501], f"[{17 % ranks}] an odd line", *expected[501:]]


def test_numbers_are_listed_or_their_range_is_told(quick: Mpi) -> None:
    done = check(run(quick, 8, "numbers", options=("--fold-window", 10)))
    assert done.stdout.splitlines() == [
        *(f"[0-7] step {step} loss 0.25…0.257" for step in (1, 2, 3)), "[0-7] Hello from rank 0…7 of 8"]
    assert noise(done) == ["[0-7] {0,1} errors"]


def test_three_nodes(cluster: Cluster) -> None:
    done = check(srun(cluster, MPIS["openmpi4"], "-N3 --ntasks-per-node=2", "--show", "fold", "--fold-window", 10,
                      "--prefix", "{time.year}-{time:%m} {rank}: ", "--port", free_port(), FOLDED, "numbers"))
    assert re.findall(r"^20\d\d-\d\d 0-5: Hello from rank 0…5 of 6$", done.stdout, re.MULTILINE)
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.alone
@pytest.mark.torch
@pytest.mark.parametrize("name", TWO_NAMES)
def test_all_that_a_rank_has_said_that_crashes_is_shown(name: str, tmp_path: Path) -> None:
    done = run(MPIS[name], 2, "crash", options=("--log-dir", tmp_path))
    lines = done.stdout.splitlines()
    said_by_1 = [line.split()[2].strip("{}").split(",") for line in lines
                 if re.match(r"\[(0-1|1)\] line \S+ of \S+$", line)]
    assert len(said_by_1) == 100_000
    for number, shown in enumerate(said_by_1):
        assert str(number) in shown  # beside one of rank 0, which may be ahead or behind
    assert "[1] last word" in lines
    told, report = done.stderr.split("mpiddp: failed: rank 1 on ")
    assert "[1] last word on stderr" in told.splitlines()
    assert not re.search(r"^\[\d", report, re.MULTILINE), report
    (log,) = tmp_path.glob("*/rank-00001.*.log")
    said = "".join(f"line {number} of 1\n" for number in range(100_000))
    before, stack = log.read_text().split("\nFatal Python error: ")
    assert before == f"{said}last wordlast word on stderr"
    frame = rf'File "{FOLDED}", line \d+ in <module>'
    assert re.match(rf"Segmentation fault\nCurrent thread \w+ .*:\n  {frame}\n", stack)
    assert "mpiddp: failed: rank 1 on " in stack


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
def test_the_report_comes_after_all_that_was_said_before(name: str) -> None:
    done = check(run(MPIS[name], 3, "raise"), 1)
    assert "[0-2] before" in done.stdout.splitlines()
    assert "[0,2] working" in done.stdout.splitlines()
    told, report = done.stderr.split("mpiddp: failed: ")
    assert "[1] [rank1]: ValueError: seven" in told
    assert not re.search(r"^\[\d", report, re.MULTILINE), report
    assert report.startswith("rank 1 on ")


def test_a_rank_that_says_more_than_others_waits_for_them(quick: Mpi) -> None:
    done = check(run(quick, 2, "alone", 30_000))
    assert done.stdout.splitlines() == [f"[1] only rank 1 says {'x' * (number % 70)}" for number in range(30_000)]


def test_what_cannot_be_shown_in_time_is_dropped_and_counted(quick: Mpi, tmp_path: Path) -> None:
    """The terminal takes 58 KB a second; the log has all."""
    job = mpiexec_command(quick, 2, PROGRAMS / "slow_reader.py", quick.python, "-m", "mpiddp", "--quiet", "--show",
                          "fold", "--overflow", "drop", "--log-dir", tmp_path, FOLDED, "alone", 20_000)
    done = check(processes.run(*job, timeout=60, env=single_node_environ(quick)))
    lines = done.stdout.splitlines()
    dropped = [int(note["count"]) for note in find("launch/lines_dropped", done.stdout)]
    assert dropped
    assert len(lines) - len(dropped) + sum(dropped) == 20_000
    (log,) = tmp_path.glob("*/rank-00001.*.log")
    assert len(log.read_text().splitlines()) == 20_000


def test_rank_0_may_lead_its_own_output_elsewhere(quick: Mpi) -> None:
    done = check(run(quick, 3, "redirects"))
    assert done.stdout.splitlines() == [f"[1-2] line {number} {'x' * 200}" for number in range(300)]


def test_a_slow_terminal_is_waited_for_to_the_end(quick: Mpi) -> None:
    """Rank 0's agent waits for the terminal while the other ranks end."""
    job = mpiexec_command(quick, 3, PROGRAMS / "slow_reader.py", quick.python, "-m", "mpiddp", "--quiet", "--show",
                          "fold", FOLDED, "alone", 6000)
    done = check(processes.run(*job, timeout=60, env=single_node_environ(quick)))
    assert done.stdout.splitlines() == [f"[1] only rank 1 says {'x' * (number % 70)}" for number in range(6000)]


def test_parts_of_a_job_that_fold_and_that_do_not_are_refused(quick: Mpi) -> None:
    words = ["-n", "1", quick.python, "-m", "mpiddp", FOLDED, "numbers"]
    job = [*mpiexec_command(quick, 1, "-m", "mpiddp", "--show", "fold", FOLDED, "numbers"), ":", *map(str, words)]
    done = check(processes.run(*job, timeout=60, env=single_node_environ(quick)), 3)
    assert done.stderr.count("mpiddp: cannot start: options-differ") == 1


@pytest.mark.timeout(300)
def test_a_line_is_shown_when_all_have_said_it(quick: Mpi, tmp_path: Path) -> None:
    command = mpiexec_command(quick, 2, "-m", "mpiddp", "--quiet", "--show", "fold", "--fold-window",
                              1000, FOLDED, "waits", tmp_path / "go")
    job = processes.start(command, single_node_environ(quick), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "[0-1] before\n"
        (tmp_path / "go").touch()
        assert job.stdout.read() == "[0-1] after\n"
        assert job.wait(DEADLINE_S) == 0
    finally:
        processes.end_tree(job.pid)


def test_a_bar_is_drawn_in_its_place_on_a_terminal(quick: Mpi) -> None:
    command = [str(quick.python), "-m", "mpiddp", "--quiet", "--show", "fold", str(FOLDED), "bar", "20"]
    said = processes.run_on_terminal(command, {**single_node_environ(quick), "TERM": "xterm"})
    drawn = re.findall(rb"\r\x1b\[K\[0\] \d+% of rank 0", said)
    assert 3 <= len(drawn) <= 12
    assert said.endswith(b"\r\x1b[K[0] 100%\r\n")


def test_a_bar_in_a_file_takes_a_line_every_ten_seconds(quick: Mpi) -> None:
    done = check(run(quick, 2, "bar", 20))
    assert [re.sub(r"\d+%", "N%", line) for line in noise(done)] == ["[0] N% of rank 0", "[0-1] N%"]


@pytest.mark.parametrize("prefix", ["{host} ", "{local_rank}: {rank}", "{rank:05d} "])
def test_a_prefix_that_lines_of_several_ranks_cannot_have(quick: Mpi, prefix: str) -> None:
    done = check(mpiexec(quick, 2, "--show", "fold", "--prefix", prefix, FOLDED, "numbers"), 2)
    assert done.stderr.count(message("launch/prefix_cannot_be_folded", prefix=repr(prefix))) == 1
