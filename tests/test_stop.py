"""All ranks stop at the same step: by a signal to one of them, or before the walltime."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mpiddp.runner.signals import STOP_SIGNALS
from tests import processes
from tests.cluster import Cluster
from tests.faults.matrix import LAUNCHERS, Launcher
from tests.faults.test_signals import Job, and_whole, started
from tests.messages import find, message
from tests.support import (
    MPIS,
    PROGRAMS,
    ROOT,
    Mpi,
    alone,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

STOPS = PROGRAMS / "stops.py"


def steps(text: str) -> list[str]:
    """Return the step at which each rank stopped."""
    return re.findall(r"^rank \d+ stopped at step (\d+),", text, re.MULTILINE)


def pids(lines: list[str]) -> list[int]:
    """Return the processes of the ranks that are at work."""
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


@pytest.mark.mpi
@and_whole([LAUNCHERS[2], *LAUNCHERS[:2]])
@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_to_one_rank_stops_all_at_one_step(launcher: Launcher, number: signal.Signals) -> None:
    with started(launcher, None, STOPS) as job:
        job.await_ready(launcher.ranks)
        time.sleep(0.3)
        os.kill(pids(job.lines)[-1], number)
        text = job.output()
    assert len(steps(text)) == launcher.ranks, text
    assert len(set(steps(text))) == 1, text
    assert text.splitlines().count(message("launch/time_to_stop", signal=number.name)) == 1
    assert "failed" not in text
    assert job.process.returncode == 75, text


SNIPPET, = re.findall(
    r"```python\n(import mpiddp\n\nfor batch in loader:\n.*?)```", (ROOT / "batch/README.md").read_text(), re.DOTALL)
AROUND_IT = """\
import os, sys, time, torch, mpiddp
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 3000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.zeros(4)

def save_checkpoint():
    open(sys.argv[1] + "/" + os.environ["RANK"], "x").close()

loader = DataLoader(Data(), num_workers=2)
"""


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize(("launcher", "after_s"), first_of([
    (LAUNCHERS[2], 0.3), (LAUNCHERS[1], 0.1), *((LAUNCHERS[2], after_s) for after_s in (0, 0.05, 0.15, 0.6))]),
    ids=lambda one: one.name if isinstance(one, Launcher) else f"{one}")
def test_the_documents_snippet_stops_from_the_start_on(launcher: Launcher, after_s: float, tmp_path: Path) -> None:
    """Its workers are forked before it asks, and the signal is for them too."""
    (script := tmp_path / "train.py").write_text(AROUND_IT + SNIPPET)
    (checkpoints := tmp_path / "checkpoints").mkdir()
    with started(launcher, None, script, checkpoints) as job:
        await_start(job)
        time.sleep(after_s)
        job.process.send_signal(signal.SIGUSR1)
        text = job.output()
    assert job.process.returncode == 75, text
    assert len(list(checkpoints.iterdir())) == launcher.ranks, text


def await_start(job: Job) -> None:
    """Read a job's output up to the start line."""
    assert job.process.stdout
    while not (line := job.process.stdout.readline()).startswith("mpiddp "):
        assert line, job.lines
        job.lines.append(line)


@pytest.mark.parametrize(("number", "library"), first_of([
    (signal.SIGUSR1, "/libmpi.so"), pytest.param(signal.SIGTERM, "/libtorch_cpu.so", marks=pytest.mark.torch),
    (signal.SIGTERM, "/libmpi.so"), pytest.param(signal.SIGUSR1, "/libtorch_cpu.so", marks=pytest.mark.torch)]))
def test_a_signal_in_the_start_counts(number: signal.Signals, library: str, quick: Mpi) -> None:
    """It comes when rank 0 waits in MPI_Init for a rank that is late, and while torch is imported."""
    need(quick.missing())
    rank = [str(quick.python), "-m", "mpiddp", str(STOPS)]
    command = [*mpiexec_command(quick, 1)[:-1], *rank, ":", "-n", "1", "sh", "-c", 'sleep 3; exec "$@"', "late", *rank]
    with processes.start(command, single_node_environ(quick), ROOT, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT) as process:
        try:
            first = await_library(process.pid, rank, library)
            time.sleep(0.3)
            first.send_signal(number)
            text, _ = process.communicate(timeout=60)
        finally:
            processes.end_tree(process.pid)
    assert process.returncode == 75, text
    assert set(steps(text)) <= {"1", "2"}, text


def await_library(launcher: int, command: list[str], library: str) -> psutil.Process:
    """Return the first process of a launcher's that runs a command, once it has loaded a library."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                if process.cmdline() == command and library in Path(f"/proc/{process.pid}/maps").read_text():
                    return process
        time.sleep(0.02)
    raise TimeoutError(f"no process has loaded {library}")


WORKERS = PROGRAMS / "signalled_workers.py"
WORKERS_LEFT = "fork 2\nspawn 2\nforkserver 2\n"  # the workers of each kind that go on
STUCK_ENDED = "{'fork': 0, 'spawn': 0, 'forkserver': -15}\n"  # the status of one in native code, as torch ends it
NUMBERS = first_of([signal.SIGTERM, signal.SIGUSR1])


@pytest.mark.torch
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_loader_workers_of_every_kind_leave_a_signal_to_their_rank(number: signal.Signals, quick: Mpi) -> None:
    need(quick.missing())
    with processes.start([str(quick.python), "-m", "mpiddp", str(WORKERS)], single_node_environ(quick), ROOT,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            (job := Job(process)).await_ready(1)
            for one in psutil.Process(process.pid).children(recursive=True):
                one.send_signal(number)
            text = job.output()
        finally:
            processes.end_tree(process.pid)
    assert process.returncode == 0, text
    assert text.endswith(WORKERS_LEFT + STUCK_ENDED)


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_loader_workers_of_every_kind_under_srun(number: signal.Signals, cluster: Cluster) -> None:
    """Slurm sends the signal to all processes of the step: also to the fork server, and to what counts semaphores."""
    with started(replace(LAUNCHERS[3], count=2), cluster, WORKERS, nodes=2) as job:
        job.await_ready(2)
        cluster.run("scancel", f"--signal={number.name}", "--user=root", timeout=30)
        text = job.output()
    assert job.process.returncode == 0, text
    assert text.count(STUCK_ENDED) == 2, text


@pytest.mark.torch
def test_a_script_that_does_not_ask_ends_by_the_signal(quick: Mpi, tmp_path: Path) -> None:
    """As under plain Python, and its workers with it, although they leave the signal to it."""
    (script := tmp_path / "train.py").write_text(
        "import os, signal, torch\nfrom torch.utils.data import DataLoader\nclass early: should_stop = False\n"
        "for _ in DataLoader(torch.zeros(9), num_workers=2):\n"
        "    if not early.should_stop:\n        os.kill(os.getppid(), signal.SIGUSR1)  # its agent\n")
    done = alone(quick, "-m", "mpiddp", script)
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    assert len(find("launch/outside_signal", done.stderr, signal="SIGUSR1")) == 1


NEVER_ASKS = """\
import os, sys, time
from pathlib import Path
from mpi4py import MPI
print(f"pid {os.getppid()}\\nREADY\\n", end="", flush=True)
if os.environ["RANK"] == "0":
    MPI.COMM_WORLD.Recv(bytearray(1), 1)
else:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    MPI.COMM_WORLD.Send(bytearray(1), 0)
"""
HANDLES_IT = """\
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
for _ in range(2):
    time.sleep(1.2)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.mpi
def test_a_script_that_never_asks_is_told_so_and_goes_on(quick: Mpi, tmp_path: Path) -> None:
    """With --stop-before; one rank waits in native code. MPICH's mpiexec ends by a second SIGTERM: agents get them."""
    (script := tmp_path / "train.py").write_text(NEVER_ASKS)
    launcher = next(one for one in LAUNCHERS if one.mpi == quick)
    with started(launcher, None, "--stop-before", 5, script, tmp_path / "go") as job:
        job.await_ready(launcher.ranks)
        for pid in pids(job.lines):
            os.kill(pid, signal.SIGTERM)
        assert job.process.stdout
        while not find("launch/stop_unasked", job.lines[-1]):
            job.lines.append(job.process.stdout.readline())
            assert job.lines[-1], job.lines
        for pid in pids(job.lines):
            os.kill(pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        text = job.output()
    assert len(find("launch/stop_unasked", text, signal="SIGTERM")) == 1, text
    assert job.process.returncode == 0, text


@pytest.mark.mpi
def test_a_handler_of_a_script_that_never_asks_is_left_alone(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(HANDLES_IT)
    done = check(mpiexec(quick, 2, "--stop-before", 5, script))
    assert (done.stdout.count("handled"), find("launch/stop_unasked", done.stderr)) == (4, []), done.stderr


TABLE = (ROOT / "batch/README.md").read_text()
COLUMNS = [*LAUNCHERS[:3], Launcher("Intel MPI mpiexec", MPIS["impi"], False), *LAUNCHERS[3:]]
CELLS = [
    (number, to, launcher, word)
    for number, to, cells in re.findall(r"^\| (SIG\w+) \| (launcher|steps) \| (.*) \|$", TABLE, re.MULTILINE)
    for launcher, word in zip(COLUMNS, cells.split(" | "), strict=True) if word != "-"
]
QUICK = {("SIGTERM", "launcher", "MPICH mpiexec"), ("SIGTERM", "steps", "srun pmix")}


@pytest.mark.torch
@pytest.mark.mpi
@pytest.mark.parametrize(("number", "to", "launcher", "word"), [
    pytest.param(number, to, replace(launcher, whole=whole), word,
                 id=f"{number} to {to} of {launcher.name}{'-whole' * whole}",
                 marks=pytest.mark.thorough if whole or (number, to, launcher.name) not in QUICK else ())
    for whole in (False, True) for number, to, launcher, word in CELLS])
def test_what_a_signal_does(
    number: str, to: str, launcher: Launcher, word: str, request: pytest.FixtureRequest
) -> None:
    """As the table in batch/README.md says; Slurm sends it to the DataLoader's workers too."""
    cluster = request.getfixturevalue("cluster") if launcher.srun else None
    with started(launcher, cluster, "--stop-before", 1, STOPS, "--seconds", 8, "--workers") as job:
        job.await_ready(launcher.ranks)
        time.sleep(0.5)
        if to == "launcher":
            job.process.send_signal(signal.Signals[number])
        else:
            cluster.run("scancel", f"--signal={number}", "--user=root", timeout=30)
        text = job.output()
    stopped = len(steps(text)) == launcher.ranks and len(set(steps(text))) == 1 and job.process.returncode == 75
    assert ("stops" if stopped else "ends") == word, text
    assert " came to the end " not in text


def test_the_table_has_all_signals() -> None:
    assert {(number, to) for number, to, *_ in CELLS} == {
        (number.name, to) for number in STOP_SIGNALS for to in ("launcher", "steps")}


def test_the_walltime_stops_all_in_time(quick: Mpi) -> None:
    end = str(int(time.time()) + 12)
    done = mpiexec(quick, 2, "--stop-before", 8, STOPS, env={"SLURM_JOB_END_TIME": end})
    assert done.returncode == 75, done.stderr
    assert len(set(steps(done.stdout))) == 1
    assert done.stderr.splitlines().count(message("launch/walltime_near")) == 1


def test_a_walltime_that_nobody_tells(quick: Mpi) -> None:
    done = check(alone(quick, "-m", "mpiddp", "--stop-before", 5, STOPS, "--seconds", 0.1, env={"SLURM_JOB_ID": "1"}))
    assert done.stderr.count("mpiddp: warning: walltime-unknown: ") == 1


def test_a_rank_that_asked_more_often_than_others_does_not_hold_the_end(quick: Mpi) -> None:
    done = check(mpiexec(quick, 3, STOPS, "--seconds", 1, "--uneven", timeout=60))
    assert done.stdout.count("came to the end") == 3


def test_a_program_without_a_launcher_stops_too(quick: Mpi) -> None:
    """It is no job of mpiddp's, and MPI is not started for it."""
    program = ("import mpiddp, os, signal, sys; assert not mpiddp.should_stop(); os.kill(os.getpid(), signal.SIGUSR1);"
               " assert mpiddp.should_stop(); assert 'mpi4py' not in sys.modules; mpiddp.stop_for_requeue()")
    assert alone(quick, "-c", program).returncode == 75


def test_a_script_ends_its_own_processes_after_a_signal_too(quick: Mpi) -> None:
    """What a pool's end sends to its processes is SIGTERM."""
    program = ("import mpiddp, multiprocessing, os, signal\n"
               "mpiddp.should_stop()\n"
               "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
               "    workers = pool.map(abs, range(8)) and [one.pid for one in multiprocessing.active_children()]\n"
               "    for number in (signal.SIGUSR1, signal.SIGTERM):\n"
               "        os.kill(os.getpid(), number)\n"
               "    os.system('kill -USR1 ' + ' '.join(map(str, workers)))\n"
               "    assert mpiddp.should_stop() and pool.map(abs, [-3]) == [3]\n"
               "    assert {one.pid for one in multiprocessing.active_children()} == set(workers)\n"
               "print('ended')")
    assert check(alone(quick, "-c", program, timeout=30)).stdout == "ended\n"


def test_processes_that_a_rank_or_a_worker_starts_obey_as_ever(quick: Mpi) -> None:
    """Signals that are noted, and left to the rank, are not blocked in programs."""
    done = check(alone(quick, "-m", "tests.programs.forks", timeout=60))
    assert done.stdout == "rank: all end\nworker: all end\nended\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_multiprocessing_ends_by_terminate(method: str, quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(
        "import multiprocessing, time\n"
        "def work(pipe):\n"
        "    pipe.send(1)\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('{method}')\n"
        "    ours, its = context.Pipe()\n"
        "    process = context.Process(target=work, args=(its,))\n"
        "    process.start()\n"
        "    ours.recv()\n"
        "    process.terminate()\n"
        "    process.join()\n"
        "    print(process.exitcode)\n")
    assert check(mpiexec(quick, 1, script)).stdout == "-15\n"


@pytest.mark.torch
def test_a_loaders_worker_can_end_its_programs(quick: Mpi) -> None:
    program = ("import mpiddp, subprocess\nfrom torch.utils.data import DataLoader\n"
               "class Data:\n"
               "    def __len__(self): return 4\n"
               "    def __getitem__(self, index):\n"
               "        decoder = subprocess.Popen(['sleep', '1000'])\n"
               "        decoder.terminate()\n"
               "        return decoder.wait()\n"
               "mpiddp.should_stop()\n"
               "print([int(status) for status in DataLoader(Data(), num_workers=2)])")
    assert check(alone(quick, "-c", program, timeout=30)).stdout == "[-15, -15, -15, -15]\n"


def test_a_group_made_again_hears_signals_too(quick: Mpi) -> None:
    program = ("import mpiddp, os, signal\n"
               "for _ in range(2):\n"
               "    with mpiddp.process_group():\n"
               "        assert not mpiddp.should_stop()\n"
               "        os.kill(os.getpid(), signal.SIGUSR1)\n"
               "        assert mpiddp.should_stop()\n"
               "    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL\n"
               "print('ended')")
    assert check(alone(quick, "-c", program, timeout=60)).stdout == "ended\n"


def test_the_status_alone_is_a_failure_like_any_other(quick: Mpi, tmp_path: Path) -> None:
    (script := tmp_path / "quits.py").write_text("import sys; sys.exit(75)")
    done = mpiexec(quick, 2, script)
    assert done.returncode == 75
    assert done.stderr.count("mpiddp: failed: rank ") == 1


def test_a_restart_is_counted(quick: Mpi) -> None:
    done = check(mpiexec(quick, 2, STOPS, "--seconds", 0.1, env={"SLURM_RESTART_COUNT": "3"}))
    assert done.stdout.count("restart 3 3\n") == 2
