"""Restarts: the decision, the command, and real jobs with faults."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from mpiddp.base.files import append_suspects
from mpiddp.failure.root_cause import OUT_OF_MEMORY, ReportKind
from mpiddp.supervise import attempt as attempts
from mpiddp.supervise.allocation import exclude_nodes, find_allocation
from mpiddp.supervise.attempt import AttemptProcess, make_attempt
from mpiddp.supervise.command import CommandError, make_command, parse_command, runs_job, take_our_options
from mpiddp.supervise.decision import (
    Action,
    Attempt,
    Decision,
    Limits,
    decide,
    decide_after_signal,
    find_device_fault,
    find_suspects,
)
from mpiddp.supervise.supervisor import read_checkpoint_state
from mpiddp.systems.launchers import MPIRUN, NO_LAUNCHER, SRUN, JobStep, describe_steppers
from mpiddp.systems.schedulers import NO_SCHEDULER, SLURM
from tests import processes
from tests.benchmarks import recovery
from tests.cluster import Cluster
from tests.cluster.cluster import BRIDGE, RUN, ip, namespace
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    PROGRAMS,
    ROOT,
    Done,
    Mpi,
    alone,
    check,
    first_of,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

COUNTS = PROGRAMS / "counts.py"
POOL = ("n1", "n2", "n3")
TWO = Limits(2, 2, 3)
RAISED = Attempt(POOL[:2], 60.0, 1, ReportKind.ERROR, "ValueError: seven at 0x7f01", "train.py:9 step", 2,
                 "n2", steps=50)
CRASHED = RAISED._replace(kind=ReportKind.PROCESS_EXIT, cause="ended by SIGSEGV", where="", signal="SIGSEGV")
LOST = CRASHED._replace(kind=ReportKind.UNREACHABLE, cause="is gone, and its agent with it", silent=("n2",),
                        signal="")
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
DEVICE = RAISED._replace(kind=ReportKind.SECONDARY, cause=ECC, device=ECC)
NOT_READY = DEVICE._replace(device="RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable")
MEMORY = f"ended by SIGKILL: {OUT_OF_MEMORY}"
ELSEWHERE = CRASHED._replace(rank=0, host="n1", steps=70)
AGAIN, STOP, REQUEUE = Action.AGAIN, Action.STOP, Action.REQUEUE


@pytest.mark.parametrize(("attempts", "limits", "action", "nodes", "without"), [
    ([RAISED._replace(status=0, kind="")], TWO, Action.DONE, (), ()),
    ([RAISED._replace(status=75, kind="")], TWO, REQUEUE, (), ()),
    ([RAISED], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED, RAISED], TWO, STOP, (), ()),
    ([RAISED, RAISED._replace(cause="ValueError: seven at 0x7f55")], TWO, STOP, (), ()),
    ([RAISED, RAISED._replace(steps=51)], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED, RAISED._replace(steps=0)], TWO, STOP, (), ()),
    ([RAISED, RAISED._replace(steps=20, has_progressed=False)], TWO, STOP, (), ()),
    ([RAISED, RAISED._replace(steps=20, has_progressed=True)], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED, RAISED._replace(has_progressed=True)], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED, RAISED._replace(cause="KeyError: 7")], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED._replace(steps=None), RAISED._replace(steps=None, seconds=62)], TWO, STOP, (), ()),
    ([RAISED._replace(steps=None), RAISED._replace(steps=None, seconds=120)], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED._replace(steps=None, seconds=0.5), RAISED._replace(steps=None, seconds=4.0)], TWO, STOP, (), ()),
    ([RAISED._replace(steps=None, seconds=0.5), RAISED._replace(steps=None, seconds=9.0)], TWO, AGAIN, POOL[:2], ()),
    ([RAISED], Limits(2, 2, 0), STOP, (), ()),
    ([RAISED], Limits(2, 2, 3, left_s=20), REQUEUE, (), ()),
    ([RAISED._replace(outside=True, signal="SIGTERM")], TWO, STOP, (), ()),
    ([Attempt(POOL[:2], 1, 2)], TWO, STOP, (), ()),
    ([Attempt(POOL[:2], 1, 3)], TWO, STOP, (), ()),
    ([RAISED, Attempt(POOL[:2], 9, 1, silent=("n1",))], TWO, AGAIN, ("n2", "n3"), ("n1",)),
    ([LOST], TWO, AGAIN, ("n1", "n3"), ("n2",)),
    ([DEVICE], TWO, AGAIN, ("n1", "n3"), ("n2",)),
    ([LOST._replace(silent=())], TWO, AGAIN, ("n1", "n2"), ()),
    ([LOST], Limits(3, 3, 3), REQUEUE, (), ("n2",)),
    ([RAISED._replace(drained=("n1",))], TWO, AGAIN, ("n2", "n3"), ("n1",)),
    ([RAISED._replace(drained=("n3",)), LOST], TWO, REQUEUE, (), ("n2",)),  # the spare node is drained
    ([LOST], Limits(3, 2, 3), AGAIN, ("n1", "n3"), ("n2",)),
    ([LOST, ELSEWHERE._replace(nodes=("n1", "n3"))], TWO, AGAIN, ("n1", "n3"), ()),
    ([CRASHED, CRASHED._replace(rank=3, steps=90)], TWO, AGAIN, ("n1", "n3"), ("n2",)),  # both faults on one node
    ([RAISED._replace(status=75)], TWO, AGAIN, POOL[:2], ()),  # by sys.exit(75)
    ([NOT_READY], TWO, AGAIN, ("n1", "n3"), ("n2",)),
    ([NOT_READY, NOT_READY._replace(nodes=("n1", "n3"), host="n3")], TWO, STOP, (), ()),  # caused by the script
    ([DEVICE, DEVICE._replace(nodes=("n1", "n3"), host="n3")], Limits(2, 1, 3), AGAIN, ("n1",), ("n3",)),
    ([NOT_READY, NOT_READY._replace(nodes=("n1", "n3"), host="n3", steps=90)], Limits(2, 1, 3), AGAIN, ("n1",), (
        "n3",)),
    ([RAISED._replace(kind="", cause="", where="", rank=None, status=143)], TWO, STOP, (), ()),
    ([RAISED._replace(kind="", cause="", where="", rank=None, status=143, silent=("n2",))], TWO, AGAIN, ("n1", "n3"), (
        "n2",)),
    ([CRASHED._replace(outside=True, signal="SIGTERM", silent=("n2",))], TWO, AGAIN, ("n1", "n3"), ("n2",)),  # n2 ends
    ([RAISED, CRASHED._replace(outside=True, signal="SIGUSR1", steps=0)], TWO, REQUEUE, (), ()),
    ([RAISED, CRASHED._replace(outside=True, signal="SIGUSR1")], TWO, STOP, (), ()),
    ([RAISED._replace(kind="", cause="", where="", rank=None, status=120)], TWO, STOP, (), ()),
    ([LOST._replace(steps=0)], Limits(3, 3, 3, requeues=2), REQUEUE, (), ("n2",)),
    ([LOST._replace(steps=0)], Limits(3, 3, 3, requeues=3), STOP, (), ("n2",)),
    ([LOST], Limits(3, 3, 3, requeues=3), REQUEUE, (), ("n2",)),
    ([LOST._replace(steps=1)], Limits(3, 3, 3, requeues=3), STOP, (), ("n2",)),  # its first step was not done
    ([LOST._replace(steps=1, has_progressed=True)], Limits(3, 3, 3, requeues=3), STOP, (), ("n2",)),
    ([LOST._replace(has_progressed=False)], Limits(3, 3, 3, requeues=3), STOP, (), ("n2",)),
    ([RAISED._replace(steps=0)], Limits(2, 2, 3, 5.0, requeues=9), STOP, (), ()),
    ([CRASHED._replace(kind=ReportKind.SECONDARY), CRASHED._replace(kind=ReportKind.SECONDARY, rank=3, steps=90)], TWO,
     AGAIN, POOL[:2], (
        )),
    ([CRASHED._replace(steps=None, seconds=900.0), ELSEWHERE._replace(steps=None, seconds=900.0)], TWO, AGAIN, POOL[:2],
     ()),
    ([CRASHED._replace(steps=None), ELSEWHERE._replace(steps=None)], TWO, STOP, (), ()),
    ([CRASHED, CRASHED._replace(rank=3)], TWO, STOP, (), ()),  # a bug, which can hit any rank
    ([CRASHED, CRASHED._replace(rank=3, steps=90, cause=MEMORY)], TWO, AGAIN, ("n1", "n2"), ()),
    ([CRASHED, CRASHED._replace(rank=2, steps=90)], TWO, AGAIN, ("n1", "n2"), ()),
    ([CRASHED, ELSEWHERE, CRASHED._replace(rank=3, steps=90)], TWO, AGAIN, ("n1", "n2"), ()),
    ([RAISED, RAISED._replace(rank=3, cause="KeyError: 7")], TWO, AGAIN, ("n1", "n2"), ()),
    ([CRASHED._replace(rank=None, host="", cause="ranks have waited in unlike calls")], TWO, AGAIN, ("n1", "n2"), ()),
])
def test_what_is_decided(
    attempts: list[Attempt], limits: Limits, action: Action, nodes: tuple[str, ...], without: tuple[str, ...]
) -> None:
    found = decide(attempts, POOL, limits)
    assert (found.action, found.nodes, found.without) == (action, nodes, without)
    assert bool(found.why) == ((action is not Action.DONE and attempts[-1].host != "") or bool(without) or action in (
        STOP, REQUEUE))


@pytest.mark.parametrize(("attempts", "limits", "name", "fields"), [
    ([RAISED._replace(status=75, kind="")], TWO, "supervise/stopped_by_itself", {}),
    ([RAISED], TWO, "supervise/node_healthy", {"node": "n2"}),
    ([RAISED], Limits(2, 2, 0), "supervise/restart_limit", {"limit": 0}),
    ([RAISED], Limits(2, 2, 3, left_s=20), "supervise/walltime_near", {"left": "20 s"}),
    ([RAISED, RAISED], TWO, "supervise/same_failure_after_steps", {"steps": 50, "reason": RAISED.reason}),
    ([RAISED, RAISED._replace(has_progressed=False)], TWO, "supervise/same_failure_no_checkpoint", {}),
    ([RAISED._replace(outside=True, signal="SIGTERM")], TWO, "supervise/killed_from_outside", {"signal": "SIGTERM"}),
    ([Attempt(POOL[:2], 1, 2)], TWO, "supervise/bad_command_line", {}),
    ([Attempt(POOL[:2], 1, 3)], TWO, "supervise/cannot_start", {}),
    ([Attempt(POOL[:2], 1, 120)], TWO, "supervise/output_lost", {}),
    ([LOST], Limits(3, 3, 3), "supervise/node_silent", {"node": "n2"}),
    ([RAISED._replace(drained=("n1",))], TWO, "supervise/node_drained", {"node": "n1"}),
    ([LOST], Limits(3, 3, 3), "supervise/too_few_nodes", {"needed": 3, "left": 2, "nodes": 3}),
    ([LOST], Limits(3, 2, 3), "supervise/continue_on_fewer", {"left": 2, "nodes": 3}),
    ([LOST._replace(steps=0)], Limits(3, 3, 3, requeues=3), "supervise/requeue_limit", {"requeues": 3}),
    ([DEVICE], TWO, "supervise/faulty_device", {"node": "n2", "error": ECC}),
    ([CRASHED, CRASHED._replace(rank=3, steps=90)], TWO, "supervise/many_faults",
     {"faults": 2, "all": 2, "node": "n2"}),
])
def test_why(attempts: list[Attempt], limits: Limits, name: str, fields: dict[str, object]) -> None:
    assert len(find(name, decide(attempts, POOL, limits).why, **fields)) == 1


@pytest.mark.parametrize(("found", "name", "attempts", "action"), [
    (AGAIN, "SIGUSR1", [RAISED], REQUEUE), (AGAIN, "SIGTERM", [RAISED], REQUEUE), (AGAIN, "SIGINT", [RAISED], STOP),
    (AGAIN, "SIGUSR1", [RAISED._replace(steps=0)], STOP), (STOP, "SIGUSR1", [RAISED], STOP),
    (STOP, "SIGUSR1", [RAISED, CRASHED._replace(steps=0, outside=True, signal="SIGUSR1")], REQUEUE),
    (Action.DONE, "SIGTERM", [RAISED._replace(status=0)], Action.DONE),
    (REQUEUE, "SIGINT", [CRASHED._replace(outside=True, signal="SIGINT", silent=("n2",))], STOP),
    (REQUEUE, "SIGINT", [CRASHED], STOP), (REQUEUE, "SIGHUP", [CRASHED], STOP),
    (REQUEUE, "SIGTERM", [CRASHED], REQUEUE),
    (REQUEUE, "SIGINT", [RAISED._replace(status=75, kind="")], REQUEUE),
])
def test_a_signal_between_two_attempts(found: Action, name: str, attempts: list[Attempt], action: Action) -> None:
    words = {REQUEUE: message("supervise/signal_then_requeue", signal=name),
             STOP: message("supervise/signal_received", signal=name)}
    expected = Decision(action, "" if action is found else words[action])
    assert decide_after_signal(Decision(found, ""), name, attempts) == expected


def test_one_node_alone_is_not_left_out() -> None:
    alone = CRASHED._replace(nodes=("n2",))
    assert decide([alone, alone._replace(rank=3, steps=90)], ("n2",), Limits(1, 1, 3)).action is AGAIN


def test_what_a_checkpoint_is(tmp_path: Path) -> None:
    """A file, a folder of files, or a folder of folders, which may be overwritten in place."""
    (folder := tmp_path / "step-100").mkdir()
    (file := folder / "0_0.distcp").write_text("seven")
    for path in (file, folder, tmp_path):
        before = read_checkpoint_state(str(path))
        assert before == read_checkpoint_state(str(path))
        file.write_text(file.read_text() + "seven")
        assert read_checkpoint_state(str(path)) not in (before, ())
    assert read_checkpoint_state("") == read_checkpoint_state(str(tmp_path / "nowhere")) == ()


ODD_ENTRIES = """
import os, sys
folder = sys.argv[1]
with open(os.path.join(folder, "steps"), "a") as file:
    file.write("x")
if os.path.getsize(os.path.join(folder, "steps")) < 3:
    raise ValueError("seven")
"""  # fails twice, and has written a checkpoint each time


def test_an_odd_entry_does_not_hide_progress(quick: Mpi, tmp_path: Path) -> None:
    """A dangling link and a link to itself: the files beside them are still checked."""
    (checkpoints := tmp_path / "checkpoints").mkdir()
    (checkpoints / "latest").symlink_to("step-100")
    (checkpoints / "loop").symlink_to("loop")
    (script := tmp_path / "fails.py").write_text(ODD_ENTRIES)
    done = check(alone(quick, "-m", "mpiddp.supervise", "--progress-file", checkpoints, "--dir", tmp_path, quick.python,
                       "-m", "mpiddp", "--no-init", script, checkpoints))
    assert [restart["number"] for restart in find("supervise/restart", done.stderr, limit=3)] == ["1", "2"], done.stderr


def test_what_speaks_against_nodes() -> None:
    found = find_suspects([LOST, DEVICE._replace(rank=4, host="n3")], POOL)
    assert [(one.host, one.attempt) for one in found] == [("n2", 0), ("n3", 1)]
    assert found[0].evidence == message("supervise/node_silent", node="n2")
    assert found[1].evidence == message("supervise/faulty_device", node="n3", error=ECC)


def test_a_rank_names_its_host_shorter_than_the_batch_system() -> None:
    nodes = ("n1.site.org", "n2.site.org", "10.0.0.1", "10.0.0.2")
    assert [one.host for one in find_suspects([DEVICE], nodes)] == ["n2.site.org"]
    assert [one.host for one in find_suspects([DEVICE._replace(host="n1.other.org")], nodes)] == ["n1.site.org"]
    assert find_suspects([DEVICE._replace(host="10.0.0.3")], nodes) == []
    assert find_suspects([DEVICE], ("n2.a", "n2.b")) == []


def test_two_of_many_faults_on_a_node_are_a_coincidence() -> None:
    spread = [CRASHED._replace(rank=node, host=f"n{node}", steps=node) for node in range(100)]
    twice = CRASHED._replace(rank=1007, host="n7", steps=7)
    assert find_suspects([*spread, twice], [f"n{node}" for node in range(1000)]) == []


def test_months_of_a_thousand_nodes() -> None:
    found = recovery.compare(3)
    ours = found["mpiddp.supervise"]
    assert sum(one.healthy_out for one in ours) == 0
    assert all((one.lemon_out_after or 0) <= 3 for one in ours)
    assert sum(one.lost_h for one in ours) < 0.5 * min(
        sum(one.lost_h for one in outcomes) for name, outcomes in found.items() if outcomes is not ours)


OPEN_MPI_SAYS, HYDRA_SAYS = "mpirun (Open MPI) 4.1.4", "HYDRA build details:"
PROGRAMS_THERE = ("python", "python3.11", "./a.out", "ch-run")
JOB = ("python3.11", "-m", "mpiddp", "train.py")


@pytest.mark.parametrize(("command", "version", "nodes", "started"), [
    (("srun", "--mpi=pmix", *JOB), "", ("n1", "n3"), (
        "srun", "--overlap", "--nodes=2", "--ntasks=4", "--nodelist=n1,n3", "--job-name=s", "--mpi=pmix", *JOB)),
    (("mpirun", "--bind-to", "none", *JOB), OPEN_MPI_SAYS, ("n1", "n3"), (
        "mpirun", "-n", "4", "--host", "n1:2,n3:2", "-x", "A", "-x", "B", "--bind-to", "none", *JOB)),
    (("/opt/bin/mpiexec", "-n", "2", *JOB), HYDRA_SAYS, (), ("/opt/bin/mpiexec", "-n", "2", *JOB)),
    (("mpiexec", *JOB), HYDRA_SAYS, ("n1", "n3"), ("mpiexec", "-n", "4", "-hosts", "n1,n3", "-ppn", "2", *JOB)),
    (("mpiexec", "./a.out", "--nodes=2"), HYDRA_SAYS, (), ("mpiexec", "-n", "2", "./a.out", "--nodes=2")),
    (("srun", "-p", "main", "ch-run", "-w", "image", "--", *JOB), "", ("n1",), (
        "srun", "--overlap", "--nodes=1", "--ntasks=2", "--nodelist=n1", "--job-name=s", "-p", "main", "ch-run", "-w",
        "image", "--", *JOB)),
    (JOB, "", (), JOB),
    (("./own.sh", "-n", "4"), "", (), ("./own.sh", "-n", "4")),
])
def test_the_command_on_some_nodes(
    command: tuple[str, ...], version: str, nodes: tuple[str, ...], started: tuple[str, ...]
) -> None:
    where = JobStep(nodes, 2, "s", ["A", "B"])
    assert tuple(make_command(parse_command(command, version, PROGRAMS_THERE.__contains__), where)) == started


def test_what_a_command_asks_for() -> None:
    found = parse_command(("mpirun", "-np", "8", "python", "-m", "mpiddp", "--error-file=e.json", "train.py"),
                          OPEN_MPI_SAYS,
                          PROGRAMS_THERE.__contains__)
    assert (found.launcher, found.tasks, found.options, found.error_file) == (MPIRUN, 8, (), "e.json")
    assert found.rest == ("python", "-m", "mpiddp", "train.py")
    theirs = ("srun", "--mpi=pmix", "python", "a.py", "-n", "4", "--error-file", "x")
    assert parse_command(theirs, "", PROGRAMS_THERE.__contains__)[3:] == (theirs[2:], None, None, "", "")


@pytest.mark.parametrize(("words", "found"), [
    ("python -m mpiddp --prefix --error_file e --abort-grace 9 t.py --error-file /dev/null",
     ("python -m mpiddp --prefix --abort-grace=9 t.py --error-file /dev/null", "e", "9")),
    ("mpiddp --explain 3 --error-file e -m t --abort-grace 9", ("mpiddp --explain 3 -m t --abort-grace 9", "e", "")),
    ("ch-run -b mpiddp image -- python -m mpiddp --log-dir logs t.py", (
        "ch-run -b mpiddp image -- python -m mpiddp --log-dir logs t.py", "", "")),
    ("./own.sh --error-file e", ("./own.sh --error-file e", "", "")),
    ("python -m mpiddp --error-file", ("python -m mpiddp", "", "")),
])
def test_the_options_of_the_job(words: str, found: tuple[str, str, str]) -> None:
    assert take_our_options(words.split()) == (tuple(found[0].split()), *found[1:])


def test_a_value_that_is_called_as_a_program() -> None:
    command = ("srun", "-p", "python", "--qos", "python3.11", "-A", "ch-run", *JOB)
    assert parse_command(command, "", PROGRAMS_THERE.__contains__).rest == JOB
    mpirun = ("mpirun", "--map-by", "python", "--mca", "python", "python", "-n", "2", *JOB)
    assert parse_command(mpirun, OPEN_MPI_SAYS, PROGRAMS_THERE.__contains__)[2:5] == (mpirun[1:6], JOB, 2)


def test_what_a_report_says_of_devices() -> None:
    nccl = "Traceback …\n    raise Error('ecc error')\nncclSystemError\nLast error:\nuncorrectable ECC error on GPU 3"
    told = {"message": "seven", "kind": ReportKind.SECONDARY, "cause": "ncclSystemError", "rank": 3, "host": "n2"}
    assert make_attempt(POOL, 7.0, 1, {**told, "py_callstack": nccl}).device == "uncorrectable ECC error on GPU 3"
    assert make_attempt(POOL, 7.0, 1, {**told, "py_callstack": nccl.rpartition("\n")[0]}).device == ""
    assert make_attempt(POOL, 7.0, 1, {**told, "cause": ECC}).device == ECC
    assert find_device_fault("cudaErrorNotReady: device not ready") == ""


@pytest.mark.parametrize(("command", "error"), [
    *((("srun", option, *JOB), message("supervise/node_options", option=option, launcher="srun"))
      for option in ("-N2", "--nodelist=n1")),
    *(((program, option, "n1", *JOB), message("supervise/host_options", option=option, launcher="Open MPI's mpirun"))
      for program, option in (("mpirun", "-H"), ("mpiexec", "-hosts"))),
    (("mpirun", *JOB, ":", "-n", "1", "./a.out"), message("supervise/several_programs")),
    (("mpirun", "-n", "all", *JOB), message("supervise/ranks_not_positive", option="-n", value="all")),
    (("srun", "--mpi=pmix", "nowhere"), message("supervise/no_program", command="srun --mpi=pmix nowhere")),
])
def test_a_command_that_cannot_be_started_on_chosen_nodes(command: tuple[str, ...], error: str) -> None:
    with pytest.raises(CommandError, match=f"^{re.escape(error)}$"):
        parse_command(command, OPEN_MPI_SAYS, PROGRAMS_THERE.__contains__)


def test_nodes_that_are_excluded(tmp_path: Path) -> None:
    nodes, file = ("n016", "n017", "n018.site.org"), tmp_path / "bad.txt"
    append_suspects(str(file), [("n018", "sends at 0.48 of the median"), ("n099", "silent")])
    assert exclude_nodes(nodes, str(file)) == ("n016", "n017")
    file.write_text("n016\n")
    assert exclude_nodes(nodes, str(file)) == ("n017", "n018.site.org")
    assert exclude_nodes(nodes, "n[016-017]") == ("n018.site.org",)
    file.write_text("10.0.0.2\n")
    assert exclude_nodes(("10.0.0.1", "10.0.0.2", "10.0.0.3"), str(file)) == ("10.0.0.1", "10.0.0.3")
    for wrong, name in (("n[016", "supervise/not_a_node_list"), ("n500", "supervise/not_a_node"),
                        (str(tmp_path / "none"), "supervise/not_a_node")):
        with pytest.raises(ValueError, match="node") as caught:
            exclude_nodes(nodes, wrong)
        assert len(find(name, str(caught.value))) == 1


def test_the_nodes_of_an_allocation(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert find_allocation(slurm, "") == (("n1", "n2", "n3"), 2, SLURM, "7")
    assert find_allocation({**slurm, "SLURM_NTASKS_PER_NODE": "4"}, "").tasks_per_node == 4
    (tmp_path / "hosts").write_text("n1 slots=4\nn2:4  # MPICH's way\n\n")
    assert find_allocation(slurm, str(tmp_path / "hosts")) == (("n1", "n2"), 4, NO_SCHEDULER, "")
    assert find_allocation({}, "") == ((), 0, NO_SCHEDULER, "")


def notes(file: Path) -> list[tuple[int, str, float]]:
    """Return the events that tests/programs/faulty.py wrote: attempt, event, time."""
    lines = [line.split(" ", 2) for line in file.read_text().splitlines()] if file.exists() else []
    return [(int(attempt), what, float(when)) for when, attempt, what in lines]


def weights(file: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(file, weights_only=True)["model"])


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


def job(kind: str, rank: int, folder: Path, *options: object, checkpoint: Path | None = None,
        script: Path = EXAMPLES / "train_digits.py") -> list[str]:
    """Return mpiddp's arguments for a training with a fault at its 60th step."""
    return ["-m", "mpiddp", "--quiet", *map(str, options), *map(str, (
        PROGRAMS / "faulty.py", kind, rank, 60, folder / "notes", script, "--epochs", 4,
        "--checkpoint", checkpoint or folder / "c.pt"))]


def supervised(mpi: Mpi, folder: Path, options: Sequence[object], *command: object) -> list[str]:
    """Return the command that supervises a job of two ranks on this machine."""
    need(mpi.missing())
    return [str(mpi.python), "-m", "mpiddp.supervise", "--dir", str(folder), "--history", str(folder / "h.json"),
            *map(str, options), str(mpi.mpiexec), *mpi.options, "-n", "2", str(mpi.python), *map(str, command)]


def supervise(mpi: Mpi, folder: Path, options: Sequence[object], *command: object, timeout: float = 150) -> Done:
    return processes.run(*supervised(mpi, folder, options, *command), timeout=timeout, cwd=ROOT,
                         env=single_node_environ(mpi))


def attempts_in(folder: Path) -> list[dict[str, object]]:
    return list(json.loads((folder / "h.json").read_text())["attempts"])


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of a training of two ranks without a fault."""
    folder = tmp_path_factory.mktemp("healthy")
    check(supervise(MPIS["mpich"], folder, [], *job("none", 1, folder)))
    assert attempts_in(folder)[0]["action"] == "done"
    return weights(folder / "c.pt")


@pytest.mark.torch
@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
@pytest.mark.parametrize("kind", ["SIGKILL", "once", "SIGSEGV"])
def test_a_job_goes_on_to_the_same_weights(
    quick: Mpi, tmp_path: Path, kind: str, healthy: dict[str, torch.Tensor]
) -> None:
    done = check(supervise(quick, tmp_path, [], *job(kind, 1, tmp_path, "--log-dir", tmp_path / "logs")))
    assert [one["action"] for one in attempts_in(tmp_path)] == ["again", "done"]
    assert are_equal(weights(tmp_path / "c.pt"), healthy)
    assert all(one["steps"] for one in attempts_in(tmp_path))
    (restart,) = find("supervise/restart", done.stderr, attempt=0, number=1, limit=3)
    assert (restart["reason"].partition(" on ")[0], restart["details"]) == ("rank 1", ""), done.stderr
    assert sorted(path.name.rpartition("-attempt-")[2] for path in (tmp_path / "logs").iterdir()) == ["0", "1"]
    assert not list(tmp_path.glob(".mpiddp-supervise-*"))


@pytest.mark.torch
@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
def test_a_rank_that_stands_still_at_its_end(quick: Mpi, tmp_path: Path, healthy: dict[str, torch.Tensor]) -> None:
    done = check(supervise(quick, tmp_path, [], *job("end", 1, tmp_path, "--exit-timeout", 3)))
    assert [one["action"] for one in attempts_in(tmp_path)] == ["again", "done"]
    (restart,) = find("supervise/restart", done.stderr, attempt=0, limit=3)
    assert restart["reason"].startswith("rank 1 on ")
    assert are_equal(weights(tmp_path / "c.pt"), healthy)


def test_a_bug_stops_it(quick: Mpi, tmp_path: Path) -> None:
    options = ["--progress-file", tmp_path / "c.pt", "--max-restarts", 9]
    done = check(supervise(quick, tmp_path, options, *job("always", 1, tmp_path, script=COUNTS)), 1)
    assert [one["steps"] for one in attempts_in(tmp_path)] == [59, 11]
    (stop,) = find("supervise/no_restart", done.stderr)
    (failure,) = find("supervise/same_failure_no_checkpoint", stop["reason"])
    assert failure["reason"].startswith("rank 1 on ")


@pytest.mark.torch
@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
def test_a_full_disk_stops_it(quick: Mpi, tmp_path: Path) -> None:
    """On its own file system, too small for a checkpoint."""
    need(["root"] if os.geteuid() else [])
    (disk := tmp_path / "disk").mkdir()
    command = supervised(quick, tmp_path, ["--progress-file", disk / "c.pt"], *job("none", 1, disk))
    done = check(processes.run("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$0"; exec "$@"',
                               str(disk), *command, timeout=150, env=single_node_environ(quick), cwd=ROOT), 1)
    assert [one["action"] for one in attempts_in(tmp_path)] == ["again", "stop"]
    (stop,) = find("supervise/no_restart", done.stderr)
    assert len(find("supervise/same_failure_after_steps", stop["reason"])) == 1


@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGUSR1, 75), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)])
def test_nothing_is_started_after_a_signal(quick: Mpi, tmp_path: Path, number: int, status: int) -> None:
    """MPICH's mpiexec forwards both: SIGUSR1 stops the training, SIGTERM ends a script without should_stop()."""
    script = job("none", 1, tmp_path, script=COUNTS)
    if status == 143:
        script = ["-m", "mpiddp", "-c", "import time; time.sleep(600)"]
    else:
        script[script.index("--epochs") + 1] = "1000"
    environ = processes.marked(single_node_environ(quick))
    process = processes.start(supervised(quick, tmp_path, [], *script), environ, ROOT)
    try:
        begun = time.monotonic()
        while not (notes(tmp_path / "notes") if status == 75 else time.monotonic() - begun > 6):
            assert process.poll() is None
            assert time.monotonic() < begun + 60
            time.sleep(0.1)
        process.send_signal(number)
        said = process.communicate(timeout=30)[1]
        assert not processes.leftovers(environ)
    finally:
        processes.end_tree(process.pid)
    found = attempts_in(tmp_path)
    assert len(found) == 1, said
    assert found[0]["action"] == ("requeue" if status == 75 else "stop"), said
    assert process.returncode == status or (status == 143 and process.returncode == 15)  # MPICH's status


INSTEAD = """#!/bin/sh
{}
status=$?
{}
"""


@pytest.mark.parametrize(("number", "status", "then"), first_of([
    (signal.SIGUSR1, 75, "exit $status"), (signal.SIGTERM, 75, "exit $status"), (signal.SIGTERM, 143, "sleep 600"),
]))
def test_a_signal_to_a_launcher_that_is_a_script(
    quick: Mpi, tmp_path: Path, number: int, status: int, then: str
) -> None:
    """Like Intel's mpirun; and a script that then starts something else."""
    options = ("-n", "2", str(quick.python), "-m", "mpiddp", "--quiet", str(PROGRAMS / "stops.py"))
    (script := tmp_path / "own.sh").write_text(INSTEAD.format(shlex.join([str(quick.mpiexec), *options]), then))
    script.chmod(0o755)
    command = supervised(quick, tmp_path, [])
    command[command.index(str(quick.mpiexec)):] = [str(script)]
    environ = processes.marked(single_node_environ(quick))
    process = processes.start(command, environ, ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = ""
        while said.count("READY") < 2:
            line = process.stdout.readline()
            assert line, said
            said += line
        process.send_signal(number)
        said += process.communicate(timeout=40)[0]
        assert not processes.leftovers(environ)
    finally:
        processes.end_tree(process.pid)
    assert len(attempts_in(tmp_path)) == 1, said
    assert said.count("stopped at step") == 2
    assert attempts_in(tmp_path)[0]["action"] == ("requeue" if status == 75 else "stop"), said
    assert process.returncode == status, said


def test_what_a_failed_script_leaves_is_ended(quick: Mpi, tmp_path: Path) -> None:
    command = [str(quick.python), "-m", "mpiddp.supervise", "--dir", str(tmp_path), "--max-restarts", "0", "sh", "-c"]
    environ = processes.marked(single_node_environ(quick))
    done = processes.run(*command, "trap '' TERM; sleep 600 & exit 7", timeout=60, env=environ)
    assert done.returncode == 7
    assert not processes.leftovers(environ)


def test_the_error_file_of_a_job_that_is_supervised(quick: Mpi, tmp_path: Path) -> None:
    """It receives the last report; the script's own option of that name is left alone."""
    (kept := tmp_path / "kept").write_text("seven")
    (script := tmp_path / "fails.py").write_text("raise ValueError(f'seven {len(open(__file__).read())}')")
    own = ("-m", "mpiddp", "--error-file", tmp_path / "e.json", script, "--error-file", kept)
    check(supervise(quick, tmp_path, ["--max-restarts", 0], *own), 1)
    assert "ValueError: seven" in json.loads((tmp_path / "e.json").read_text())["message"]["message"]
    assert kept.read_text() == "seven"


UNLIKE = 'date +%s.%N >> "$0"; sleep 0.2; exit $(( $(date +%N | cut -c 1-2 | sed "s/^0*//") + 110 ))'


@pytest.mark.parametrize("delay", first_of([0.0, 0.5, 1.1, 1.7, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 3.1, 4.5]))
def test_a_signal_at_any_moment(quick: Mpi, tmp_path: Path, delay: float) -> None:
    """While the launcher starts, during an attempt, and between two attempts (up to 2 s of waiting for a report)."""
    command = supervised(quick, tmp_path, ["--max-restarts", 1000], "-c", "")
    command[-3:] = ["sh", "-c", UNLIKE, str(tmp_path / "begun")]
    environ = processes.marked(single_node_environ(quick))
    process = processes.start(command, environ, ROOT, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "begun").exists() or not (tmp_path / "begun").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(delay)
        sent = time.time()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=DEADLINE_S)[1]
        assert not processes.leftovers(environ)
    finally:
        processes.end_tree(process.pid)
    assert process.returncode
    assert said is not None
    assert len(find("supervise/no_restart", said)) == 1, said
    assert max(map(float, (tmp_path / "begun").read_text().split())) < sent + 1.0


INTERRUPTED = """\
import signal, time
count = 0
def note(*_):
    global count
    count += 1
    print("received", count, flush=True)
signal.signal(signal.SIGINT, note)
print("READY", flush=True)
while count < 3:
    time.sleep(0.01)
"""


@pytest.mark.process
def test_each_ctrl_c_is_forwarded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpiddp.supervise", "--dir", str(tmp_path), sys.executable, "-c", INTERRUPTED]
    process = processes.start(command, {**os.environ}, ROOT, stdout=subprocess.PIPE)
    try:
        with processes.ended_after(DEADLINE_S, process.pid):
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
            for number in (1, 2, 3):
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == f"received {number}\n"
            assert process.wait() == 0
    finally:
        processes.end_tree(process.pid)


def test_a_program_that_is_none_of_ours(quick: Mpi, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    own = [str(quick.python), "-m", "mpiddp.supervise", "--dir", str(tmp_path), "--progress-file", str(nowhere),
           sys.executable, "-c"]
    assert processes.run(*own, "print('seven')", timeout=60, env=single_node_environ(quick)).stdout == "seven\n"
    done = processes.run(*own, "raise SystemExit(7)", timeout=60, env=single_node_environ(quick))
    assert done.returncode == 7
    reason = message("supervise/same_failure_after_time", reason=message("supervise/without_report", status=7))
    assert message("supervise/no_restart", reason=reason) in done.stderr
    assert message("supervise/no_report") in done.stderr
    assert message("supervise/no_checkpoint", path=nowhere) in done.stderr


@pytest.mark.parametrize(("words", "status", "said", "why"), [
    (["-m", "mpiddp", "nowhere.py"], 3, "the job did not start", "supervise/cannot_start"),
    (["-m", "mpiddp", "--log-dri", "logs", "a.py"], 2, "wrong command line", "supervise/bad_command_line"),
])
def test_an_end_that_mpiddp_has_explained(quick: Mpi, tmp_path: Path, words: list[str], status: int, said: str,
                                          why: str) -> None:
    """The supervisor blames neither the command nor a rank."""
    done = alone(quick, "-m", "mpiddp.supervise", "--progress-file", "nowhere", quick.python, *words, cwd=tmp_path)
    reason = message("supervise/explained", reason=said, status=status)
    assert (done.returncode, done.stderr.count(reason)) == (status, 1), done.stderr
    assert find("supervise/no_restart", done.stderr) == [{"reason": message(why)}]
    assert find("supervise/no_report", done.stderr) == find("supervise/no_checkpoint", done.stderr) == []


@pytest.mark.parametrize(("arguments", "name", "fields"), [
    ([], "supervise/no_command", {}), (["--nodes", "2", "true"], "supervise/one_node",
                                               {"nodes": 2, "launchers": describe_steppers()}),
    (["--max-restart", "2", "true"], "supervise/unknown_option",
     {"option": "--max-restart", "suggestion": "--max-restarts"}),
    (["--min-nodes", "2", "true"], "supervise/minimum_above_nodes", {"minimum": 2, "nodes": 1}),
    (["--hostfile", "/nowhere", "true"], "supervise/missing_path", {"option": "--hostfile", "path": "/nowhere"}),
    (["--nodes", "0", "true"], "supervise/wrong_value", {"option": "--nodes"}),
    (["--dir", "/nowhere", "true"], "supervise/missing_path", {"option": "--dir", "path": "/nowhere"}),
    (["--history", "/nowhere/h", "true"], "supervise/missing_folder", {"option": "--history", "folder": "/nowhere"}),
    (["--exclude", "n500", "true"], "supervise/not_a_node", {}),
    (["--max-restarts", "-1", "true"], "supervise/negative_count", {"option": "--max-restarts", "value": -1}),
    (["srun", "python", "a.py"], "supervise/outside_allocation", {"launcher": "srun", "system": "Slurm"}),
    *((["--dir", ".", program], "supervise/cannot_run", {"program": program, "launchers": describe_steppers()})
      for program in ("t.py", "/nowhere/t.py")),
])
def test_bad_input(quick: Mpi, tmp_path: Path, arguments: list[str], name: str, fields: dict[str, object]) -> None:
    done = processes.run(str(quick.python), "-m", "mpiddp.supervise", *arguments, timeout=60, cwd=tmp_path,
                         env=single_node_environ(quick))
    assert done.returncode == 2
    assert done.stderr.startswith("mpiddp.supervise: ")
    assert done.stderr.count("\n") == len(find(name, done.stderr, **fields)) == 1, done.stderr
    assert not list(tmp_path.iterdir())


# On three nodes, of which one is a spare.

LAUNCHERS = {
    "pmix": ("openmpi4", "srun --mpi=pmix"), "pmi2": ("mpich", "srun --mpi=pmi2"), "mpirun": ("openmpi4", "mpirun"),
    "mpiexec": ("mpich", str(MPIS["mpich"].mpiexec)), "prterun": ("openmpi5", str(MPIS["openmpi5"].mpiexec)),
}
KINDS = ("once", "always", "SIGKILL", "SIGSEGV", "device", "node", "link", "SIGSTOP", "memory", "disk", "down")
CELLS = [  # each kind under srun with PMIx and one other launcher; the loss of a node under all
    (kind, launcher) for row, kind in enumerate(KINDS) for column, launcher in enumerate(LAUNCHERS)
    if launcher == "pmix" or kind == "node" or column == row % 4 + 1]
IN_TESTS_RUN = [("node", "pmix"), ("down", "pmix")]
STATES = {"always": ["again", "again", "stop"], "disk": ["again", "stop"]}
BY_THE_CHECKPOINT = ("always", "disk")  # the training does not finish
LEFT_OUT = ("device", "node", "link", "down")


def in_batch(cluster: Cluster, folder: Path, launcher: str, kind: str, *options: str, supervise: str = "",
             group: Path | None = None) -> str:
    """Submit a job of three nodes, two for a training with a fault; return its number.

    A `disk` is full where node1 has one of 64 KB for the checkpoint; a `group` is the cgroup whose memory is used up.
    """
    disk = folder / "disk" if kind == "disk" else folder
    full = f"mkdir {disk} && mount -t tmpfs -o size=64k tmpfs {disk} || exit 1; trap 'umount {disk}' EXIT"
    name, start = LAUNCHERS[launcher]
    mpi = MPIS[name]
    need(mpi.missing())
    words = " ".join(job("none" if kind == "disk" else kind, 1, folder, "--group-timeout", 4, "--bind", "none",
                         checkpoint=disk / "c.pt"))  # the nodes share two cores
    (folder / "job.sh").write_text(f"""#!/bin/bash
export OMP_NUM_THREADS=1 PATH={folder}:$PATH {f"FAULTY_GROUP={group}" if group else ""}
{full if kind == "disk" else ""}
{mpi.python} -m mpiddp.supervise --nodes 2 --max-restarts 5 {supervise} --dir {folder} --history {folder}/h.json \
    --suspects {folder}/suspects {start} {mpi.python} {words}
""")
    given = ("-N3", "--ntasks-per-node=1", "--no-kill", "--open-mode=append", f"--output={folder}/out")
    command = ("sbatch", *given, *options, str(folder / "job.sh"))
    return check(cluster.run(*command, timeout=30, env=mpi.environ(), cwd=folder)).stdout.split()[-1]


def lose_node(cluster: Cluster, kind: str) -> None:
    """Kill all processes of node2, cut its link, or let Slurm take it away, as a health check does."""
    if kind == "down":
        check(cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test", timeout=30))
        return
    if kind == "link":
        ip("link", "set", f"{BRIDGE}-node2", "down")
        return
    for pid in map(int, ip("netns", "pids", namespace("node2")).split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def give_back(cluster: Cluster, kind: str) -> None:
    """Use node2 again."""
    if kind == "link":
        ip("link", "set", f"{BRIDGE}-node2", "up")
        cluster.take_back("node2")
    elif kind == "down":
        cluster.take_back("node2")
    else:
        cluster.restart("node2")


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """Return a folder that all nodes see."""
    assert cluster
    found = RUN / f"supervise-{time.monotonic_ns()}"
    found.mkdir()
    yield found


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "launcher"), [
    one if one in IN_TESTS_RUN else pytest.param(*one, marks=pytest.mark.thorough) for one in CELLS])
def test_faults_on_three_nodes(
    cluster: Cluster, folder: Path, kind: str, launcher: str, healthy: dict[str, torch.Tensor],
    request: pytest.FixtureRequest,
) -> None:
    group = request.getfixturevalue("group") if kind == "memory" else None
    number = in_batch(cluster, folder, launcher, kind, group=group)
    lost = False
    try:
        deadline = time.monotonic() + processes.PATIENCE * 120
        while cluster.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"):
            has_fault = any(what == "fault" for _, what, _ in notes(folder / "notes"))
            if not lost and kind in ("node", "link", "down") and has_fault:
                lost = True
                lose_node(cluster, kind)
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "out").read_text(errors="replace"))
            time.sleep(0.2)
    finally:
        cluster.run("scancel", "--quiet", number, timeout=30)
        if lost:
            give_back(cluster, kind)
    said = (folder / "out").read_text(errors="replace")
    found = attempts_in(folder)
    assert [one["action"] for one in found] == STATES.get(kind, ["again", "done"]), said
    assert [one["nodes"] for one in found[1:]] == (len(found) - 1) * [
        ["node1", "node3"] if kind in LEFT_OUT else ["node1", "node2"]], said
    if kind in LEFT_OUT:
        assert re.fullmatch(r"\S+\tnode2\t.*node2.*\n", (folder / "suspects").read_text())
    else:
        assert not (folder / "suspects").exists()
    if kind not in BY_THE_CHECKPOINT:
        assert are_equal(weights(folder / "c.pt"), healthy)
        (fault_s,) = [when for _, what, when in notes(folder / "notes") if what == "fault"]
        (again_s,) = [when for attempt, what, when in notes(folder / "notes") if (attempt, what) == (1, "first step")]
        told_s = found[0]["began"] + found[0]["seconds"]
        print(f"{kind} {launcher}: to the next step {again_s - fault_s:.1f} s from the fault, {again_s - told_s:.1f} s "
              "from the report")


DRAINS = """\
import subprocess
import mpiddp
if mpiddp.restart_count == 0:
    subprocess.run(["scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test"], check=True)
    raise ValueError("seven")
"""


def test_a_drained_node_gets_no_attempt(cluster: Cluster, folder: Path, quick: Mpi) -> None:
    """A script drains a node and fails; then a batch script drains one before the first attempt."""
    (folder / "train.py").write_text(DRAINS)
    for number, first in enumerate(["true", "scontrol update NodeName=node2 State=DRAIN Reason=test"]):
        (folder / "job.sh").write_text(f"""#!/bin/bash
{first}
{quick.python} -m mpiddp.supervise --nodes 2 --dir {folder} --history {folder}/h{number}.json srun --mpi=pmi2 \
    {quick.python} -m mpiddp --bind none {f"{folder}/train.py" if number == 0 else "-c pass"}
""")
        try:
            job = ("sbatch", "-N3", "--ntasks-per-node=1", f"--output={folder}/out", str(folder / "job.sh"))
            submitted = check(cluster.run(*job, timeout=30, env=quick.environ(), cwd=folder)).stdout.split()[-1]
            facts = cluster.wait_for_job(submitted, DEADLINE_S)
        finally:
            cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME", timeout=30)
        said = (folder / "out").read_text()
        assert facts["JobState"] == "COMPLETED", said
        nodes = [one["nodes"] for one in json.loads((folder / f"h{number}.json").read_text())["attempts"]]
        assert nodes == [["node1", "node2"], ["node1", "node3"]][number:], said


SLOW_SQUEUE = """#!/bin/sh
date +%s.%N >> "$(dirname "$0")/asked"
sleep 2
exec /usr/bin/squeue "$@"
"""


def wait_for_fault(cluster: Cluster, number: str, folder: Path, is_between: bool) -> None:
    """Wait until the training makes steps, or with `is_between` until supervise asks Slurm after a fault."""
    deadline = time.monotonic() + 60
    while True:
        told = {what: when for _, what, when in notes(folder / "notes")}
        asked = (folder / "asked").read_text().split() if (folder / "asked").exists() else []
        if "first step" in told and not is_between:
            return
        if "fault" in told and any(float(when) > told["fault"] for when in asked):
            return
        assert time.monotonic() < deadline, cluster.job(number)
        time.sleep(0.1)


def wait_until_gone(folder: Path) -> None:
    """Wait until no process of a job is left; each has the job's folder in its arguments."""
    deadline = time.monotonic() + 15  # for Slurm to end them
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(path.read_text().replace("\0", " "))
        left = [line for line in found if str(folder) in line]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.3)


@pytest.mark.torch
@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
@pytest.mark.parametrize("is_between", [False, True], ids=["in", "between"])
@pytest.mark.parametrize("end", ["scancel", "requeue"])
def test_a_job_that_slurm_ends_starts_nothing(cluster: Cluster, folder: Path, end: str, is_between: bool) -> None:
    """During an attempt, and between two if Slurm's controller takes two seconds to answer."""
    (folder / "squeue").write_text(SLOW_SQUEUE)
    (folder / "squeue").chmod(0o755)
    number = in_batch(cluster, folder, "pmix", "once" if is_between else "none")
    wait_for_fault(cluster, number, folder, is_between)
    check(cluster.run(*(("scancel",) if end == "scancel" else ("scontrol", "requeue")), number, timeout=30))
    time.sleep(3)
    if end == "requeue":
        cluster.run("scancel", number, timeout=30)
    cluster.wait_for_job(number, 60)
    said = (folder / "out").read_text(errors="replace")
    assert {attempt for attempt, _, _ in notes(folder / "notes")} == {0}, said
    assert find("supervise/restart", said) == []
    wait_until_gone(folder)


@pytest.mark.torch
@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
def test_a_restart_waits_for_slurms_controller(cluster: Cluster, folder: Path) -> None:
    """It hangs for 20 seconds when the job fails."""
    number = in_batch(cluster, folder, "pmix", "once")
    controller = int((RUN / "slurmctld.pid").read_text())
    try:
        wait_for_fault(cluster, number, folder, is_between=False)
        os.kill(controller, signal.SIGSTOP)
        time.sleep(20)
        os.kill(controller, signal.SIGCONT)
        job = cluster.wait_for_job(number, 120)
    finally:
        os.kill(controller, signal.SIGCONT)
        cluster.run("scancel", "--quiet", number, timeout=30)
    said = (folder / "out").read_text(errors="replace")
    assert job["ExitCode"] == "0:0", said
    assert [one["action"] for one in attempts_in(folder)] == ["again", "done"], said
    assert len(find("supervise/controller_silent", said, timeout="5 min 0 s")) == 1, said


@pytest.mark.torch
@pytest.mark.thorough("a node that is lost, a bug, signals at some moments")
def test_no_attempt_begins_that_the_walltime_would_end(cluster: Cluster, folder: Path) -> None:
    number = in_batch(cluster, folder, "pmix", "once", "--time=1", supervise="--stop-before 28")
    job = cluster.wait_for_job(number, 90)
    said = (folder / "out").read_text(errors="replace")
    assert job["ExitCode"] == "75:0", said
    (requeue,) = find("supervise/requeue", said)
    assert len(find("supervise/walltime_near", requeue["reason"])) == 1, said
    assert {attempt for attempt, _, _ in notes(folder / "notes")} == {0}, said
    wait_until_gone(folder)


@pytest.mark.mpi
def test_a_job_gets_sigterm_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    """The process becomes the program itself, and inherits no ignored signals."""
    code = """\
import os, signal, sys
from mpiddp.systems.launchers import NO_LAUNCHER
from mpiddp.supervise.attempt import AttemptProcess
pid = AttemptProcess(["sh", "-c", "trap 'echo ended >ended; exit' TERM; while sleep 0.05; do :; done"], os.environ, \
"", NO_LAUNCHER, 1.0)._process.pid
status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
assert status["Name"].strip() in ("sh", "dash", "bash"), status
assert int(status["SigIgn"], 16) == 0, status
while int(open(f"/proc/{pid}/status").read().partition("SigCgt:")[2].split()[0], 16) >> signal.SIGTERM - 1 & 1 == 0:
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = processes.run(sys.executable, "-c", code, timeout=DEADLINE_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
                         cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.mpi
@pytest.mark.process
@pytest.mark.parametrize(("is_ours", "status"), [(True, 1), (False, 0)])
def test_a_step_that_never_started_has_not_succeeded(
    is_ours: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older srun returns 0 then: the mark, which a job of ours removes at its end, is still there."""
    monkeypatch.setattr(attempts, "RUNNING_FILE_TIMEOUT_S", 0.5)
    process = AttemptProcess(["true"], os.environ, str(tmp_path / "r.json"), SRUN, 1.0, is_ours)
    found = process.wait(("n1",), deque(), lambda: (), lambda: None)
    assert (found.status, found.reason) == (status, message("supervise/unnoted_end") if status else "success")


def test_a_job_that_ends_in_order_says_so_itself(quick: Mpi, tmp_path: Path) -> None:
    words = [str(quick.mpiexec), "-n", "2", str(quick.python), "-m", "mpiddp", "-c", "pass"]
    report = str(tmp_path / "r.json")
    environ = {**single_node_environ(quick), "MPIDDP_ERROR_FILE": report, "MPIDDP_RESTART_COUNT": "0"}
    process = AttemptProcess(words, environ, report, SRUN, 1.0, is_ours=True)
    assert process.wait(("n1",), deque(), lambda: (), lambda: None).status == 0


@pytest.mark.parametrize(("words", "runs"), [
    ("python -m mpiddp a.py", True), ("mpiddp a.py", True), ("python -m mpiddp --log-dir d a.py --help", True),
    ("python -m mpiddp --help", False), ("python -m mpiddp --dry-run --nodes 2", False), ("python a.py", False)])
def test_which_command_has_to_note_its_end(words: str, runs: bool) -> None:
    assert runs_job(words.split()) == runs


@pytest.mark.process
@pytest.mark.parametrize(("text", "error"), [("", FileNotFoundError), ("#!/no/such/shell\n", FileNotFoundError),
                                             ("#!/bin/sh\n", PermissionError)], ids=["missing", "no shell", "mode"])
def test_a_launcher_that_cannot_be_started(tmp_path: Path, text: str, error: type[OSError]) -> None:
    path = tmp_path / "launcher"
    if text:
        path.write_text(text)
        path.chmod(0o644 if error is PermissionError else 0o755)
    with pytest.raises(error):
        AttemptProcess([str(path)], os.environ, "", NO_LAUNCHER, 1.0)
