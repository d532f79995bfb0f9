"""Inside a Slurm step: a user's shell there is left alone, and a launcher in it is one in the place of srun."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.messages import find, message
from tests.support import (
    DEADLINE_S,
    EACH_MPI,
    EXAMPLES,
    MPIS,
    ROOT,
    Done,
    Mpi,
    check,
    check_hello,
    first_of,
    hellos,
    need,
    noise,
    single_node_environ,
)

pytestmark = pytest.mark.light

HELLO = EXAMPLES / "hello_world.py"
STEPS = ("none", "pmix", "pmi2")
QUICK = {("pmi2", "openmpi4"), ("pmix", "mpich")}
IN_STEPS = [pytest.param(step, mpi, id=f"{step}-{mpi.name}",
                         marks=() if (step, mpi.name) in QUICK else pytest.mark.thorough)
            for step in STEPS for mpi in MPIS.values()]
ON_THIS_NODE = {"openmpi4": "--host localhost:2", "openmpi5": "--host localhost:2",
                "mpich": "-launcher fork", "impi": "-launcher fork"}  # in a step, srun has no room for daemons


def in_step(cluster: Cluster, mpi: Mpi, options: str, command: str, timeout: float = DEADLINE_S) -> Done:
    """Run a shell's command in a Slurm step; `srun OPTIONS sh -c COMMAND`."""
    need(mpi.missing())
    return cluster.run("srun", *options.split(), "sh", "-c", command, timeout=timeout, env=environ(mpi), cwd=ROOT)


def environ(mpi: Mpi) -> dict[str, str]:
    """Return the environment of a job, whose files lie in the node's own /tmp."""
    return {name: value for name, value in single_node_environ(mpi).items() if name != "TMPDIR"}


def mpirun(mpi: Mpi, ranks: int, *command: object) -> str:
    """Return the line that starts ranks on the node that it is typed on."""
    return " ".join(map(str, (mpi.mpiexec, *mpi.options, ON_THIS_NODE[mpi.name], "-n", ranks, *command)))


@pytest.mark.parametrize(("step", "mpi"), IN_STEPS)
def test_mpirun_in_a_step(step: str, mpi: Mpi, cluster: Cluster) -> None:
    done = in_step(cluster, mpi, f"--mpi={step} -n1", mpirun(mpi, 2, mpi.python, "-m", "mpiddp", HELLO))
    check_hello(done, 2)


@pytest.mark.parametrize(("step", "mpi"), IN_STEPS)
def test_no_launcher_in_a_step_is_a_world_of_one(step: str, mpi: Mpi, cluster: Cluster) -> None:
    done = in_step(cluster, mpi, f"--mpi={step} -n1", f"{mpi.python} -m mpiddp {HELLO}")
    check_hello(done, 1)
    assert noise(done) == []


@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi4"], MPIS["mpich"]]), ids=lambda mpi: mpi.name)
def test_a_shell_outlives_a_job_that_did_not_start(mpi: Mpi, cluster: Cluster) -> None:
    """One rank sleeps in the place of mpiddp, and the others are in MPI_Init at the deadline."""
    rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    late = f"[ {rank} = 1 ] && exec sleep 60; exec {mpi.python} -m mpiddp --startup-timeout 3 {HELLO}"
    job = mpirun(mpi, 2, "sh", "-c", f"'{late}'")
    done = check(in_step(cluster, mpi, "--mpi=none -n1", f"{job}; echo the shell lives, status $?"))
    assert "mpiddp: ending rank 0 on node1: still in MPI_Init" in done.stderr
    assert "the shell lives" in done.stdout
    assert "CANCELLED" not in done.stderr


@pytest.mark.parametrize("mpi", first_of([MPIS["openmpi4"], MPIS["openmpi5"], MPIS["mpich"]]), ids=lambda mpi: mpi.name)
def test_a_shell_outlives_a_script_that_fails(mpi: Mpi, cluster: Cluster) -> None:
    job = f"{mpi.python} -m mpiddp -c 'raise ValueError(7)'"
    done = check(in_step(cluster, mpi, f"--mpi={mpi.pmi} -n1", f"{job}; echo the shell lives, status $?"))
    assert done.stdout == "the shell lives, status 1\n"
    assert done.stderr.count("mpiddp: failed: rank 0 on ") == 1


@pytest.mark.parametrize("mpi", first_of(EACH_MPI))
def test_mpirun_in_each_task_is_refused_once(mpi: Mpi, cluster: Cluster) -> None:
    done = in_step(cluster, mpi, "-N1 -n2", mpirun(mpi, 2, mpi.python, "-m", "mpiddp", HELLO))
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert done.stderr.count("mpiddp: cannot start: nested-launcher") == 1, done.stderr
    assert find("launch/launcher_in_each_task", done.stderr, tasks=2, outer="srun")


@pytest.mark.parametrize("mpi", first_of(EACH_MPI))
def test_mpirun_finds_the_nodes_of_an_allocation(mpi: Mpi, cluster: Cluster) -> None:
    """Its daemons are the tasks of a step, one on each node."""
    need(mpi.missing())
    command = f"{mpi.mpiexec} -n 3 {mpi.python} -m mpiddp {HELLO}"
    done = cluster.run("salloc", "--quiet", "-N3", "--ntasks-per-node=1", "sh", "-c", command, timeout=DEADLINE_S,
                       env=environ(mpi), cwd=ROOT)
    assert {one["host"] for one in check_hello(done, 3)} == {"node1", "node2", "node3"}


@pytest.mark.thorough("mpirun in a batch job and in salloc, Open MPI 4.1")
@pytest.mark.parametrize(("default", "mpi"), [
    pytest.param(default, mpi, id=f"{default}-{name}") for default in STEPS for name, mpi in MPIS.items()])
def test_mpirun_finds_the_nodes_of_a_batch_job(default: str, mpi: Mpi, cluster: Cluster, tmp_path: Path) -> None:
    """It starts its daemons or proxies by srun, whose own default (MpiDefault in slurm.conf) is for other programs."""
    need(mpi.missing())
    output = RUN / f"{tmp_path.name}.out"
    command = f"{mpi.mpiexec} -n 3 {mpi.python} -m mpiddp {HELLO}"
    done = check(cluster.run("sbatch", "--parsable", "-N3", "--ntasks-per-node=1", f"--output={output}",
                             "--error=/dev/null", f"--wrap={command}", timeout=30, cwd=ROOT,
                             env={**environ(mpi), "SLURM_MPI_TYPE": default}))
    facts = cluster.wait_for_job(done.stdout.strip(), timeout=DEADLINE_S)
    assert facts["ExitCode"] == "0:0", output.read_text()
    lines = check_hello(Done(command, 0, output.read_text(), ""), 3)
    assert {one["host"] for one in lines} == {"node1", "node2", "node3"}


def test_two_jobs_and_another_step_in_one_allocation(cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    job = f"srun --exact --mpi=pmix -N3 -n3 {mpi.python} -m mpiddp {HELLO}"
    command = f"srun --overlap -N3 -n3 sleep 30 & beside=$!; {job} & {job}; wait $!; kill $beside"
    done = check(cluster.run("salloc", "--quiet", "-N3", "-n6", "sh", "-c", command, timeout=DEADLINE_S,
                             env=environ(mpi), cwd=ROOT))
    found: dict[str, set[str]] = {}
    for one in hellos(done):
        found.setdefault(one["port"], set()).add(one["rank"])
    assert list(found.values()) == [{"0", "1", "2"}] * 2, done.stdout


@pytest.mark.thorough("mpirun in a batch job and in salloc, Open MPI 4.1")
def test_a_heterogeneous_job_is_one_world(cluster: Cluster) -> None:
    mpi = MPIS["openmpi4"]
    need(mpi.missing())
    rank = f"{mpi.python} -m mpiddp {HELLO}"
    done = cluster.run("salloc", "--quiet", "-N1", "-n1", ":", "-N1", "-n2", "sh", "-c",
                       f"srun --mpi=pmix {rank} : {rank}", timeout=DEADLINE_S, env=environ(mpi), cwd=ROOT)
    check_hello(done, 3)


@pytest.mark.parametrize("shell", first_of(["", "srun --preserve-env -N1 -n1"]), ids=["salloc", "use_interactive_step"])
def test_no_launcher_in_an_allocation_of_several_tasks_is_worth_a_warning(shell: str, cluster: Cluster) -> None:
    mpi = MPIS["mpich"]
    need(mpi.missing())
    done = cluster.run("salloc", "--quiet", "-n4", *shell.split(), str(mpi.python), "-m", "mpiddp", str(HELLO),
                       timeout=DEADLINE_S, env=environ(mpi), cwd=ROOT)
    check_hello(done, 1)
    warning, = noise(done)
    assert warning == "mpiddp: warning: " + message(
        "launch/no_launcher", scheduler="Slurm", size="4 tasks", start="srun --mpi=pmi2, or MPICH's mpiexec,")
