"""What a rank's failure ends: what descends from the rank, and nothing that merely has its variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mpiddp.base.config import RESTART_VARIABLE
from tests import processes
from tests.cluster import Cluster
from tests.support import MPIS, Mpi, first_of, mpiexec, srun

pytestmark = pytest.mark.light

DETACHED = """
import os, signal, subprocess, sys, time
import mpiddp
def start(*command, **options):
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            **options)
rank, say = os.environ["RANK"], lambda pid: print("started", pid, flush=True)
if rank == "0":
    say(start("sleep", "61", start_new_session=True).pid)  # a session of its own
    say(start("sleep", "62", env={}, start_new_session=True).pid)  # and no variables
    done = subprocess.run("sleep 63 >/dev/null 2>&1 & echo $!", shell=True, capture_output=True, text=True)
    say(done.stdout.strip())  # its parent has ended
    done = subprocess.run(["setsid", "sh", "-c", "sleep 64 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
    say(done.stdout.strip())  # so has its parent, which led a session
    if (pid := os.fork()) == 0:
        os.setsid()
        time.sleep(65)
    say(pid)
    sys.stdout.flush()
    END
time.sleep(60)
"""


@pytest.fixture
def spooler() -> Iterator[str]:
    """Yield the path of a socket; what comes there, variables and a command, is started by a daemon, twice detached."""
    path = f"\0mpiddp-tests-spooler-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        source = (
            "import json, os, socket, subprocess, sys\n"
            "listener = socket.socket(fileno=int(sys.argv[1]))\n"
            "while True:\n"
            "    with listener.accept()[0] as one:\n"
            "        asked = json.loads(one.makefile().readline())\n"
            "        if asked['twice']:\n"
            "            done = subprocess.run('setsid sleep 1000 >/dev/null 2>&1 & echo $!', shell=True,\n"
            "                                  env=asked['env'], capture_output=True, text=True)\n"
            "            pid = done.stdout.strip()\n"
            "        else:\n"
            "            pid = subprocess.Popen(['sleep', '1000'], env=asked['env'], start_new_session=True).pid\n"
            "        one.sendall(str(pid).encode())\n")
        daemon = subprocess.Popen([sys.executable, "-c", source, str(listener.fileno())], pass_fds=[listener.fileno()],
                                  start_new_session=True)
    try:
        yield path
    finally:
        processes.end_tree(daemon.pid)
        daemon.wait()


def started(output: str) -> list[int]:
    """Return the processes of which a job has told."""
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("started ")]


def living(pids: list[int]) -> list[str]:
    """Return the command lines of the processes that are there two seconds later, and end them."""
    deadline = time.monotonic() + 2
    while (found := list(filter(is_running, pids))) and time.monotonic() < deadline:
        time.sleep(0.05)
    lines = [" ".join(psutil.Process(pid).cmdline()) for pid in found]
    processes.end_processes([psutil.Process(pid) for pid in found])
    return lines


def is_running(pid: int) -> bool:
    """Tell whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError"], ids=["killed", "raises"])
def test_what_a_rank_has_started_ends_with_it(end: str, quick: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DETACHED.replace("END", end))
    done = mpiexec(quick, 2, script)
    pids = started(done.stdout)
    assert len(pids) == 5, done.stderr
    assert living(pids) == []
    assert done.returncode != 0


@pytest.mark.parametrize("twice", first_of([True, False]), ids=["twice-detached", "a-child"])
def test_what_a_spooler_has_started_for_a_rank_lives_on(
    twice: bool, spooler: str, quick: Mpi, tmp_path: Path
) -> None:
    """The daemon gives it the rank's variables; it was there before the job."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, signal, socket\n"
        "if os.environ['RANK'] == '0':\n"
        "    with socket.socket(socket.AF_UNIX) as one:\n"
        f"        one.connect({spooler!r})\n"
        f"        one.sendall(json.dumps({{'twice': {twice}, 'env': dict(os.environ)}}).encode() + b'\\n')\n"
        "        print('started', one.recv(100).decode(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.pause()\n")
    done = mpiexec(quick, 2, script)
    pids = started(done.stdout)
    assert len(pids) == 1, done.stderr
    assert living(pids) == ["sleep 1000"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that all nodes see."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


def test_a_job_that_a_rank_has_submitted_runs_whatever_becomes_of_the_rank(cluster: Cluster, folder: Path) -> None:
    """It may be a job of mpiddp itself, and is none within a job then: sbatch hands on the rank's variables."""
    out, script = folder / "out", folder / "script.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    command = f'sleep 4; srun --mpi=pmi2 -n 2 {sys.executable} -m mpiddp -c \"print(7 * 191)\"'\n"
        "    done = subprocess.run(['sbatch', '--parsable', '--nodelist=' + os.environ['SLURMD_NODENAME'], '-n', '2',\n"
        f"        '--output={out}', '--wrap', command], check=True, capture_output=True, text=True)\n"
        "    print('submitted', done.stdout.strip(), flush=True)\n"
        "    while 'R' not in subprocess.run(['squeue', '-h', '-o', '%t', '-j', done.stdout.strip()],\n"
        "                                    capture_output=True, text=True).stdout:\n"
        "        time.sleep(0.1)\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "signal.pause()\n")
    done = srun(cluster, MPIS["mpich"], "-N1 -n2", script)
    facts = cluster.wait_for_job(done.stdout.split()[1], 90)
    said = out.read_text()
    assert facts["JobState"] == "COMPLETED", said
    assert said.count("1337") == 2, said


def test_a_job_that_a_supervised_script_starts_writes_no_report_of_its_attempt(quick: Mpi, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = mpiexec(quick, 1, "-c", "import os; raise ValueError(os.environ.get('MPIDDP_ERROR_FILE'))",
                   env={RESTART_VARIABLE: "0", "MPIDDP_ERROR_FILE": str(report)})
    assert done.returncode == 1
    assert "ValueError: None" in report.read_text()
