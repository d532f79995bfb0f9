"""`srun --mpi=cray_shasta`, the default of large centres, which Debian's Slurm has; no library here speaks it."""

from __future__ import annotations

import json
import re
import signal
import subprocess

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.messages import find
from tests.support import DEADLINE_S, EXAMPLES, MPIS, ROOT, check, check_hello, need, single_node_environ
from tests.test_steps import in_step, mpirun

pytestmark = pytest.mark.light

FAULTS = ROOT / "tests/faults"
ADVISED = {"mpich": "--mpi=pmi2", "impi": "--mpi=pmi2", "openmpi4": "--mpi=pmix", "openmpi5": "--mpi=pmix"}
IN_STEP = """\
import json, os
from mpiddp.discovery import cpus, launchers, runtime
by = launchers.read_launch_facts(os.environ)
print(json.dumps([by.launcher.name, by.size, runtime.find_slurm_step(os.environ, by),
                  launchers.is_first_on_node(os.environ), cpus.read_grant(os.environ, "n", not by.by_srun)[0]]))
"""


@pytest.mark.parametrize("mpi", [
    name if name in ("mpich", "openmpi5") else pytest.param(name, marks=pytest.mark.thorough) for name in ADVISED])
def test_a_split_world_is_refused_before_it_trains(mpi: str, cluster: Cluster) -> None:
    library = MPIS[mpi]
    need(library.missing()[:1])
    done = cluster.run("srun", "--mpi=cray_shasta", "-N2", "-n2", str(library.python), "-m", "mpiddp",
                       str(EXAMPLES / "hello_world.py"), timeout=DEADLINE_S, env=single_node_environ(library), cwd=ROOT)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ""
    assert re.findall("mpiddp: cannot start: (.*)", done.stderr) == ["pmi-unsupported"]
    assert f"use srun {ADVISED[mpi]}" in done.stderr
    assert find("launch/unsupported_interface", done.stderr, launcher="srun --mpi=cray_shasta", interface="Cray's PMI")


def test_what_a_rank_concludes_from_the_steps_variables(cluster: Cluster) -> None:
    """The plugin sets PALS's variables; the cores are those that Slurm has given, not the node's eight."""
    done = check(cluster.run("salloc", "--quiet", "-N2", "--ntasks-per-node=2", "srun", "--mpi=cray_shasta", "-n2",
                             "--ntasks-per-node=1", str(MPIS["mpich"].python), "-c", IN_STEP, timeout=DEADLINE_S,
                             env=single_node_environ(MPIS["mpich"]), cwd=ROOT))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["srun", 2]] * 2
    assert all(re.fullmatch(r"\d+\.0", line[2]) for line in lines)
    assert [line[3:] for line in lines] == [[True, 2]] * 2


def test_a_single_task_trains(cluster: Cluster) -> None:
    library = MPIS["mpich"]
    need(library.missing()[:1])
    check_hello(cluster.run("srun", "--mpi=cray_shasta", "-n1", str(library.python), "-m", "mpiddp",
                            str(EXAMPLES / "hello_world.py"), timeout=DEADLINE_S, env=single_node_environ(library),
                            cwd=ROOT), 1)


def test_an_mpiexec_in_a_single_task_trains(cluster: Cluster) -> None:
    library = MPIS["mpich"]
    command = mpirun(library, 2, library.python, "-m", "mpiddp", EXAMPLES / "hello_world.py")
    check_hello(in_step(cluster, library, "--mpi=cray_shasta -n1", command), 2)


def test_a_signal_to_srun_ends_agent_and_rank(cluster: Cluster) -> None:
    """By SIGKILL at once, so that srun alone can say why."""
    library = MPIS["mpich"]
    need(library.missing()[:1])
    env = processes.marked({**single_node_environ(library), "SLURM_CONF": f"{RUN}/slurm.conf"})
    command = [*cluster.at("login", ROOT), "srun", "--mpi=cray_shasta", "-n1", str(library.python), "-m", "mpiddp",
               "--quiet", str(FAULTS / "patient.py")]
    with processes.start(command, env, ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "READY\n"
            process.send_signal(signal.SIGTERM)
            text = process.communicate(timeout=DEADLINE_S)[0]
        finally:
            processes.end_tree(process.pid)
    assert "Job step aborted" in text
    assert "mpiddp: " not in text
    assert processes.leftovers(env) == []
