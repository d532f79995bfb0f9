"""What a rank that has failed may still do, and what the others may: within --abort-grace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    MPICH_FIRST,
    MPIS,
    ROOT,
    TWO_NAMES,
    Mpi,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    single_node_environ,
)

pytestmark = pytest.mark.light

HEAD = "import atexit, os, sys, threading, time\nrank = int(os.environ['RANK'])\n"
ODD_WORDS = """
class Odd(Exception):
    def __str__(self):
        raise KeyError("no words")
if rank == 1:
    raise Odd
time.sleep(600)
"""
TOGETHER = """
open(f"{__file__}.{rank}", "w").close()
while not all(os.path.exists(f"{__file__}.{each}") for each in (0, 1)):
    time.sleep(0.01)
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
COMES_LATE = """
import os, sys, time
from mpiddp import cli
from mpiddp.runner.termination import Termination
from mpiddp.agent.connections import Connections
def make_late(owner, name, rank):
    act = getattr(owner, name)
    def act_late(*arguments):
        if os.environ["PMI_RANK"] == rank:
            time.sleep(1)
        act(*arguments)
    setattr(owner, name, act_late)
{late}
sys.exit(cli.main())
"""
BAD_START = """
import sys
from mpiddp import cli
from mpiddp.reporting import map
map.print_start = lambda *_: int("seven")
sys.exit(cli.main())
"""
RAISES_IN_BETWEEN = """
import mpiddp.runner.termination, torch.distributed
fail_by = mpiddp.runner.termination.Termination.fail_by_exception
def interrupted(ending, error):
    mpiddp.runner.termination.Termination.fail_by_exception = fail_by
    raise {error}
mpiddp.runner.termination.Termination.fail_by_exception = interrupted
if rank == 1:
    raise ValueError("seven")
torch.distributed.barrier()
"""
RAISES_AT_EACH_REPORT = """
import mpiddp.runner.termination
def interrupted(ending, error):
    raise RuntimeError("worker died")
mpiddp.runner.termination.Termination.fail_by_exception = interrupted
if rank == 1:
    raise ValueError("seven")
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


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_an_exception_that_cannot_say_what_it_is(mpi: Mpi, script: Path) -> None:
    script.write_text(HEAD + ODD_WORDS)
    done = check(mpiexec(mpi, 2, script), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    assert report["cause"] == "Odd: <Odd str() failed>"
    assert done.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_a_slow_hook_comes_to_its_end_and_the_others_live_as_long(mpi: Mpi, script: Path) -> None:
    script.write_text(HEAD + TOGETHER + SLOW_HOOK)
    done = check(mpiexec(mpi, 2, script), 1)
    assert done.stdout.splitlines() == ["hook begins", "the other works on", "hook ends"]
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1


@pytest.mark.parametrize("late", ['make_late(Termination, "join_agents", "0")',
                                  'make_late(Connections, "_connect", "1")'], ids=["rank 0", "connection"])
def test_a_rank_is_killed_before_it_is_watched(quick: Mpi, late: str, tmp_path: Path) -> None:
    """MPICH's mpiexec then kills rank 0: it would be blamed, or nobody be left to print a report."""
    (program := tmp_path / "late.py").write_text(COMES_LATE.format(late=late))
    dies = "import os, time; time.sleep(600) if os.environ['RANK'] == '0' else os.kill(os.getpid(), 9)"
    command = mpiexec_command(quick, 2, program, "--no-init", "-c", dies)
    done = processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT)
    assert done.returncode in (9, 137)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    assert report["cause"].startswith("killed by SIGKILL")


@pytest.mark.thorough("the same on one node")
@pytest.mark.parametrize("pmi", ["pmi2", "pmix"])
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
    assert len(find("launch/failed_rank", done.stderr, rank=2, host="node3", cause="ValueError: seven")) == 1


@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize(("end", "status"), first_of([("raise ValueError('seven')", 1), ("sys.exit(7)", 7)]))
def test_threads_and_atexit_functions_of_a_rank_that_fails(mpi: Mpi, end: str, status: int, script: Path) -> None:
    script.write_text(HEAD + LAST_WORK.format(end=end))
    done = check(mpiexec(mpi, 2, script), status)
    assert done.stdout.splitlines() == ["thread ends", "atexit runs"]
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1


def test_os_exit_runs_no_atexit_function(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + LAST_WORK.format(end="os._exit(7)"))
    assert check(mpiexec(quick, 2, script), 7).stdout == ""


@pytest.mark.parametrize("mpi", MPICH_FIRST)
def test_what_takes_longer_is_cut_off(mpi: Mpi, script: Path) -> None:
    script.write_text(HEAD + ENDLESS_WORK)
    done = check(mpiexec(mpi, 2, "--abort-grace", "2", script), 7)
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1
    assert len(find("launch/cleanup_timeout", done.stderr, rank=1, limit="2 s")) == 1


def test_a_hook_that_raises_is_shown_with_what_it_was_to_show(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + BROKEN_HOOK)
    done = check(mpiexec(quick, 2, script), 1)
    assert "KeyError: 'hook'" in done.stderr
    assert done.stderr.index("ValueError: seven") < done.stderr.index("mpiddp: failed: rank 1 on ")


BOTH_FAIL = """
atexit.register(time.sleep, 4)
raise ValueError("seven")
"""
STREAMS = """
import ctypes
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fputs(b"kept", ctypes.c_void_p(libc.fopen((sys.argv[1] + str(rank)).encode(), b"w")))
if rank == 1:
    raise ValueError("seven")
time.sleep(600)
"""
DEAD_WORKER = """
import signal
from torch.utils.data import DataLoader, Dataset
class Killed(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if rank == 1 and index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return index
list(DataLoader(Killed(), num_workers=2))
time.sleep(600)
"""
RAISES_AT_A_CHILDS_END = """
import signal, subprocess
def handler(*_):
    raise {error}("a child has ended")
subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
signal.signal(signal.SIGCHLD, handler)
if rank == 1:
    raise ValueError("seven")
time.sleep(600)
"""
ODD_STREAM = """
class Odd:
    def write(self, text):
        pass
    def flush(self):
        raise RuntimeError("no flush")
sys.stderr = Odd()
if rank == 1:
    raise ValueError("seven")
time.sleep(600)
"""
TERMINATED = """
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pid = os.getpid()
def later():
    time.sleep(0.5)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
threading.Thread(target=later).start()
threading.Thread(target=time.sleep, args=(600,)).start()
"""


def test_several_that_fail_have_one_report_and_their_time(cluster: Cluster) -> None:
    """Each exits by itself under pmi2, and the first to do so takes the others along."""
    mpi = MPIS["impi"]
    done = cluster.run("srun", "--mpi=pmi2", "-N3", "-n3", "sh", "-c",
                       f"cat > /tmp/both.py <<'END'\n{HEAD + BOTH_FAIL}END\nexec {mpi.python} -m mpiddp /tmp/both.py",
                       timeout=DEADLINE_S, env=mpi.environ(), cwd=ROOT)
    assert done.returncode in (1, 137), done.stderr
    assert done.stderr.count("mpiddp: failed: rank ") == 1, done.stderr
    assert message("launch/same_error_everywhere", number=3) in done.stderr
    assert find("launch/cleanup_timeout", done.stderr) == []


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
def test_what_c_streams_hold_is_written(name: str, script: Path, tmp_path: Path) -> None:
    script.write_text(HEAD + STREAMS)
    check(mpiexec(MPIS[name], 2, script, tmp_path / "stream"), 1)
    assert (tmp_path / "stream1").read_text() == "kept"


@pytest.mark.torch
@pytest.mark.parametrize("mpi", MPICH_FIRST)
@pytest.mark.parametrize("turn", [1, *(pytest.param(turn, marks=pytest.mark.thorough) for turn in (2, 3))])
def test_a_loaders_worker_that_is_killed(mpi: Mpi, turn: int, script: Path) -> None:
    """Torch's handler of SIGCHLD raises wherever the rank is by then, also in our own code."""
    script.write_text(HEAD + DEAD_WORKER)
    done = check(mpiexec(mpi, 2, script), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=1)
    worker = "RuntimeError: DataLoader worker .* is killed by signal: Killed|worker .* killed by SIGKILL"
    assert re.match(worker, report["cause"]), done.stderr
    assert "/mpiddp/" not in done.stderr


@pytest.mark.parametrize("error", ["RuntimeError", "ChildProcessError"])
@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi5"], MPIS["openmpi4"], MPIS["mpich"]]), ids=lambda mpi: mpi.name)
def test_a_handler_that_raises_when_the_agent_ends_the_ranks_children(mpi: Mpi, error: str, script: Path) -> None:
    """Under Open MPI the rank then calls MPI_Abort: 4.1's launcher adds no lines to the report."""
    script.write_text(HEAD + RAISES_AT_A_CHILDS_END.format(error=error))
    done = check(mpiexec(mpi, 2, script), 1)
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause="ValueError: seven")) == 1
    assert "a child has ended" not in done.stderr
    assert "terminated normally" not in done.stderr


RAISES_IN_OS_EXIT = """
import signal
def handler(*_):
    raise RuntimeError("a child has ended")
if rank == 1:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    os._exit(7)
time.sleep(600)
"""


INTERRUPTED_HOOK = """
import signal
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
def hook(*_):
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        time.sleep(600)
    except TimeoutError:
        print("the hook goes on", file=sys.stderr, flush=True)
sys.excepthook = hook
if rank == 1:
    raise ValueError("seven")
time.sleep(600)
"""


FAILS_TO_REPORT = """
from mpiddp.runner.termination import Termination
report = Termination._report
def fail_once(*_):
    Termination._report = report
    raise MemoryError
Termination._report = fail_once
if rank == 1:
    raise ValueError("seven")
time.sleep(600)
"""


def test_a_report_that_fails_is_made_again(quick: Mpi, script: Path) -> None:
    """Else the rank would count as finished, and the others would wait for it."""
    script.write_text(HEAD + FAILS_TO_REPORT)
    done = check(mpiexec(quick, 2, script), 1)
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause="ValueError: seven")) == 1


def test_a_hook_that_the_scripts_handler_interrupts(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + INTERRUPTED_HOOK)
    done = check(mpiexec(quick, 2, script), 1)
    assert "the hook goes on" in done.stderr
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause="ValueError: seven")) == 1


def test_a_handler_that_raises_in_os_exit(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + RAISES_IN_OS_EXIT)
    done = check(mpiexec(quick, 2, script), 7)
    assert len(find("launch/failed_rank", done.stderr, rank=1)) == 1
    assert "a child has ended" not in done.stderr


@pytest.mark.parametrize(("error", "cause"), [
    ('RuntimeError("worker died")', "RuntimeError: worker died"), ("SystemExit(0)", "ValueError: seven")])
def test_an_error_before_the_failure_is_reported(quick: Mpi, script: Path, error: str, cause: str) -> None:
    """A signal's handler may raise at any line, also where we are about to report the script's own error."""
    script.write_text(HEAD + RAISES_IN_BETWEEN.format(error=error))
    done = check(mpiexec(quick, 2, script), 1)
    assert len(find("launch/failed_rank", done.stderr, rank=1, cause=cause)) == 1
    assert done.stderr.count("mpiddp: failed: ") == 1
    assert "/mpiddp/" not in done.stderr


def test_an_error_between_registration_and_script_is_reported(quick: Mpi, tmp_path: Path) -> None:
    (program := tmp_path / "bad.py").write_text(BAD_START)
    command = mpiexec_command(quick, 2, program, "-c", "pass")
    done = check(processes.run(*command, timeout=DEADLINE_S, env=single_node_environ(quick), cwd=ROOT), 1)
    (report,) = find("launch/failed_rank", done.stderr, rank=0)
    assert report["cause"].startswith("ValueError: invalid literal"), done.stderr


def test_an_error_that_leaves_the_launcher_ends_the_job(quick: Mpi, script: Path) -> None:
    """As one that a signal's handler raises between two of our own blocks: the rank has not ended in order."""
    script.write_text(HEAD + RAISES_AT_EACH_REPORT)
    done = check(mpiexec(quick, 2, script), 1)
    assert len(find("launch/failed_rank", done.stderr, rank=1)) == 1, done.stderr


def test_a_stream_of_the_scripts_own_that_cannot_be_flushed(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + ODD_STREAM)
    done = check(mpiexec(quick, 2, script), 1)
    assert done.stderr.count("mpiddp: failed: rank 1 on ") == 1


def test_a_handler_that_exits_in_order_while_threads_are_waited_for(quick: Mpi, script: Path) -> None:
    script.write_text(HEAD + TERMINATED)
    assert "failed" not in check(mpiexec(quick, 2, script)).stderr


@pytest.mark.mpi
@pytest.mark.parametrize("name", TWO_NAMES)
def test_a_status_that_a_profiler_swallows(name: str, tmp_path: Path) -> None:
    """That of ranks that stop for requeue tells a batch script not to take the training for done."""
    mpi = MPIS[name]
    (tmp_path / "stops.py").write_text(
        "import mpiddp, os, signal, time\nmpiddp.should_stop()\nos.kill(os.getpid(), signal.SIGUSR1)\n"
        "while not mpiddp.should_stop():\n    time.sleep(0.01)\nmpiddp.stop_for_requeue()\n")
    profile = f"exec {mpi.python} -m cProfile -o {tmp_path}/profile.$$ -m mpiddp {tmp_path}/"
    command = [str(mpi.mpiexec), *mpi.options, "-n", "2", "sh", "-c"]
    for script, status in (("stops.py", 75), ("missing.py", 3)):
        done = processes.run(*command, profile + script, timeout=DEADLINE_S, env=single_node_environ(mpi), cwd=ROOT)
        check(done, status)
    assert len(list(tmp_path.glob("profile.*"))) >= 2
