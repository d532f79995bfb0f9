"""A job that is requeued repeatedly makes progress each time, or ends: real batch scripts, with a shell for Slurm."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest

from mpiddp.base.config import LaunchConfig
from mpiddp.base.errors import LaunchError
from mpiddp.planning.problems import check_time_left
from mpiddp.runner import signals
from mpiddp.runner.stop import Stop
from mpiddp.supervise.decision import Action, Attempt, Limits, decide
from mpiddp.supervise.supervisor import AttemptCounter
from tests import processes
from tests.messages import find, message
from tests.support import DEADLINE_S, MPIS, ROOT, alone, check, mpiexec, need, single_node_environ
from tests.test_cores import machine, ranks

pytestmark = pytest.mark.light

MPICH = MPIS["mpich"]
MOST_STARTS = 4
# Slurm's commands: `srun` starts two ranks, `squeue` tells when the job ends, `scontrol` notes that it is queued again.
COMMANDS = {
    "srun": 'while [ "$1" != python ]; do shift; done\nexec mpirun -n 2 "$@"',
    "mpirun": f'HYDRA_LAUNCHER=fork exec {MPICH.mpiexec} "$@"',
    "squeue": 'case "$*" in *format=%e*) cat end;; esac',
    "scontrol": 'if [ "$1" = requeue ]; then touch requeued; fi',
}
ENDS_AT_ONCE = """\
import os, signal, mpiddp
os.kill(os.getpid(), signal.SIGUSR1)  # like a signal of Slurm while the job starts
open("checkpoint.pt", "a").write("x")
while not mpiddp.should_stop():
    pass
mpiddp.stop_for_requeue()
"""


def queued(folder: Path, name: str, walltime_s: float) -> list[tuple[int, str]]:
    """Run a batch script as Slurm does, again if it requeues itself; return each start's status and output."""
    need(MPICH.missing())
    (folder / "bin").mkdir()
    for command, text in COMMANDS.items():
        (path := folder / "bin" / command).write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (folder / "activate").write_text(f"PATH={folder / 'bin'}:{MPICH.python.parent}:$PATH\n")
    text, edits = re.subn(r'^(MODULES|ENVIRONMENT)=".*"', lambda line: {
        "MODULES": 'MODULES=""', "ENVIRONMENT": f'ENVIRONMENT="{folder / "activate"}"'}[line[1]],
        (ROOT / "batch" / name).read_text(), flags=re.MULTILINE)
    assert edits == 2
    (folder / name).write_text(text)
    starts: list[tuple[int, str]] = []
    while not starts or ((folder / "requeued").exists() and len(starts) < MOST_STARTS):
        (folder / "requeued").unlink(missing_ok=True)
        (folder / "end").write_text(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + walltime_s)))
        done = processes.run("bash", name, timeout=DEADLINE_S, cwd=folder, env={
            **single_node_environ(MPICH), "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": socket.gethostname(),
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_RESTART_COUNT": str(len(starts))})
        starts.append((done.returncode, done.stdout + done.stderr))
    return starts


@pytest.mark.process
def test_a_walltime_that_is_as_short_as_the_stop_is_refused_and_not_queued_again(tmp_path: Path) -> None:
    """The script's own `--stop-before 120`, with `--time=00:02:00`; only squeue knows when the job ends."""
    (tmp_path / "train.py").write_text("import mpiddp\nprint('trains', mpiddp.should_stop())\n")
    (status, said), = queued(tmp_path, "requeue.sh", 120)
    assert status == 3, said
    assert said.count("mpiddp: cannot start: stop-too-early") == 1, said
    (found,) = find("launch/stop_too_early", said, before=120, duration="2 min 0 s")
    assert re.fullmatch(r"(2 min 0|1 min \d+|\d\d) s", found["left"])
    assert "trains" not in said


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["requeue.sh", pytest.param("requeue_mpirun.sh", marks=pytest.mark.thorough)])
def test_two_starts_in_a_row_without_a_step_are_the_last_ones(tmp_path: Path, name: str) -> None:
    """The checkpoint that each start writes is no progress."""
    (tmp_path / "train.py").write_text(ENDS_AT_ONCE)
    first, last = queued(tmp_path, name, 3600)
    assert (first[0], last[0]) == (75, 1), last[1]
    assert message("supervise/requeue", reason=message("supervise/fruitless_start")) in first[1]
    assert last[1].count(message("supervise/no_restart", reason=message("supervise/fruitless_starts"))) == 1
    assert (tmp_path / "checkpoint.pt").stat().st_size == 4


STOPPED = Attempt(("n1",), 60.0, 75, steps=0)
FAILED = Attempt(("n1",), 60.0, 1, "own", "ValueError: seven", "train.py:9 step", 0, "n1", steps=50)


@pytest.mark.parametrize(("attempts", "fruitless", "action"), [
    ([STOPPED], 0, Action.REQUEUE), ([STOPPED], 1, Action.STOP), ([STOPPED], 5, Action.STOP),
    ([STOPPED._replace(steps=1)], 1, Action.REQUEUE), ([STOPPED._replace(steps=None)], 1, Action.REQUEUE),
    ([STOPPED._replace(has_progressed=True)], 1, Action.STOP),  # a checkpoint written at step 0
    ([FAILED, STOPPED], 1, Action.REQUEUE), ([FAILED._replace(steps=0), STOPPED], 1, Action.STOP),
])
def test_what_follows_a_stop(attempts: list[Attempt], fruitless: int, action: Action) -> None:
    assert decide(attempts, ("n1",), Limits(1, 1, 3, fruitless=fruitless)).action is action


def test_fruitless_starts_are_counted_over_requeues(tmp_path: Path) -> None:
    def start(number: int) -> AttemptCounter:
        return AttemptCounter(str(tmp_path), {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(number)})

    for number, (fruitless, before, requeues) in enumerate(
            [(True, 0, 0), (True, 1, 1), (False, 2, 2), (True, 0, 0), (True, 1, 1)]):
        counter = start(number)
        assert (counter.fruitless, counter.requeues, counter.take()) == (before, requeues, number)
        counter.end(fruitless, has_progressed=not fruitless)
    (counter := start(5)).forget()
    assert start(0).fruitless == 0
    assert start(5).requeues == 5, "not stored"
    assert AttemptCounter(str(tmp_path), {}).fruitless == 0


@pytest.fixture
def stop() -> Stop:
    """Return the Stop of a single rank, as if it had received no signal."""
    signals.received = 0
    return Stop()


@pytest.mark.parametrize(("early", "steps"), [(True, 0), (False, 1)])
def test_a_step_is_one_that_was_made(stop: Stop, early: bool, steps: int) -> None:
    try:
        for _ in range(1 - early):
            assert not stop.is_due()
        stop.stop_at(time.time() - 1)
        assert stop.is_due()
        assert stop.is_due()
        assert stop.steps == steps
        assert (stop.left_s() or 0) < 0
    finally:
        stop.release()


@pytest.mark.mpi
def test_a_supervisor_is_told_the_steps_of_a_job_that_stops(tmp_path: Path) -> None:
    """Rank 1 has the reason, after three steps; all agree one step later."""
    (script := tmp_path / "train.py").write_text(
        "import os, signal, mpiddp\nsteps = 0\nwhile not mpiddp.should_stop():\n    steps += 1\n"
        "    if steps == 3 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(f'{steps}\\n', end='', flush=True)\nmpiddp.stop_for_requeue()\n")
    report = tmp_path / "report"
    env = {"MPIDDP_RESTART_COUNT": "0", "MPIDDP_ERROR_FILE": str(report)}
    assert check(mpiexec(MPICH, 2, script, env=env), 75).stdout == "4\n" * 2
    assert Path(f"{report}.steps").read_text() == "4"


@pytest.mark.mpi
def test_a_supervisor_is_told_the_steps_of_a_job_that_succeeds(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("import mpiddp\nfor _ in range(7): assert not mpiddp.should_stop()\n")
    own = ("-m", "mpiddp.supervise", "--history", "h.json", MPICH.python, "-m", "mpiddp")
    check(alone(MPICH, *own, script, cwd=tmp_path))
    (attempt,) = json.loads((tmp_path / "h.json").read_text())["attempts"]
    assert (attempt["steps"], attempt["action"]) == (7, "done")


@pytest.mark.torch
@pytest.mark.mpi
def test_an_epoch_before_the_first_question_is_a_step(tmp_path: Path) -> None:
    """The signal arrives while the script trains its first epoch, before its first call of should_stop()."""
    (script := tmp_path / "train.py").write_text("""\
import os, signal, time, torch, mpiddp
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
begin = time.monotonic()
while time.monotonic() < begin + 1.5:
    optimizer.step()
os.kill(os.getpid(), signal.SIGUSR1)
while not mpiddp.should_stop():
    pass
mpiddp.stop_for_requeue()
""")
    report = tmp_path / "report"
    check(mpiexec(MPICH, 1, script, env={"MPIDDP_RESTART_COUNT": "0", "MPIDDP_ERROR_FILE": str(report)}), 75)
    assert Path(f"{report}.steps").read_text() == "1"


@pytest.mark.parametrize(("left_s", "refused"), [(-1.0, True), (0.0, True), (1.0, False), (None, False)])
def test_a_stop_that_leaves_no_time(left_s: float | None, refused: bool) -> None:
    first = ranks(machine(2), {0})[0]._replace(stop_in_s=left_s)
    check_time_left(first, LaunchConfig())  # without --stop-before
    try:
        check_time_left(first, LaunchConfig(stop_before_s=120.0))
    except LaunchError as error:
        assert refused
        assert error.name == "stop-too-early"
        assert "2 min 0 s" in error.actual
    else:
        assert not refused
