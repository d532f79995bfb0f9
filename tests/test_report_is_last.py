"""The report is the last thing on the screen, but for what launchers print of a job that fails, whatever one sets."""

from __future__ import annotations

import re

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.support import (
    DEADLINE_S,
    MPIS,
    PROGRAMS,
    ROOT,
    Done,
    check,
    first_of,
    mpiexec,
    mpiexec_command,
    need,
    single_node_environ,
    srun,
)

pytestmark = pytest.mark.light

FAILURES = {"raises": ("raise ValueError('seven')", 1), "exits": ("sys.exit(3)", 3), "leaves": ("os._exit(7)", 7),
            "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", None)}
RULE = "-" * 74 + "\n"
PRTERUN = rf'{RULE}prterun has exited due to process rank \d+ with PID 0 on node \S+ calling\n"abort"\.[^-]*{RULE}\s*'
DETECTED = (rf"(?s:{RULE}Primary job  terminated normally.*?{RULE})?"
            rf"(?s:{RULE}(?:prterun|mpirun\S*) detected that one or more processes exited with.*?{RULE})\s*")
# What a launcher prints after the report, or before it: where a rank calls MPI_Abort, and where it crashes; another
# rank may then notice that, and call MPI_Abort.
STAYS = {"mpich": ("", ""), "impi": ("", ""), "openmpi4": ("", DETECTED),
         "openmpi5": (PRTERUN, f"{PRTERUN}|{DETECTED}")}
SRUN = (r"srun: error: node\d: tasks? [\d,-]+: (Exited with exit code \d+|Killed|Segmentation fault)",
        r"srun: Job step aborted: Waiting up to \d+ seconds for job step to finish\.",
        r"slurmstepd-node\d: error: \*\*\* STEP \S+ ON node\d CANCELLED AT \S+ \*\*\*")
MPI_ERR_UNKNOWN = 14  # with which a rank of Open MPI 5 may end itself when srun says that another one has crashed
OF_THE_BATCH_SCRIPTS = {"SLURM_SRUN_REDUCE_TASK_EXIT_MSG": "1", "SLURM_STEP_KILLED_MSG_NODE_ID": "-1"}
# Open MPI 4's mpirun at times cannot unpack its own message (open-mpi/ompi issue 8356), and then says only that.
SAYS_ABORT = r"MPI_ABORT was invoked|called MPI_Abort|ORTE_ERROR_LOG: .* show_help\.c"
SWITCHED_OFF = {"openmpi4": {"OMPI_MCA_orte_execute_quiet": "1"}}


def after_the_report(done: Done) -> str:
    """Return what is on stderr after the report, and all that is on stdout, where the scripts print nothing."""
    report = re.search(r"^mpiddp: failed: rank 1 on .*\n(?:  .*\n)+", done.stderr, re.MULTILINE)
    assert report, done.stderr
    return done.stderr[report.end():] + done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "way"), first_of([
    ("openmpi4", "raises"), pytest.param("mpich", "crashes", marks=pytest.mark.torch),
    *(pytest.param(name, way, marks=[pytest.mark.torch] * (way == "crashes")) for name in MPIS for way in FAILURES
      if (name, way) not in (("openmpi4", "raises"), ("mpich", "crashes")))], 2))
def test_nothing_follows_the_report(name: str, way: str) -> None:
    line, status = FAILURES[way]
    done = mpiexec(MPIS[name], 2, "--quiet", PROGRAMS / "rank_1.py", line)
    assert done.returncode == status or (status is None and done.returncode)
    assert re.fullmatch(f"(?:{STAYS[name][way == 'crashes']})?", after_the_report(done)), done
    if way == "crashes" and name in SWITCHED_OFF:
        done = mpiexec(MPIS[name], 2, "--quiet", PROGRAMS / "rank_1.py", line, env=SWITCHED_OFF[name])
        assert after_the_report(done) == ""


@pytest.mark.mpi
@pytest.mark.parametrize("told", first_of(["told", "untold"]))
@pytest.mark.parametrize("name", MPIS)
def test_what_mpi_says_of_an_end_is_printed_where_nobody_else_tells(name: str, told: str) -> None:
    """What a rank has printed by C, and the status, are as MPI_Abort leaves them."""
    mpi = MPIS[name]
    need(mpi.missing())
    done = check(processes.run(*mpiexec_command(mpi, 1, PROGRAMS / "aborts.py", 5, told), timeout=DEADLINE_S,
                               env=single_node_environ(mpi), cwd=ROOT), 5)
    assert done.stdout == "in C's buffer\n"
    assert bool(re.search(SAYS_ABORT, done.stderr)) == (told == "untold"), done.stderr
    if told == "told":
        assert re.fullmatch(STAYS[name][0], done.stderr), done.stderr


@pytest.mark.mpi
def test_a_stack_that_a_user_asks_open_mpi_for_is_printed() -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    done = check(processes.run(*mpiexec_command(mpi, 1, PROGRAMS / "aborts.py", 5, "told"), timeout=DEADLINE_S,
                               env={**single_node_environ(mpi), "OMPI_MCA_opal_abort_print_stack": "1"}, cwd=ROOT), 5)
    assert "] func:" in done.stderr


@pytest.mark.parametrize(("name", "way"), first_of(list(dict.fromkeys(
    [("openmpi4", "raises"), *((name, way) for name in MPIS for way in ("raises", "crashes"))]))))
def test_little_follows_the_report_under_srun(cluster: Cluster, name: str, way: str) -> None:
    """What the batch scripts set leaves one line of the nodes' for each status that follows another one."""
    mpi, (line, status) = MPIS[name], FAILURES[way]
    statuses = [status or 139, *[MPI_ERR_UNKNOWN] * ((name, way) == ("openmpi5", "crashes"))]
    for env, kinds in (({}, SRUN), (OF_THE_BATCH_SCRIPTS, SRUN[:2])):
        done = srun(cluster, mpi, "-N3 -n3", "--quiet", PROGRAMS / "rank_1.py", line, env=env)
        assert done.returncode in statuses, done
        rest = after_the_report(done).splitlines()
        assert [one for one in rest if not re.fullmatch("|".join(kinds), one)] == []
    assert mpi.pmi == "pmix" or len(rest) <= 1 + (way == "crashes")
