"""All ranks stop at the same step: by a signal to one of them, or before the walltime."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from mpiddp.act.stop import SIGNALS
from tests.faults.matrix import LAUNCHERS, Launcher
from tests.faults.test_signals import started
from tests.support import MPIS, PROGRAMS, ROOT, Mpi, alone, check, mpiexec

STOPS = PROGRAMS / "stops.py"


def steps(text: str) -> list[str]:
    """Return the step at which each rank stopped."""
    return re.findall(r"^rank \d+ stopped at step (\d+),", text, re.MULTILINE)


def pids(lines: list[str]) -> list[int]:
    """Return the processes of the ranks that are at work."""
    return [int(line.split()[1]) for line in lines if line.startswith("pid ")]


@pytest.mark.parametrize("launcher", LAUNCHERS[:3], ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_at_one_step(launcher: Launcher, number: signal.Signals) -> None:
    with started(launcher, None, STOPS) as job:
        job.await_ready(launcher.ranks)
        time.sleep(0.3)
        os.kill(pids(job.lines)[-1], number)
        text = job.output()
    assert len(steps(text)) == launcher.ranks, text
    assert len(set(steps(text))) == 1, text
    assert text.count(f"mpiddp: time to stop: {number.name} was sent") == 1
    assert "failed" not in text
    assert job.process.returncode == 75, text


TABLE = (ROOT / "batch/README.md").read_text()
COLUMNS = [*LAUNCHERS[:3], Launcher("Intel MPI mpiexec", MPIS["impi"], False), *LAUNCHERS[3:]]
CELLS = [
    (number, to, launcher, word)
    for number, to, cells in re.findall(r"^\| (SIG\w+) \| (launcher|steps) \| (.*) \|$", TABLE, re.MULTILINE)
    for launcher, word in zip(COLUMNS, cells.split(" | "), strict=True) if word != "-"
]


@pytest.mark.parametrize(("number", "to", "launcher", "word"), CELLS,
                         ids=[f"{number} to {to} of {launcher.name}" for number, to, launcher, _ in CELLS])
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
        (number.name, to) for number in SIGNALS for to in ("launcher", "steps")}


def test_the_walltime_stops_all_in_time(quick: Mpi) -> None:
    end = str(int(time.time()) + 12)
    done = mpiexec(quick, 2, "--stop-before", 8, STOPS, env={"SLURM_JOB_END_TIME": end})
    assert done.returncode == 75, done.stderr
    assert len(set(steps(done.stdout))) == 1
    assert done.stderr.count("mpiddp: time to stop: the walltime is near") == 1


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
               "        os.system(f'kill -{int(number)} ' + ' '.join(map(str, workers)))\n"
               "    assert mpiddp.should_stop() and pool.map(abs, [-3]) == [3]\n"
               "    assert {one.pid for one in multiprocessing.active_children()} == set(workers)\n"
               "print('ended')")
    assert check(alone(quick, "-c", program, timeout=30)).stdout == "ended\n"


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
