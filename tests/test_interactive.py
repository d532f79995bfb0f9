"""Work in a shell, as batch/interactive.md tells: a debugger on one rank, and a script that hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.faults.matrix import LAUNCHERS, Launcher
from tests.faults.test_signals import started
from tests.messages import find, message
from tests.support import DEADLINE_S, MPIS, ROOT, check, first_of, mpiexec, mpiexec_command, need, single_node_environ

pytestmark = pytest.mark.light

BREAKPOINT, REGISTER = re.findall(
    r"```python\n(.*?)```", (ROOT / "batch/interactive.md").read_text(), re.DOTALL)
(TO_RANKS,) = re.findall(r"^    (pkill .*)", (ROOT / "batch/interactive.md").read_text(), re.MULTILINE)
DEBUGGED = "import torch.distributed as dist\nseven = 7\n" + BREAKPOINT + """
dist.barrier()
print(f"rank {dist.get_rank()} has {seven}\\n", end="", flush=True)
"""
HANGS = REGISTER + """
import time
import torch.distributed as dist

def load_batch():
    time.sleep(5)

print("READY\\n", end="", flush=True)
if dist.get_rank() == 1:
    load_batch()
dist.barrier()
print("through\\n", end="", flush=True)
"""
STOOD = re.compile("barrier|load_batch")  # faulthandler writes a line in pieces, and launchers mix them
ANSWERS = "printf 'print(seven * 6)\\ncontinue\\n' | "


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["openmpi5", "openmpi4", "mpich"]))
def test_a_debugger_on_rank_0(name: str, tmp_path: Path) -> None:
    mpi = MPIS[name]
    need(mpi.missing())
    (script := tmp_path / "train.py").write_text(DEBUGGED)
    command = " ".join(mpiexec_command(mpi, 2, "-m", "mpiddp", script))
    check_debugged(processes.run("sh", "-c", ANSWERS + command, timeout=DEADLINE_S, env=single_node_environ(mpi),
                                 cwd=ROOT).stdout)


@pytest.mark.mpi
@pytest.mark.parametrize("name", first_of(["mpich", "impi", "openmpi5", "openmpi4"]))
@pytest.mark.parametrize("prompt", first_of(["breakpoint()", "input()"]))
def test_a_prompt_on_another_rank_does_not_wait_for_ever(name: str, prompt: str) -> None:
    script = f"import torch.distributed as dist\nif dist.get_rank() == 1:\n    {prompt}\ndist.barrier()"
    done = check(mpiexec(MPIS[name], 2, "-c", script), 1)
    assert len(find("launch/failed_rank", done.stderr, rank=1)) == 1, done.stderr
    assert message("launch/prompt_without_terminal", rank=1) in done.stderr


@pytest.mark.thorough("the same on one node")
def test_a_debugger_on_rank_0_under_srun(cluster: Cluster) -> None:
    mpi, script = MPIS["openmpi4"], RUN / "debugged.py"
    script.write_text(DEBUGGED)
    command = f"srun --mpi=pmix -N2 -n2 {mpi.python} -m mpiddp {script}"
    check_debugged(check(cluster.run("sh", "-c", ANSWERS + command, timeout=DEADLINE_S, env=mpi.environ(),
                                     cwd=ROOT)).stdout)


def check_debugged(text: str) -> None:
    """Fail unless one debugger was asked, and both ranks came to their end."""
    assert (text.count("(Pdb) "), text.count("42\n")) == (2, 1), text  # rank 1 may print between the prompt and 42
    assert sorted(re.findall(r"rank \d has 7", text)) == ["rank 0 has 7", "rank 1 has 7"], text


@pytest.mark.mpi
@pytest.mark.parametrize(("to", "launcher"), [
    pytest.param(to, launcher, id=f"{to}-{launcher.name}",
                 marks=() if (to, at) == ("ranks", 2) else pytest.mark.thorough)
    for to in ("launcher", "ranks") for at, launcher in enumerate(LAUNCHERS[:3])])
def test_a_script_that_hangs_says_where(launcher: Launcher, to: str, tmp_path: Path) -> None:
    """Open MPI's mpirun passes the signal on; MPICH's mpiexec ends by it."""
    passed_on = to == "ranks" or launcher.mpi.name.startswith("openmpi")
    (script := tmp_path / "train.py").write_text(HANGS)
    with started(launcher, None, script) as job:
        job.await_ready(launcher.ranks)
        time.sleep(0.5)
        if to == "launcher":
            os.kill(job.process.pid, signal.SIGUSR2)
        else:
            check(processes.run("sh", "-c", TO_RANKS.replace("train.py", str(script)), timeout=30))
        text = job.output()
    if passed_on:
        check_told(text, launcher.ranks)
    assert (job.process.returncode == 0) == passed_on, text


@pytest.mark.parametrize("launcher", [
    pytest.param(one, id=one.name, marks=() if one is LAUNCHERS[3] else pytest.mark.thorough) for one in LAUNCHERS[3:]])
def test_a_script_that_hangs_says_where_under_srun(launcher: Launcher, cluster: Cluster) -> None:
    (script := RUN / "hangs.py").write_text(HANGS)
    with started(launcher, cluster, script) as job:
        job.await_ready(launcher.ranks)
        time.sleep(0.5)
        number = check(cluster.run("squeue", "--noheader", "--format=%i", timeout=30)).stdout.strip()
        check(cluster.run("scancel", "--signal=USR2", number, timeout=30))
        text = job.output()
    check_told(text, launcher.ranks)
    assert job.process.returncode == 0, text


def check_told(text: str, ranks: int) -> None:
    """Fail unless all ranks told where they were, one of them in a function of its own, and came to their end."""
    assert sorted(STOOD.findall(text)) == ["barrier"] * (ranks - 1) + ["load_batch"], text
    assert text.count("through\n") == ranks, text
