"""What the doctor finds in the small scripts of tests/doctor/cases, and the launch line of mpiddp that it shows."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mpiddp.doctor.batch_script import BatchScript, read_from_text
from mpiddp.doctor.context import Host
from mpiddp.doctor.report import format_findings
from mpiddp.doctor.rules import check
from mpiddp.doctor.suggestion import suggest_all
from tests.doctor.measure import FOLDER
from tests.messages import message

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = FOLDER / "cases"
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node={}\n#SBATCH --gres=gpu:4\n#SBATCH --cpus-per-task=8\n"


class CaseHost(Host):
    """A host on which all files exist but one; the job script has nearly its name."""

    def exists(self, path: str) -> bool:
        return "job_train.py" not in path

    is_folder = exists

    def list_names(self, folder: str) -> list[str]:
        return ["job_train.sh"] if folder in ("", ".") else []

    def read(self, path: str) -> str | None:
        return {"parses.py": "add_argument('--local_rank')",
                "starts.sh": "$PYTHON -m torch.distributed.run $@"}.get(path)


def read_expected() -> dict[str, Any]:
    """Return what is expected of each script."""
    with (FOLDER / "cases.toml").open("rb") as file:
        return tomllib.load(file)


def show_launches(script: BatchScript) -> list[str]:
    """Return the directives and launch lines that are shown, or the words that are not understood."""
    return [text for suggestion in suggest_all(script, CaseHost()) for text in (
        [f"{suggestion.line} not understood: {suggestion.word}"] if suggestion.word else
        [*suggestion.directives, suggestion.launch])]


@pytest.mark.parametrize(("name", "expected"), read_expected().items())
def test_the_findings_and_the_launch_line_of_a_case(name: str, expected: dict[str, list[str]]) -> None:
    script = read_from_text(f"{name}.sh", (CASES / f"{name}.sh").read_text())
    found = check(script, CaseHost())
    assert [f"{finding.line} {finding.severity.name.lower()} {finding.rule}" for finding in found] == (
        expected["findings"])
    assert show_launches(script) == expected.get("launches", [])


def test_every_case_is_expected() -> None:
    assert sorted(read_expected()) == sorted(file.stem for file in CASES.iterdir())


def test_a_misspelt_script_is_not_the_job_script() -> None:
    script = read_from_text("job_train.sh", (CASES / "misspelt-script.sh").read_text())
    (finding,) = check(script, CaseHost())
    assert finding.message == message("doctor/missing_file", path="job_train.py")


@pytest.mark.parametrize(("tasks", "start", "shown"), [
    (1, "srun -c8 torchrun --nproc-per-node=4 --nnodes=2 --rdzv-endpoint=$A -m pkg.train --lr 1",
     ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=2",
      "srun --mpi=pmix -c 2 python -m mpiddp -m pkg.train --lr 1"]),
    (1, "srun -n2 -c 8 /env/bin/torchrun --nproc-per-node=4 --nnodes=2 --rdzv-endpoint=$A a.py",
     ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=2",
      "srun --mpi=pmix -n 8 -c 2 /env/bin/python -m mpiddp a.py"]),
    (4, "srun --ntasks-per-node=1 -c 32 torchrun --nproc-per-node=4 --nnodes=2 --rdzv-endpoint=$A a.py",
     ["srun --mpi=pmix --ntasks-per-node=4 -c 8 python -m mpiddp a.py"]),
    (1, "srun -c8 python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes 2 --master_addr $A parses.py",
     ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=2",
      "srun --mpi=pmix -c 2 python -u -m mpiddp --pass-local-rank=--local_rank parses.py"]),
    (1, "srun -c8 torchrun --nproc-per-node=$N --nnodes=2 a.py", ["6 not understood: --nproc-per-node $N"]),
    (1, "srun -c8 torchrun --nproc-per-node=4 --max-restarts=3 a.py", ["6 not understood: --max-restarts=3"]),
    (1, "srun -c8 accelerate launch --num_processes 8 --num_machines 2 --mixed_precision bf16 a.py",
     ["6 not understood: --mixed_precision"]),
    (1, "srun -c8 bash run.sh", []),
    (1, "srun -c8 bash -c 'cd /data; torchrun --nproc-per-node=4 --nnodes=2 a.py'", ["6 not understood: cd /data"]),
    (1, "srun -c8 --my-plugin=x torchrun --nproc-per-node=4 --nnodes=2 a.py", ["6 not understood: --my-plugin=x"]),
    (1, "srun -c8 mpirun -n 4 torchrun --nproc-per-node=4 a.py", ["6 not understood: mpirun"]),
    (1, "A='torchrun --nproc-per-node=4 --nnodes=2'\nsrun -c8 $A a.py --id $(date +%s)",
     ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=2",
      "srun --mpi=pmix -c 2 python -m mpiddp a.py --id $(date +%s)"]),
    (1, "A=\"torchrun --nproc-per-node=4 --nnodes=2 a.py --id $(date +%s)\"\nsrun -c8 $A",
     ["7 not understood: $(date +%s)"]),
    (4, "srun -c8 python -u -W ignore a.py", ["srun --mpi=pmix -c8 python -u -W ignore -m mpiddp a.py"]),
    (4, "srun -c8 python -m pkg.train", ["srun --mpi=pmix -c8 python -m mpiddp -m pkg.train"]),
    (4, "srun -c8 python a.py --rank $SLURM_PROCID", ["6 not understood: $SLURM_PROCID"]),
    (4, "module load mpich\nsrun --mpi=none -c8 python a.py", ["srun --mpi=pmi2 -c8 python -m mpiddp a.py"]),
    (4, "module load cray-mpich\nsrun -c8 python a.py", ["srun -c8 python -m mpiddp a.py"]),
    (1, "mpirun -n 2 torchrun --nproc-per-node=4 --nnodes=2 a.py",
     ["#SBATCH --ntasks-per-node=4", "mpirun -n 8 python -m mpiddp a.py"]),
    (1, "exec singularity exec --nv $I torchrun --nproc-per-node=4 --nnodes=2 a.py",
     ["#SBATCH --ntasks-per-node=4", "#SBATCH --cpus-per-task=2",
      "exec srun --mpi=pmix --cpus-per-task=$SLURM_CPUS_PER_TASK singularity exec --nv $I python -m mpiddp a.py"]),
    (1, "srun -c8 python -m mpiddp a.py", []),
    (1, "srun -n1 python prepare.py", []),
    (1, "ssh $HOST torchrun --nproc-per-node=4 a.py", ["6 not understood: how torchrun starts"]),
    (1, "# torchrun\nsrun -c8 bash starts.sh", ["7 not understood: starts.sh"]),
    (1, "mpirun --tag-output --mca btl ^openib -n 2 torchrun --nproc-per-node=4 --nnodes=2 a.py",
     ["#SBATCH --ntasks-per-node=4", "mpirun --tag-output --mca btl ^openib -n 8 python -m mpiddp a.py"]),
])
def test_the_launch_line_that_is_shown(tasks: int, start: str, shown: list[str]) -> None:
    assert show_launches(read_from_text("job.sh", f"{HEAD.format(tasks)}{start}\n")) == shown


def test_tasks_without_nodes_are_not_understood() -> None:
    """Nobody knows how many of them a node gets."""
    text = "#!/bin/bash\n#SBATCH -n 2\n#SBATCH -c 32\nsrun -c 32 torchrun --nproc-per-node=4 a.py\n"
    assert show_launches(read_from_text("job.sh", text)) == ["4 not understood: #SBATCH --ntasks=2"]


def test_the_launch_line_stands_behind_the_findings() -> None:
    script = read_from_text("job.sh", HEAD.format(1) + "srun -c8 torchrun --nproc-per-node=4 --nnodes=2 --rdzv-endpoint"
                            "=$A a.py\nsrun -c8 torchrun --nproc-per-node=$N --nnodes=2 --rdzv-endpoint=$A b.py\n")
    text = format_findings(script, [], 80, has_colours=False, suggestions=suggest_all(script, CaseHost()))
    assert text.splitlines()[:5] == [
        message("doctor/launch_line", line=6), "    #SBATCH --ntasks-per-node=4", "    #SBATCH --cpus-per-task=2",
        "    srun --mpi=pmix -c 2 python -m mpiddp a.py",
        message("doctor/not_understood", line=7, word="--nproc-per-node $N")]
