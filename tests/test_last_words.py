"""What a rank that has failed may still do, and what the others may: within --abort-grace."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.support import DEADLINE_S, MPIS, ROOT, Mpi, check, mpiexec

HEAD = "import atexit, os, sys, threading, time\nrank = int(os.environ['RANK'])\n"
ODD_WORDS = """
class Odd(Exception):
    def __str__(self):
        raise KeyError("no words")
if rank == 1:
    raise Odd
time.sleep(600)
"""
SLOW_HOOK = """
def hook(*_):
    print("hook begins", flush=True)
    time.sleep(3)
    print("hook ends", flush=True)
sys.excepthook = hook
if rank == 1:
    raise ValueError("seven")
time.sleep(2)
print("the other works on", flush=True)
time.sleep(600)
"""
LAST_WORK = """
def later():
    time.sleep(1)
    print("thread ends", flush=True)
if rank == 1:
    atexit.register(print, "atexit runs", flush=True)
    threading.Thread(target=later).start()
    {end}
time.sleep(600)
"""
ENDLESS_WORK = """
atexit.register(time.sleep, 600)
if rank == 1:
    sys.exit(7)
time.sleep(600)
"""
BROKEN_HOOK = """
def hook(*_):
    raise KeyError("hook")
sys.excepthook = hook
if rank == 1:
    raise ValueError("seven")
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return where to write a script."""
    return tmp_path / "script.py"


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_an_exception_that_cannot_say_what_it_is(mpi: Mpi, script: Path) -> None:
    script.write_text(HEAD + ODD_WORDS)
    start = time.monotonic()
    done = check(mpiexec(mpi, 2, script), 1)
    assert time.monotonic() - start < 25
    assert re.search(r"mpiddp: failed: rank 1 on \S+: Odd: <Odd str\(\) failed>\n", done.stderr)
    assert done.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_a_slow_hook_comes_to_its_end_and_the_others_live_as_long(mpi: Mpi, script: Path) -> None:
    script.write_text(HEAD + SLOW_HOOK)
    done = check(mpiexec(mpi, 2, script), 1)
    assert done.stdout.splitlines() == ["hook begins", "the other works on", "hook ends"]
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1


@pytest.mark.parametrize("pmi", ["pmix", "pmi2"])
def test_a_slow_hook_under_srun(pmi: str, cluster: Cluster, tmp_path: Path) -> None:
    """Under pmi2 each rank exits by itself, and Slurm kills the others as soon as one has."""
    mpi = MPIS["openmpi4" if pmi == "pmix" else "impi"]
    text = (HEAD + SLOW_HOOK).replace("rank == 1", "rank == 2")
    done = cluster.run("srun", f"--mpi={pmi}", "-N3", "-n3", "sh", "-c",
                       f"cat > /tmp/slow.py <<'END'\n{text}END\nexec {mpi.python} -m mpiddp /tmp/slow.py",
                       timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    assert done.returncode in ((1,) if pmi == "pmix" else (1, 137)), done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("hook")] == ["hook begins", "hook ends"]
    assert done.stdout.count("the other works on") == 2
    assert done.stderr.count("mpiddp: failed: rank 2 on node3: ValueError: seven\n") == 1


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("raise ValueError('seven')", 1)])
def test_threads_and_atexit_functions_of_a_rank_that_fails(mpi: Mpi, end: str, status: int, script: Path) -> None:
    script.write_text(HEAD + LAST_WORK.format(end=end))
    done = check(mpiexec(mpi, 2, script), status)
    assert done.stdout.splitlines() == ["thread ends", "atexit runs"]
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1


def test_os_exit_runs_no_atexit_function(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + LAST_WORK.format(end="os._exit(7)"))
    assert check(mpiexec(quick, 2, script), 7).stdout == ""


@pytest.mark.parametrize("mpi", MPIS.values(), ids=MPIS)
def test_what_takes_longer_is_cut_off(mpi: Mpi, script: Path) -> None:
    script.write_text(HEAD + ENDLESS_WORK)
    start = time.monotonic()
    done = check(mpiexec(mpi, 2, "--abort-grace", "2", script), 7)
    assert time.monotonic() - start < 40
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1


def test_a_hook_that_raises_is_shown_with_what_it_was_to_show(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + BROKEN_HOOK)
    done = check(mpiexec(quick, 2, script), 1)
    assert "KeyError: 'hook'" in done.stderr
    assert done.stderr.index("ValueError: seven") < done.stderr.index("mpiddp: failed: rank 1 on ")
