"""Batch scripts for launchers that are not installed run with stand-ins; and the arguments that others give to srun."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import processes
from tests.messages import find
from tests.support import (
    DEADLINE_S,
    EXAMPLES,
    MPIS,
    ROOT,
    Done,
    check,
    check_hello,
    first_of,
    mpiexec,
    need,
    single_node_environ,
)
from tests.test_batch import BATCH, edited

pytestmark = pytest.mark.light

LAUNCHERS = ROOT / "tests/standins/launchers"
HELLO = f"python -m mpiddp {EXAMPLES / 'hello_world.py'}"

STOPS_ONCE = """\
import os, mpiddp, torch.distributed as dist
print(f"rank {os.environ['RANK']}, {mpiddp.restart_count}\\n", end="", flush=True)
dist.barrier()  # the first rank that stops ends the others
if mpiddp.restart_count == 0:
    mpiddp.stop_for_requeue()
"""


def run(folder: Path, *command: str, mpi: str = "mpich", **variables: str) -> Done:
    """Run a command with the stand-ins first in PATH; they write to FOLDER/log."""
    need(MPIS[mpi].missing())
    env = single_node_environ(MPIS[mpi])
    logs = {f"{name}_STANDIN_LOG": str(folder / "log") for name in ("FLUX", "JSRUN", "PALS")}
    return processes.run(*command, timeout=DEADLINE_S, cwd=folder,
                         env={**env, **logs, "PATH": f"{LAUNCHERS}:{env['PATH']}", **variables})


@pytest.mark.process
def test_flux(tmp_path: Path) -> None:
    """All tasks stop in the first run. The script submits itself again, and they finish."""
    (program := tmp_path / "stops_once.py").write_text(STOPS_ONCE)
    command = f"python -m mpiddp {program}"
    script = edited(tmp_path, "flux.sh", nodes=1, MODULES="", TASKS=2, CORES=1, OPTIONS="",
                    STOP="--signal=SIGUSR1@120s", COMMAND=command)
    check(run(tmp_path, "flux", "batch", str(script)), 75)
    outputs = [path.read_text() for path in tmp_path.glob("mpiddp-*.out")]
    assert sorted(re.findall(r"^rank \d, \d$", "\n".join(outputs), re.MULTILINE)) == [
        "rank 0, 0", "rank 0, 1", "rank 1, 0", "rank 1, 1"], outputs
    log = (tmp_path / "log").read_text()
    started = f"flux run --nodes=1 --ntasks=2 --cores-per-task=1 --signal=SIGUSR1@120s {command}\n"
    assert log.count(started) == 2, log
    assert len(re.findall("^flux --parent batch /", log, re.MULTILINE)) == 1, log


FAILS = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"


@pytest.mark.process
def test_a_failure_under_flux(tmp_path: Path) -> None:
    """Each rank exits with the job's status: MPI_Abort would make Flux cancel the job, with status 143."""
    command = ["flux", "run", "--nodes=1", "--ntasks=2", "--cores-per-task=1", "python", "-m", "mpiddp"]
    done = run(tmp_path, *command, "--abort-grace=30", "-c", FAILS)
    assert done.returncode == 7, done.stderr
    assert len(re.findall("mpiddp: failed: rank 1 on ", done.stderr)) == 1, done.stderr
    assert "MPI_Abort" not in done.stderr
    assert "Abort(" not in done.stderr


@pytest.mark.process
def test_a_job_under_flux_is_named_as_flux_names_it(tmp_path: Path) -> None:
    command = ["flux", "run", "--nodes=1", "--ntasks=2", "--cores-per-task=1", "python", "-m", "mpiddp"]
    check(run(tmp_path, *command, "--no-init", "--log-dir", str(tmp_path / "logs"), "-c", "print(1)"))
    assert [path.name for path in (tmp_path / "logs").iterdir() if not path.name.startswith(".")] == [
        "f6PMw2aL7.f5tczL6YX"]


@pytest.mark.mpi
def test_pals(tmp_path: Path) -> None:
    """The host file names each node once, or once for each of its mpiprocs."""
    (nodes := tmp_path / "nodes").write_text("n1\nn1\n")
    script = edited(tmp_path, "pals.sh", TASKS=2, COMMAND=HELLO)
    check_hello(run(tmp_path, "bash", str(script), PBS_JOBID="5.pbs", PBS_O_WORKDIR=str(tmp_path),
                    PBS_NODEFILE=str(nodes), NCPUS="64"), 2)
    assert (tmp_path / "log").read_text() == f"mpiexec -n 2 --ppn 2 --cpu-bind none {HELLO}\n"


@pytest.mark.mpi
@pytest.mark.thorough("the same scripts with a rank that stops")
@pytest.mark.parametrize("mpi", ["openmpi4", "openmpi5", "mpich", "impi"])
@pytest.mark.parametrize("name", ["pbs.sh", "sge.sh"])
def test_each_mpirun_gets_the_nodes_of_the_job(name: str, mpi: str, tmp_path: Path) -> None:
    script = edited(tmp_path, name, MODULES="", COMMAND=HELLO)
    check_hello(run(tmp_path, "bash", str(script), mpi=mpi, **job_of_two_ranks(tmp_path, name)), 2)


def job_of_two_ranks(folder: Path, script: str) -> dict[str, str]:
    """Return the variables of a job of PBS or Grid Engine that has two slots of this machine."""
    (lines := folder / "nodes").write_text("localhost\nlocalhost\n")
    (table := folder / "table").write_text("localhost 2 all.q@localhost UNDEFINED\n")
    if script == "sge.sh":
        return {"JOB_ID": "5", "SGE_ROOT": "/var/lib/gridengine", "NHOSTS": "1", "NSLOTS": "2",
                "PE_HOSTFILE": str(table)}
    return {"PBS_JOBID": "5.pbs", "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(lines), "NCPUS": "64"}


AGREES_TO_STOP = """\
import os, signal, time
import mpiddp
print(f"rank {os.environ['RANK']}, {mpiddp.restart_count}\\n", end="", flush=True)
while mpiddp.restart_count == 0 and not mpiddp.should_stop():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.1)
if mpiddp.restart_count == 0:
    mpiddp.stop_for_requeue()
"""
QSUB = """\
#!/bin/sh
echo "qsub $*" >> log
[ "$1" = -v ] && export "$2" && exec bash "$3"
"""


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["pbs.sh", "pals.sh"])
def test_a_job_of_pbs_that_stops_is_submitted_again(name: str, tmp_path: Path) -> None:
    """The stand-in for qsub runs the script at once."""
    (program := tmp_path / "stops.py").write_text(AGREES_TO_STOP)
    (tmp_path / "qsub").write_text(QSUB)
    (tmp_path / "qsub").chmod(0o755)
    values = {"TASKS": 2} if name == "pals.sh" else {}
    script = edited(tmp_path, name, MODULES="", COMMAND=f"python -m mpiddp {program}", **values)
    folders = f"{tmp_path}:{LAUNCHERS}" if name == "pals.sh" else str(tmp_path)
    path = f"{folders}:{single_node_environ(MPIS['mpich'])['PATH']}"
    done = check(run(tmp_path, "bash", str(script), PATH=path, **job_of_two_ranks(tmp_path, name)), 75)
    assert sorted(re.findall(r"^rank \d, \d$", done.stdout, re.MULTILINE)) == [
        "rank 0, 0", "rank 0, 1", "rank 1, 0", "rank 1, 1"], done.stdout
    again = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("qsub ")]
    assert again == [f"qsub -v MPIDDP_RESTART_COUNT=1 {script}"]


@pytest.mark.mpi
def test_a_job_of_grid_engine_that_stops_is_requeued(tmp_path: Path) -> None:
    """At status 99 Grid Engine puts the job into the queue again, and then sets RESTARTED (man qsub)."""
    (program := tmp_path / "stops.py").write_text(AGREES_TO_STOP)
    script = edited(tmp_path, "sge.sh", MODULES="", COMMAND=f"python -m mpiddp {program}")
    path, variables = single_node_environ(MPIS["mpich"])["PATH"], job_of_two_ranks(tmp_path, "sge.sh")
    for restarted, status in (("0", 99), ("1", 0)):
        done = check(run(tmp_path, "bash", str(script), PATH=path, RESTARTED=restarted, **variables), status)
        assert sorted(re.findall(r"^rank \d, \d$", done.stdout, re.MULTILINE)) == [
            f"rank 0, {restarted}", f"rank 1, {restarted}"], done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("mpi", first_of(["openmpi4", "openmpi5"]))
def test_an_mpirun_that_does_not_know_the_nodes_of_the_job(mpi: str, tmp_path: Path) -> None:
    """The job of PBS has three nodes, and its ranks are all on this one: a warning names the line for all nodes."""
    (nodes := tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\nn3\nn3\n")
    done = mpiexec(MPIS[mpi], 2, EXAMPLES / "hello_world.py", env={"PBS_JOBID": "5.pbs", "PBS_NODEFILE": str(nodes)})
    check_hello(done, 2)
    (found,) = find("launch/idle_nodes", done.stderr, scheduler="PBS", nodes=3, ranks="all 2 ranks run")
    assert "$PBS_NODEFILE" in found["start"]


@pytest.mark.process
@pytest.mark.thorough("pals.sh and flux.sh over stand-ins")
def test_jsrun(tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("launch\nn1\nn1\n")
    script = edited(tmp_path, "jsrun.sh", MODULES="", GPUS=2, CORES=1, COMMAND=HELLO)
    check_hello(run(tmp_path, "bash", str(script), LSB_DJOB_HOSTFILE=str(hosts)), 2)
    assert (tmp_path / "log").read_text() == (
        f"jsrun --nrs 2 --rs_per_host 2 --tasks_per_rs 1 --cpu_per_rs 1 --gpu_per_rs 1 --bind none {HELLO}\n")


@pytest.fixture
def srun(tmp_path: Path) -> str:
    """Return a PATH with an srun that prints its arguments and variables."""
    (tmp_path / "tools").mkdir()
    (command := tmp_path / "tools/srun").write_text('#!/bin/sh\n[ "$1" = --help ] || { echo "srun $*"; env; }\n')
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "values", "started"), [
    ("srun_pmix.sh", {}, "srun --mpi=pmix --cpus-per-task=4 python -m mpiddp train.py"),
    ("srun_pmix.sh", {"SRUN": "srun"}, "srun --cpus-per-task=4 python -m mpiddp train.py"),
    ("srun_pmix.sh", {"SRUN": "srun --environment=./x.toml"},
     "srun --environment=./x.toml --cpus-per-task=4 python -m mpiddp train.py"),
    ("srun_pmix.sh", {"APPTAINER": "singularity run --rocm", "CONTAINER": "/bin/sh", "MOUNTS": "/data"},
     "srun --mpi=pmix --cpus-per-task=4 singularity run --rocm --bind /tmp,/data /bin/sh python -m mpiddp train.py"),
    ("srun_pmix.sh", {"SRUN": "srun", "COMMAND": "shifter python -m mpiddp train.py"},
     "srun --cpus-per-task=4 shifter python -m mpiddp train.py"),
    ("cray.sh", {}, "srun --cpus-per-task=4 python -m mpiddp train.py"),
])
def test_what_srun_is_told(name: str, values: dict[str, str], started: str, srun: str, tmp_path: Path) -> None:
    script = edited(tmp_path, name, **{"MODULES": "", **values})
    done = check(run(tmp_path, "bash", str(script), PATH=srun, SLURM_CPUS_PER_TASK="4"))
    assert done.stdout.splitlines()[0] == started


@pytest.mark.process
def test_what_cray_sites_advise_is_shell_code(srun: str, tmp_path: Path) -> None:
    """Each line is uncommented, as a user does."""
    script = edited(tmp_path, "cray.sh", MODULES="")
    text, lines = re.subn("^# export ", "export ", script.read_text(), flags=re.MULTILINE)
    script.write_text(text)
    told = check(run(tmp_path, "bash", str(script), PATH=srun, SLURM_CPUS_PER_TASK="4", SLURM_JOB_ID="7")).stdout
    assert lines == 4
    assert {"PMI_MMAP_SYNC_WAIT_TIME=600", "MPICH_GPU_SUPPORT_ENABLED=0", "NCCL_NET=AWS Libfabric",
            "MIOPEN_USER_DB_PATH=/tmp/miopen-7", "MIOPEN_CUSTOM_CACHE_DIR=/tmp/miopen-7", "TRITON_HOME=/dev/shm",
            "CUDA_CACHE_DISABLE=1"} <= set(told.splitlines())


@pytest.mark.process
@pytest.mark.parametrize("script", sorted(BATCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_shell_code(script: Path) -> None:
    assert os.access(script, os.X_OK)
    check(processes.run("bash", "-n", str(script), timeout=30))


def test_a_directive_of_pbs_has_no_comment_behind_it() -> None:
    """Its words become arguments: "qsub: directive error" (make_argv and process_opts in OpenPBS's qsub.c)."""
    lines = [line for script in BATCH.glob("*.sh") for line in script.read_text().splitlines()
             if re.match("#+PBS ", line)]
    assert len(lines) >= 12
    assert [line for line in lines if "#" in line.lstrip("#")] == []


@pytest.mark.parametrize("script", sorted(BATCH.glob("*.sh")), ids=lambda path: path.name)
def test_a_value_may_be_empty_where_the_script_says_so(script: Path) -> None:
    """ENVIRONMENT may always be empty: not every user has one."""
    text = script.read_text()
    names = re.findall(r'^(?=ENVIRONMENT=|.*# edit.*[;,] empty for none$)(\w+)=', text, re.MULTILINE)
    assert [name for name in names if f'if [ -n "${name}" ]; then' not in text] == []
