"""What the doctor's rules say, shown on Slurm: a job that breaks a rule fails or wastes, and its mended twin trains."""

from __future__ import annotations

import itertools
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpiddp.doctor.batch_script import read_from_text
from mpiddp.doctor.context import Host
from mpiddp.doctor.rules import check
from tests.cluster import Cluster
from tests.cluster.cluster import RUN
from tests.processes import PATIENCE
from tests.support import DEADLINE_S, MPIS, on_path

pytestmark = pytest.mark.light

TRAIN = r"""import os, re, socket, subprocess, sys, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ["SLURM_PROCID"])
ranks = os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ["SLURM_NTASKS"])
if "--epochs" in sys.argv:
    time.sleep(1)
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', 'batch')}"
described = subprocess.run(["scontrol", "show", "step", step], capture_output=True, text=True).stdout
cores = "".join(re.findall(r"CPUs=(\d+)", described))
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
facts = rank, "of", ranks, f"on {socket.gethostname()} cores={cores} gpus={gpus} {sys.prefix}", *sys.argv[1:]
os.write(1, f"rank {' '.join(facts)}\n".encode())
"""


@dataclass(frozen=True)
class Case:
    """A job script as a diff: lines with - are those that break a rule, lines with + those that stand there mended.

    The patterns are about "STATE EXIT-CODE FILE...", followed by what the job prints.
    """

    script: str
    broken: str
    mended: str


RANKS = r"^COMPLETED 0:0 J.out(\nrank \d of 2 .*){2}$"
CASES = {
    "late-directive": Case("""\
-set -e
 #SBATCH --ntasks=2
 srun python train.py
""", r"^COMPLETED 0:0 J.out\nrank 0 of 1 .*$", RANKS),
    "directive-text": Case("""\
-#SBATCH --output=$SLURM_JOB_ID.out
+#SBATCH --output=%j.out
 #SBATCH --ntasks=2
 srun python train.py
""", r"^COMPLETED 0:0 \$SLURM_JOB_ID.out\n", RANKS),
    "log-folder": Case("""\
-#SBATCH --output=logs/%j.out
+#SBATCH --output=%j.out
 #SBATCH --ntasks=2
 srun python train.py
""", r"^FAILED 0:53$", RANKS),
    "missing-file": Case("""\
 #SBATCH --ntasks=2
-srun python trian.py
+srun python train.py
""", r"^FAILED 2:0 J.out\n(.*No such file or directory\n?)", RANKS),
    "other-python": Case("""\
 #SBATCH --ntasks=2
 source PREFIX/bin/activate
-srun /usr/bin/python3 train.py
+srun python train.py
""", r"^COMPLETED 0:0 J.out(\nrank .* /usr){2}$", r"^COMPLETED 0:0 J.out(\nrank .*/\.venvs/\S+){2}$"),
    "one-core": Case("""\
 #SBATCH --ntasks-per-node=2
+#SBATCH --cpus-per-task=4
-srun python train.py
+srun --cpus-per-task=4 python train.py
""", r"^COMPLETED 0:0 J.out(\nrank . of 2 .* cores=2 .*){2}$",
                     r"^COMPLETED 0:0 J.out(\nrank . of 2 .* cores=8 .*){2}$"),
    "early-variable": Case("""\
 #SBATCH --ntasks=2
-srun python train.py --node-rank $SLURM_PROCID
+srun bash -c 'python train.py --node-rank $SLURM_PROCID'
""", r"^COMPLETED 0:0 J.out(\nrank .* --node-rank 0){2}$", r"^COMPLETED 0:0 J.out\nrank 0 .* 0\nrank 1 .* 1$"),
    "no-launcher": Case("""\
 #SBATCH --ntasks-per-node=2
 #SBATCH --gpus-per-node=2
-python train.py
+srun python train.py
""", r"^COMPLETED 0:0 J.out\nrank 0 of 2 .*$", RANKS),
    "nested-launcher": Case("""\
 #SBATCH --ntasks=2
-srun mpirun -n 2 python train.py
+srun python train.py
""", r"^COMPLETED 0:0 J.out\nrank 0 of 2 .*\nrank 0 of 2 .*\nrank 1 of 2 .*\nrank 1 of 2 .*$", RANKS),
    "mpirun-ranks": Case("""\
 #SBATCH --ntasks=2
-mpirun -n 4 python train.py
+mpirun python train.py
""", r"^FAILED 1:0 J.out\n", RANKS),
    "background-wait": Case("""\
 #SBATCH --ntasks=2
 srun python train.py --epochs 1 &
+wait
""", r"^COMPLETED 0:0 J.out( J.out)?\n(?!rank)", RANKS),
    "walltime": Case("""\
-#SBATCH --time=01:00
+#SBATCH --time=01:00:00
 #SBATCH --ntasks=2
 srun python train.py $(squeue --noheader --job=$SLURM_JOB_ID --format=%l)
""", r"^COMPLETED 0:0 J.out(\nrank .* 1:00){2}$", r"^COMPLETED 0:0 J.out(\nrank .* 1:00:00){2}$"),
    "unknown-option": Case("""\
 #SBATCH --ntasks=2
-srun --mpi=pmix python -m mpiddp --log-dirr logs train.py
+srun --mpi=pmix python -m mpiddp --log-dir logs train.py
""", r"^FAILED 2:0 J.out\n.*--log-dirr", r"(?s)^COMPLETED 0:0.*\nrank 0 of 2.*\nrank 1 of 2"),
    "visible-devices": Case("""\
 #SBATCH --gpus-per-node=2
 #SBATCH --ntasks-per-node=2
-export CUDA_VISIBLE_DEVICES=0
 mpirun python train.py
""", r"^COMPLETED 0:0 J.out(\nrank . of 2 .* gpus=0 .*){2}$",
                            r"^COMPLETED 0:0 J.out(\nrank . of 2 .* gpus=\d,\d .*){2}$"),
}


@dataclass(frozen=True)
class Ended:
    """A batch job that has ended, and the text for its case's pattern."""

    script: str
    folder: Path
    text: str


@pytest.fixture(scope="module")
def ended(cluster: Cluster) -> Iterator[dict[tuple[str, bool], Ended]]:
    """Submit all scripts together, each in its folder; yield how they ended, by rule and whether they are mended."""
    python = MPIS["openmpi4"].python
    env = {**MPIS["openmpi4"].environ(), **on_path(), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    root = RUN / "doctor"
    jobs: dict[tuple[str, bool], tuple[str, Path]] = {}
    for (rule, case), is_mended in itertools.product(CASES.items(), (False, True)):
        folder = root / rule / ("mended" if is_mended else "broken")
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(TRAIN)
        (folder / "job.sh").write_text(write_script(case, is_mended, python))
        done = cluster.run("sbatch", "--parsable", "job.sh", timeout=30, env=env, cwd=folder)
        jobs[rule, is_mended] = done.stdout.strip() or done.stderr, folder
    numbers = ",".join(number for number, _ in jobs.values() if number.isdecimal())
    deadline = time.monotonic() + PATIENCE * DEADLINE_S
    try:
        while left := cluster.run("squeue", "--noheader", f"--jobs={numbers}", timeout=30).stdout:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
        yield {key: Ended((folder / "job.sh").read_text(), folder,
                          f"{state(cluster, number)} {output(number, folder)}".strip())
               for key, (number, folder) in jobs.items()}
    finally:
        cluster.run("scancel", "--quiet", *numbers.split(","), timeout=30)
        shutil.rmtree(root)


def write_script(case: Case, is_mended: bool, python: Path) -> str:
    """Return the broken or the mended script of a case."""
    wanted = " +" if is_mended else " -"
    lines = [line[1:] for line in case.script.splitlines() if line[0] in wanted]
    return "\n".join(["#!/bin/bash", *lines, ""]).replace("PREFIX", str(python.parent.parent))


def state(cluster: Cluster, number: str) -> str:
    """Return a job's state and exit code, or why sbatch refused it."""
    if not number.isdecimal():
        return f"REFUSED {number}"
    facts = cluster.job(number)
    return f"{facts['JobState']} {facts['ExitCode']}"


def output(number: str, folder: Path) -> str:
    """Return the names of a job's files, with J for its number, and the sorted lines that they have."""
    files = sorted(folder.glob("*.out"))
    names = [file.name.replace(number, "J").replace("slurm-", "") for file in files]
    return "\n".join([" ".join(names), *sorted(line for file in files for line in file.read_text().splitlines())])


@pytest.mark.parametrize("rule", CASES)
def test_what_a_rule_says_happens(rule: str, ended: dict[tuple[str, bool], Ended]) -> None:
    case = CASES[rule]
    for is_mended, pattern in ((False, case.broken), (True, case.mended)):
        job = ended[rule, is_mended]
        findings = check(read_from_text("job.sh", job.script), Host(str(job.folder)))
        assert (rule in {finding.rule for finding in findings}) is not is_mended
        assert re.search(pattern, job.text), job.text
