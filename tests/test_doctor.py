"""python -m mpiddp.doctor: what it reads in a job script."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.doctor.batch_script import (
    BatchScript,
    Launch,
    NotABatchScript,
    Program,
    Request,
    Scheduler,
    read,
    read_from_text,
)
from mpiddp.doctor.context import Context, Host, Problem, Rule
from mpiddp.doctor.conversion import convert
from mpiddp.doctor.directives import parse_flux_time, parse_slurm_time
from mpiddp.doctor.edits import apply_edits, insert_line
from mpiddp.doctor.findings import Action, Edit, Finding, Severity
from mpiddp.doctor.report import as_json, format_findings
from mpiddp.doctor.rules import RULES, check, fix
from mpiddp.doctor.syntax import find_syntax_errors
from tests import support
from tests.messages import find, message
from tests.support import ROOT, Mpi, alone

HEAD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
"""
ALONE = "srun -n1 --exact --gpus=1 -c 8 python train.py --fold $i"
START = "srun --mpi=pmix --cpus-per-task=8 python -m mpiddp train.py\n"


def script(text: str, head: str = HEAD) -> BatchScript:
    return read_from_text("job.sh", head + text)


def launch(text: str, head: str = HEAD) -> Launch:
    """Return the only launch of a script."""
    (only,) = script(text, head).launches
    return only


@pytest.mark.parametrize(("content", "reason"), [
    (b"", message("doctor/empty")),
    (b"\n  \n", message("doctor/empty")),
    (b"\x7fELF\0\0", message("doctor/binary")),
    (b"#!/bin/bash\r\n#SBATCH -N 2\r\n", message("doctor/dos_lines")),
    (b"#!/bin/bash\n" + b"# line\n" * 200_000, message("doctor/too_large")),
    (b"#!/usr/bin/env python3\nprint()\n", message("doctor/python_script")),
    (b"import torch\nprint(torch)\n", message("doctor/python_script")),
    (b"#!/bin/tcsh\n#SBATCH -N 2\n", message("doctor/other_shell", shell="tcsh")),
    (b"dear diary,\n", message("doctor/no_job_script")),
    (b"#!/bin/bash\nexport A=1\nls -l\n", message("doctor/no_job_script")),
    (b"#!/bin/bash\n#SBATCH -N 2\n" + b"(" * 3000 + b"a" + b")" * 3000 + b"\n", message("doctor/too_deep")),
    (b'#!/bin/bash\n#SBATCH -N 2\necho "a\nsrun python -m mpiddp a.py\n',
     message("doctor/open_quote", line=3, quote='"')),
    (b"#!/bin/bash\n#SBATCH -N 2\necho it's\nsrun python -m mpiddp a.py\n",
     message("doctor/open_quote", line=3, quote="'")),
])
def test_a_file_that_is_no_job_script(tmp_path: Path, content: bytes, reason: str) -> None:
    (file := tmp_path / "job.sh").write_bytes(content)
    with pytest.raises(NotABatchScript) as caught:
        read(str(file))
    assert str(caught.value) == reason
    assert "\n" not in reason


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, message("doctor/folder")),
                         (tmp_path / "none.sh", message("doctor/unreadable", reason="No such file or directory"))):
        with pytest.raises(NotABatchScript) as caught:
            read(str(path))
        assert str(caught.value) == reason


def test_the_directives_of_slurm() -> None:
    head = """\
#!/bin/bash
#SBATCH -N 2 -n8 --tasks-per-node 4 -c8 # a comment
##SBATCH --account=NAME
#SBATCH --gres=gpu:a100:4 -t 1-12 --exclusive --job-name "two words"
# the next one wins
#SBATCH --nodes=3
"""
    read_script = script(START + "#SBATCH --qos=late\n", head)
    assert read_script.scheduler is Scheduler.SLURM
    assert read_script.options == {
        "nodes": "3", "ntasks": "8", "ntasks-per-node": "4", "cpus-per-task": "8", "gres": "gpu:a100:4", "time": "1-12",
        "exclusive": "", "job-name": "two words"}
    assert read_script.option_lines["nodes"] == 6
    assert [directive.line for directive in read_script.directives if directive.is_late] == [8]


@pytest.mark.parametrize(("head", "request_"), [
    ("#SBATCH -N2 --ntasks-per-node=4 --gres=gpu:4", Request(2, 8, 4, gpus_per_node=4)),
    ("#SBATCH -N2 -n8 --gpus-per-task=1", Request(2, 8, 4, gpus_per_node=4, gpus_per_task=1)),
    ("#SBATCH --nodes=2 --gpus-per-node=a100:4", Request(2, 2, 1, gpus_per_node=4)),
    ("#SBATCH --gpus=4", Request(1, 1, 1, gpus_per_node=4)),
    ("#SBATCH -n8", Request(None, 8, None)),
    ("#SBATCH -N1 -n1 --ntasks-per-node=2", Request(1, 1, 1)),
    ("#SBATCH -N2 --ntasks-per-gpu=1 -G8", Request(2, 8, 4, gpus_per_node=4)),
    ("#SBATCH -N2-4 --ntasks-per-node=4", Request(None, None, 4, unreadable=frozenset({"nodes"}))),
    ("#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4 -l walltime=01:00:00", Request(2, 8, 4, 16, 4, None, 3600)),
    ("#PBS -l nodes=2:ppn=4:gpus=4,walltime=30:00", Request(2, 8, 4, None, 4, None, 1800)),
    ("#BSUB -nnodes 2\n#BSUB -W 1:30", Request(2, walltime_s=5400)),
    ('#BSUB -n 8\n#BSUB -R "span[ptile=4]"\n#BSUB -gpu "num=4:mode=exclusive_process"',
     Request(2, 8, 4, gpus_per_node=4)),
    ("#flux: -N2 -n8 -c8 -g1 -t 90m", Request(2, 8, 4, 8, 4, 1, 5400)),
])
def test_the_resources_of_a_job(head: str, request_: Request) -> None:
    assert script(START, f"#!/bin/bash\n{head}\n").request == request_


def test_times() -> None:
    assert [parse_slurm_time(text) for text in ("30", "30:30", "1:00:00", "1-0", "1-1:1", "1-1:1:1", "UNLIMITED")] == [
        1800, 1830, 3600, 86400, 90060, 90061, None]
    assert [parse_flux_time(text) for text in ("30", "30s", "1.5h", "1d", "x")] == [1800, 30, 5400, 86400, None]


@pytest.mark.parametrize("text", [
    START,
    "srun --mpi=pmix \\\n  --cpus-per-task=$SLURM_CPUS_PER_TASK \\\n  python -m mpiddp train.py",
    'SRUN="srun --mpi pmix"; CMD="python -m mpiddp train.py"; $SRUN -c 8 $CMD',
    'COMMAND="python -m mpiddp train.py"\neval "exec srun --mpi=pmix -c$SLURM_CPUS_PER_TASK $COMMAND"',
    'cmd=(srun --mpi=pmix)\ncmd+=(-c 8 python -m mpiddp "train.py")\n"${cmd[@]}"',
    "start() { srun --mpi=pmix -c $2 python -m mpiddp $1; }\nstart train.py 8",
    'start() { local C=$1; shift; srun --mpi=pmix -c $C python -m mpiddp "$@"; }\nset -- train.py\nstart 8 $1',
    'if [ -n "$SLURM_NNODES" ]; then C=$((4 * SLURM_NNODES)); fi\nsrun --mpi pmix -c${C:-2} python -m mpiddp train.py',
    "case $SLURM_NNODES in 1) C=1;; 2|3) C=8;; *) C=3;; esac\nsrun --mpi=pmix -c $C python -m mpiddp train.py",
    "time srun --mpi=pmix -c 8 python -m mpiddp train.py 2>&1 | tee out.txt",
    "export P=python\nsrun --mpi=pmix -c 8 bash -c '$P -m mpiddp train.py'",
    "srun --mpi=pmix -c 8 bash <<'EOF'\nsource env.sh\npython -m mpiddp train.py\nEOF",
    "F=dir/train.py; srun --mpi=pmix -c 8 $(which python) -m mpiddp ${F##*/}",
])
def test_a_launch_is_followed(text: str) -> None:
    """Through variables, eval, functions, arrays, arithmetic, conditions, pipes and shells that are started."""
    found = launch(text)
    assert (found.launcher, found.launcher_options) == ("srun", {"mpi": "pmix", "cpus-per-task": "8"})
    assert (found.program, found.program_words) == (Program.MPIDDP, ("python", "-m", "mpiddp", "train.py"))
    assert (found.script, found.script_words) == ("train.py", ("train.py",))
    assert not found.has_unknown_options


def test_what_is_not_known_is_said() -> None:
    found = launch("srun $OPTIONS --mpi=pmix python -m mpiddp --log-dir $LOGS $SCRIPT --lr 1")
    assert found.has_unknown_options
    assert found.unknown == ("$OPTIONS", "$LOGS", "$SCRIPT")
    assert found.script is None
    assert found.options == ("--log-dir", "$LOGS")


def test_a_launcher_that_is_not_known_is_the_word_as_written() -> None:
    found = launch("$LAUNCH python -m mpiddp a.py")
    assert (found.launcher, found.has_unknown_options, found.program) == ("$LAUNCH", True, Program.MPIDDP)
    assert launch("$TIME srun python -m mpiddp a.py").launcher == "srun"


def test_a_variable_that_depends_on_the_job_is_unknown() -> None:
    found = script('if [ "$(hostname)" = a ]; then N=1; else N=2; fi\nfor i in 1 2; do M=$i; done\nread -r K\n'
                   "srun -n $N -c $M -N $K python -m mpiddp a.py")
    assert found.launches[0].launcher_options == {"ntasks": "$N", "cpus-per-task": "$M", "nodes": "$K"}
    assert found.variables == {}


def test_assignments_before_a_keyword() -> None:
    """The parser alone takes `while` for the command that these assignments are for."""
    text = ('if [ -n "$M" ]; then module purge; module load $M || exit 1; fi\nA=$! B=8\n'
            "while [ $C = yes ]; do wait $A; done\nC=1 D=4\nsrun -n $B -c $D python -m mpiddp a.py\n")
    found = script(text)
    assert [command.words[0] for command in found.commands if command.in_loop] == ["wait"]
    assert found.launches[0].launcher_options == {"ntasks": "8", "cpus-per-task": "4"}
    assert found.launches[0].line == 10


def test_a_branch_that_is_not_taken_is_not_read() -> None:
    """Nor is what follows an exit."""
    text = 'DEBUG=0\nif [ $DEBUG = 1 ]; then srun python a.py; exit; fi\nsrun python b.py\nexit 0\nsrun python c.py\n'
    assert launch(text).script == "b.py"


@pytest.mark.parametrize(("words", "wrappers", "container"), [
    ("apptainer exec --nv --bind /tmp,$PWD image.sif", 6, "apptainer"),
    ("singularity run --rocm image.sif bash -c 'exec numactl --membind=0", 7, "singularity"),
    ("shifter --image=a:b", 2, "shifter"),
    ("podman-hpc run --rm --gpu -v /a:/b a/b:1", 7, "podman-hpc"),
    ("numactl -N 0 -m 0 env -u A B=1", 9, ""),
    ("conda run --no-capture-output -n torch", 5, ""),
    ("nice -n 5 timeout -k 5 60", 7, ""),
])
def test_what_stands_before_the_program(words: str, wrappers: int, container: str) -> None:
    end = "'" if "'" in words else ""
    found = launch(f"srun {words} python -m mpiddp train.py{end}")
    assert (found.program, found.script, found.container) == (Program.MPIDDP, "train.py", container)
    assert len(found.wrapper_words) == wrappers


@pytest.mark.parametrize(("command", "program", "script_words"), [
    ("python -u -X dev -m mpiddp --prefix --show 0 -m pkg.train --lr 1", Program.MPIDDP, ("pkg.train", "--lr", "1")),
    ("mpiddp a.py", Program.MPIDDP, ("a.py",)),
    ("torchrun --standalone --nproc_per_node=4 --rdzv_backend c10d a.py --lr 1", Program.TORCHRUN,
     ("a.py", "--lr", "1")),
    ("torchrun --nnodes 2 -m pkg.train", Program.TORCHRUN, ("pkg.train",)),
    ("python3 -m torch.distributed.run --nproc-per-node 4 a.py", Program.TORCHRUN, ("a.py",)),
    ("python -m torch.distributed.launch --use_env --nproc_per_node 4 a.py", Program.TORCH_LAUNCH, ("a.py",)),
    ("accelerate launch --multi_gpu --config_file c.yaml --num_processes 8 a.py", Program.ACCELERATE, ("a.py",)),
    ("deepspeed --num_gpus 4 a.py --deepspeed", Program.DEEPSPEED, ("a.py", "--deepspeed")),
    ("/env/bin/python3.11 a.py", Program.PYTHON, ("a.py",)),
])
def test_programs(command: str, program: Program, script_words: tuple[str, ...]) -> None:
    for start in ("", "srun "):
        found = launch(start + command)
        assert (found.program, found.script_words, found.launcher) == (program, script_words, start.strip())


@pytest.mark.parametrize(("command", "launcher", "options"), [
    ("mpirun -np 8 --map-by ppr:4:node:PE=8 -x PATH -x A=1 --bind-to none", "mpirun",
     {"ntasks": "8", "map-by": "ppr:4:node:PE=8", "ntasks-per-node": "4", "x": "PATH,A=1", "bind-to": "none"}),
    ("mpiexec -n 8 --ppn 4 --cpu-bind none", "mpiexec", {"ntasks": "8", "ntasks-per-node": "4", "cpu-bind": "none"}),
    ("mpiexec.hydra -bootstrap slurm -genv A 1 -ppn 2", "mpiexec.hydra",
     {"bootstrap": "slurm", "genv": "A 1", "ntasks-per-node": "2"}),
    ("mpirun --oversubscribe --mca btl tcp,self", "mpirun", {"oversubscribe": "", "mca": "btl tcp,self"}),
    ("flux run -N2 -n8 -c8 -g1 -o pmi=pmix -o cpu-affinity=off", "flux",
     {"nodes": "2", "ntasks": "8", "cores-per-task": "8", "gpus-per-task": "1", "setopt": "pmi=pmix,cpu-affinity=off"}),
    ("jsrun -n 4 -a 1 -c7 --gpu_per_rs 1", "jsrun",
     {"nrs": "4", "tasks_per_rs": "1", "cpu_per_rs": "7", "gpu_per_rs": "1"}),
    ("ibrun -n 4", "ibrun", {"ntasks": "4"}),
    ("srun -lu -N2 --export=ALL,A=1 --exclusive --kill-on-bad-exit=1", "srun",
     {"label": "", "unbuffered": "", "nodes": "2", "export": "ALL,A=1", "exclusive": "", "kill-on-bad-exit": "1"}),
])
def test_launchers(command: str, launcher: str, options: dict[str, str]) -> None:
    found = launch(f"{command} python -m mpiddp a.py")
    assert (found.launcher, found.launcher_options, found.script) == (launcher, options, "a.py")


def test_a_launcher_within_a_launcher() -> None:
    found = launch("srun -N2 mpirun -n 4 python -m mpiddp a.py")
    assert (found.launcher, found.inner, found.program) == ("srun", "mpirun", Program.MPIDDP)


def test_what_is_not_followed_is_said() -> None:
    text = ("source settings.sh\nsource venv/bin/activate\n. /etc/profile\n$TOOL --run\nsbatch next.sh\n"
            "srun $OPTIONS python -m mpiddp a.py\nsrun ./task.sh\n")
    assert [(note.line, note.text) for note in script(text).not_followed] == [
        (6, message("doctor/sourced_file", file="settings.sh")),
        (9, message("doctor/unknown_command", command="$TOOL")),
        (10, message("doctor/submitted_job")), (11, message("doctor/unknown_options", words="$OPTIONS")),
        (12, message("doctor/started_script", file="./task.sh"))]


def test_a_shell_script_that_the_job_script_writes_is_read() -> None:
    """What the batch shell expands in it has the values of the batch script."""
    text = ("ADDRESS=node1; F=dir/run.sh\ncat > $F <<EOF\nexport A=\\$B\nEOF\ncat >> $F <<-EOF\n"
            "\ttorchrun --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=$ADDRESS \\\\\n  a.py --a \\$A\nEOF\n"
            "cd dir; srun ./run.sh\n")
    found = launch(text)
    assert (found.program, found.script, found.followed) == (Program.TORCHRUN, "a.py", "./run.sh")
    assert found.options == ("--nnodes=2", "--node_rank=$SLURM_NODEID", "--master_addr=node1")
    assert found.script_words == ("a.py", "--a", "$B")
    assert found.early == ("$SLURM_NODEID",)
    read_text = script("read -r -d '' TEXT <<'EOF'\npython -m mpiddp b.py\nEOF\nsrun bash -c \"$TEXT\"\n")
    assert read_text.launches[0].script == "b.py"


def test_what_a_written_script_sets_up_is_converted() -> None:
    text = "cat > run.sh <<'EOF'\nexport A=1\ntorchrun --nnodes=2 --nproc-per-node=4 a.py\nEOF\nsrun bash run.sh\n"
    converted = convert(script(text, ONE_TASK), Host().read)
    assert re.search(r"EOF\n(#.*\n)*export A=1\nsrun --mpi=pmix .*python -m mpiddp a\.py\n", converted)


def test_a_module_that_may_define_conda_is_said() -> None:
    text = MODULE.format("miniconda/24") + "conda activate a\n" + START
    assert [note.text for note in script(text).not_followed] == [message("doctor/conda_module", module="miniconda/24")]


def test_a_shell_script_that_is_started_is_read(tmp_path: Path) -> None:
    (tmp_path / "task.sh").write_text("conda activate e\ntorchrun --nproc_per_node=$N --node_rank $SLURM_NODEID $1\n")
    (job := tmp_path / "job.sh").write_text(HEAD + "export N=4\nsrun bash task.sh train.py\nsrun ./none.sh\n")
    first, second = read(str(job)).launches
    assert (first.program, first.script, first.followed) == (Program.TORCHRUN, "train.py", "task.sh")
    assert first.options == ("--nproc_per_node=4", "--node_rank", "$SLURM_NODEID")
    assert (second.program, second.script) == (Program.OTHER, "./none.sh")


def test_our_own_scripts_are_read_and_give_no_finding() -> None:
    """Each starts mpiddp, and its script is known."""
    for file in sorted((ROOT / "batch").glob("*.sh")):
        found = read(str(file))
        assert [training.script for training in found.trainings] == ["train.py"] * (1 + (file.name == "enroot.sh"))
        assert [note.text for note in found.not_followed] == [
            message("doctor/unknown_command", command='$(python - "$CONFIG" <<\'END\' …')] * (
                file.name == "accelerate.sh")
        assert not any(training.has_unknown_options for training in found.trainings)
        assert check(found, AllHere()) == []


class AllHere(Host):
    """A host on which all files exist."""

    def exists(self, path: str) -> bool:
        return bool(path)

    is_folder = exists


def head(*lines: str, without: str = "") -> str:
    """Return HEAD without the directives that a pattern matches, and with others."""
    kept = [line for line in HEAD.splitlines() if not without or not re.search(without, line)]
    return "\n".join([*kept, *(f"#SBATCH {line}" if line.startswith("-") else line for line in lines), ""])


MODULE = "module load {}\n"
REQUEUE = "status=$?\nif [ $status = 75 ]; then scontrol requeue $SLURM_JOB_ID; fi\n"
TORCHRUN = "srun --cpus-per-task=8 torchrun --nnodes=2 --nproc-per-node=4 --rdzv-endpoint=$ADDRESS train.py\n"
LSF = '#BSUB -n 8\n#BSUB -R "span[ptile=4]"\n#BSUB -gpu "num=4"\n'
PBS = "#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4\n"
MPIRUN = "mpirun python -m mpiddp train.py\n"
FLUX = "flux run -N2 -n8 -c8 -g1 --setopt=a python -m mpiddp --virtual-local-rank train.py\n"
OWN_ADDRESS = "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-endpoint=$(hostname):29500 train.py"
ON_NODE = "torchrun --nnodes=2 --nproc-per-node=4 --node_rank=$SLURM_NODEID --master_addr=$ADDRESS train.py\n"
TWO_HALVES = "".join(f"export CUDA_VISIBLE_DEVICES={gpus}\ntorchrun --nproc-per-node=2 train.py &\n"
                     for gpus in ("0,1", "2,3")) + "wait\n"
ONE_TASK = head("--ntasks-per-node=1", without="ntasks")
# For each rule: a message, and scripts that break it; then scripts that do not, but come near.
RULES_BROKEN = {
    "tasks-per-node": [
        (message("doctor/tasks_per_node", processes="1 process", gpus="4 GPUs"), (ONE_TASK, START)),
        (message("doctor/tasks_per_node", processes="2 processes", gpus="4 GPUs"),
         (head("--ntasks-per-node=2", without="ntasks"), START)),
        (message("doctor/tasks_per_node", processes="8 processes", gpus="4 GPUs"),
         (head("--ntasks-per-node=8", without="ntasks"), START)),
        (message("doctor/tasks_per_node", processes="2 processes", gpus="4 GPUs"),
         (ONE_TASK, "srun -c8 accelerate launch --config_file accelerate.yaml train.py\n")),
        (message("doctor/tasks_per_node", processes="4 processes", gpus="1 GPU"),
         (LSF.replace("num=4", "num=1/host:j_exclusive=yes"), MPIRUN.replace("run ", "run -n $LSB_DJOB_NUMPROC "))),
        (message("doctor/gpus_multiplied", each=2, tasks="4 tasks", gpus="8 GPUs"),
         (LSF.replace("num=4", "num=2/task"), MPIRUN)),
        (message("doctor/tasks_per_node", processes="2 processes", gpus="4 GPUs"),
         (ONE_TASK, TORCHRUN.replace("node=4", "node=2"))),
        (message("doctor/tasks_per_node", processes="1 process", gpus="4 GPUs"),
         (head("--ntasks=1", "--nodes=1", without="nodes"), "srun -c 8 python train.py --devices 4\n")),
        (message("doctor/tasks_per_node", processes="4 processes", gpus="1 GPU"),
         (HEAD, START.replace("srun", "srun --gres=gpu:1"))),
        (message("doctor/tasks_per_node", processes="1 process", gpus="4 GPUs"),
         ("#PBS -l select=2:ncpus=64:ngpus=4\n", "cd $PBS_O_WORKDIR\nmpirun python -m mpiddp train.py\n")),
        (message("doctor/gpus_multiplied", each=4, tasks="4 tasks", gpus="16 GPUs"),
         (head("--gpus-per-task=4", without="gpus"), START)),
        (message("doctor/gpus_multiplied", each=4, tasks="4 tasks", gpus="16 GPUs"),
         ("#flux: -N2\n", "flux run -N2 -n8 -c8 -g 4 python -m mpiddp train.py\n")),
        (message("doctor/tasks_per_node", processes="1 process", gpus="4 GPUs"),
         (ONE_TASK, "srun -c8 python wraps.py\n")),
        (message("doctor/tasks_per_node", processes="2 processes", gpus="4 GPUs"),
         (ONE_TASK.replace("=2", "=1"),
          "export CUDA_VISIBLE_DEVICES=0,1,2,3\ntorchrun --nproc-per-node=2 train.py\n")),
    ],
    "uneven-tasks": [
        (message("doctor/uneven_tasks", tasks=7, nodes=2),
         ("#SBATCH -N2 -n7 -c8\n", START)),
        (message("doctor/scattered_tasks", tasks=8), ("#SBATCH -n8 -c8 --gres=gpu:4\n", START)),
        (message("doctor/crowded_tasks", tasks=8, nodes=2), ("#SBATCH -N2 -n8 -c8 --gres=gpu:4\n", START)),
    ],
    "gpus-per-task": [
        (message("doctor/gpus_per_task", option="gpus-per-task"),
         (head("--gpus-per-task=1", without="gpus"), START)),
        (message("doctor/gpus_per_task", option="gpu-bind"), (HEAD, START.replace("srun", "srun --gpu-bind=single:1"))),
        (message("doctor/gpus_per_task", option="gpus-per-task"),
         (head("--tres-per-task=cpu:8,gres/gpu:1", without="gpus|cpus"), START)),
    ],
    "one-core": [
        (message("doctor/one_core"), (head(without="cpus"), START.replace(" --cpus-per-task=8", ""))),
        (message("doctor/one_core_given"), (head("-c1", without="cpus"), START.replace(" --cpus-per-task=8", ""))),
        (message("doctor/one_core_flux"), ("#flux: -N2\n", "flux run -N2 -n8 -g1 python -m mpiddp train.py\n")),
        (message("doctor/one_core_jsrun"), ("#BSUB -nnodes 2\n", "jsrun -n 12 -r 6 -a 1 -g 1 python -m mpiddp a.py\n")),
        (message("doctor/one_core_pbs"), ("#PBS -l select=2:ngpus=4:mpiprocs=4\n",
                                          "cd $PBS_O_WORKDIR; mpirun python -m mpiddp train.py\n")),
    ],
    "srun-cpus": [
        (message("doctor/srun_cpus", cores=8), (HEAD, "srun --mpi=pmix python -m mpiddp train.py\n")),
    ],
    "hyper-threads": [
        (message("doctor/hyper_threads", option="hint"), (head("--hint=multithread"), START)),
        (message("doctor/ranks_on_one_core", ranks=2), (head("--ntasks-per-core=2"), START)),
        (message("doctor/too_many_threads", threads=16, cores="8 cores"),
         (HEAD, "export OMP_NUM_THREADS=16\n" + START)),
    ],
    "memory": [
        (message("doctor/memory_unit", option="mem", size=64), (head("--mem=64"), START)),
        (message("doctor/memory_per_rank", size="1.0"), (head("--mem=4G"), START)),
        (message("doctor/memory_per_rank", size="0.8"), (head("--mem-per-cpu=100"), START)),
        (message("doctor/memory_twice", first="mem", second="mem-per-cpu"),
         (head("--mem=64G", "--mem-per-cpu=4G"), START)),
        (message("doctor/memory_unit", option="mem", size=900), ("#SBATCH --mem=900 -c4\n", "python train.py\n")),
        (message("doctor/memory_unit", option="mem", size=900), ("#SBATCH --mem=900 -c4\n", "python plain.py\n")),
    ],
    "exclusive": [
        (message("doctor/exclusive", gpus=8),
         (head("--ntasks-per-node=8", "--gpus-per-node=8", without="ntasks|gpus"), START)),
    ],
    "walltime": [
        (message("doctor/minutes", time="24:00", minutes="24 minutes"), (head("--time=24:00"), START)),
        (message("doctor/short_walltime", seconds="60 seconds"), (head("-t 1"), START)),
        (message("doctor/minutes", time="48", minutes="48 minutes"), (head("-t 48"), START)),
        (message("doctor/minutes", time="30", minutes="30 minutes"), (head("--time=30   # 30 hours"), START)),
        (message("doctor/refused_walltime", time="abc", program="sbatch"), (head("-t abc"), START)),
        (message("doctor/refused_walltime", time="24h", program="sbatch"), (head("--time=24h"), START)),
        (message("doctor/refused_walltime", time="24:00:00", program="bsub"), (f"{LSF}#BSUB -W 24:00:00\n", MPIRUN)),
        (message("doctor/minutes_elsewhere", time="36", minutes="36 minutes"), (f"{LSF}#BSUB -W 36\n", MPIRUN)),
        (message("doctor/minutes_elsewhere", time="48:00", minutes="48 minutes"),
         (f"{PBS}#PBS -l walltime=48:00\n", f"cd $PBS_O_WORKDIR\n{MPIRUN}")),
        (message("doctor/refused_walltime", time="2d", program="qsub"),
         (f"{PBS}#PBS -l walltime=2d\n", f"cd $PBS_O_WORKDIR\n{MPIRUN}")),
        (message("doctor/refused_walltime", time="12:00:00", program="Flux"), ("#flux: -N2 -t 12:00:00\n", FLUX)),
        (message("doctor/minutes", time="5:00", minutes="5 minutes"), (head("-p debug", "--time=5:00"), START)),
    ],
    "mpirun-ranks": [
        (message("doctor/mpirun_ranks", launcher="mpirun", ranks="16 ranks", tasks="8 tasks"),
         (head("--gpus-per-node=8", "--mem=0", without="gpus"), "mpirun -n 16 python -m mpiddp train.py\n")),
        (message("doctor/mpirun_ranks", launcher="mpirun", ranks="8 ranks", tasks="2 tasks"),
         ("#PBS -l select=2:ncpus=64:ngpus=4\n",
          "module load openmpi\ncd $PBS_O_WORKDIR\nmpirun -np 8 python -m mpiddp train.py\n")),
        (message("doctor/ranks_per_node", ranks=12, per_node=4, nodes="2 nodes"),
         ("#PBS -l select=2:ncpus=64:ngpus=4\n",
          "cd $PBS_O_WORKDIR\nmpiexec -n 12 --ppn 4 python -m mpiddp train.py\n")),
    ],
    "container-gpus": [
        (message("doctor/container_without_gpus", container="apptainer"),
         (HEAD, START.replace("python", "apptainer exec image.sif python"))),
        (message("doctor/podman_without_gpus"), (HEAD, START.replace("python", "podman-hpc run a/b python"))),
        (message("doctor/container_without_gpus", container="apptainer"),
         (HEAD, START.replace("python", 'apptainer exec --bind "/a,$PWD" --pwd $PWD "$SIF" python'))),
    ],
    "visible-devices": [
        (message("doctor/visible_devices", value="CUDA_VISIBLE_DEVICES=0", hidden=3, gpus="4 GPUs"),
         (HEAD, "export CUDA_VISIBLE_DEVICES=0\nmpirun python -m mpiddp train.py\n")),
        (message("doctor/visible_devices", value="CUDA_VISIBLE_DEVICES=0,1", hidden=2, gpus="4 GPUs"),
         (ONE_TASK.replace("=2", "=1"), "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc-per-node=4 train.py\n")),
        (message("doctor/visible_devices", value="CUDA_VISIBLE_DEVICES=0,1", hidden=2, gpus="4 GPUs"),
         (ONE_TASK.replace("=2", "=1"), "export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc-per-node=2 train.py\n")),
        (message("doctor/visible_devices", value="CUDA_VISIBLE_DEVICES=0,1", hidden=2, gpus="4 GPUs"),
         (ONE_TASK.replace("=2", "=1"), "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=4 train.py\n")),
    ],
    "step-gpus": [
        (message("doctor/step_gpus"),
         ("#flux: -N2 -n8 -g1\n", "flux run -N2 -n8 -c8 python -m mpiddp train.py\n")),
    ],
    "mpi-interface": [
        (message("doctor/no_mpi_option"), (HEAD, START.replace(" --mpi=pmix", ""))),
        (message("doctor/mpi_none"), (HEAD, START.replace("pmix", "none"))),
        (message("doctor/mpi_interface", interface="pmix", library="Intel MPI", module="intel-mpi/2021"),
         (HEAD, MODULE.format("intel-mpi/2021") + START)),
        (message("doctor/mpi_interface", interface="pmix", library="MPICH", module="mpich"),
         (HEAD, MODULE.format("gcc/12 mpich") + START)),
        (message("doctor/mpi_interface", interface="pmi2", library="Open MPI", module="openmpi/5.0.3"),
         (HEAD, MODULE.format("cuda openmpi/5.0.3") + START.replace("pmix", "pmi2"))),
        (message("doctor/mpi_interface", interface="pmix", library="Cray MPICH", module="cray-mpich/8.1"),
         (HEAD, MODULE.format("PrgEnv-gnu cray-mpich/8.1") + START)),
        (message("doctor/pmi_library"), (HEAD, MODULE.format("impi") + START.replace("pmix", "pmi2"))),
    ],
    "several-mpi": [
        (message("doctor/several_mpi", modules="mpich/4.1, openmpi/5.0"),
         (HEAD, MODULE.format("mpich/4.1 openmpi/5.0") + START)),
    ],
    "nested-launcher": [
        (message("doctor/launcher_in_launcher", outer="srun", inner="mpirun"),
         (HEAD, START.replace("python", "mpirun python"))),
        (message("doctor/mpiddp_starts", program="torchrun"), (HEAD, START.replace("train.py", "torchrun train.py"))),
        (message("doctor/starts_mpiddp", program="torchrun"),
         (ONE_TASK, TORCHRUN.replace("train.py", "-m mpiddp train.py"))),
        (message("doctor/several_torchruns", tasks=4, program="torchrun", processes="4 processes"), (HEAD, TORCHRUN)),
        ("4 times torchrun, each with 4 processes", ("#SBATCH -n4 --gpus=4 -c8\n", TORCHRUN.replace("=2", "=1"))),
    ],
    "no-launcher": [
        (message("doctor/no_launcher", many="8 tasks"), (HEAD, "python -m mpiddp train.py\n")),
        (message("doctor/no_launcher", many="8 tasks"), (HEAD, "python train.py\n")),
        (message("doctor/first_node_only", program="torchrun", nodes=2), (ONE_TASK, TORCHRUN.partition("-task=8 ")[2])),
        (message("doctor/first_node_only", program="torchrun", nodes=2),
         (head("--ntasks=1", "--gpus-per-task=2", without="ntasks|gpus"), "torchrun --standalone train.py\n")),
        (message("doctor/no_launcher", many="4 tasks"), (HEAD.replace("=2", "=1"), "python train.py\n")),
        (message("doctor/no_launcher", many="4 tasks"), (HEAD.replace("=2", "=1"), "python wraps.py\n")),
    ],
    "no-training": [
        (message("doctor/no_training"), (HEAD, "cd data\nmpirun\n")),
        (message("doctor/no_followed_training", program="run.sh"), (HEAD, "srun -c8 bash run.sh\n")),
        (message("doctor/no_followed_training", program="./program"), (HEAD, "srun -c8 ./program\n")),
        (message("doctor/no_followed_training", program="$PROGRAM"), (HEAD, "srun -c8 $PROGRAM\n")),
    ],
    "split-world": [
        (message("doctor/split_world", how="without --nnodes", nodes=2),
         (ONE_TASK, TORCHRUN.replace("--nnodes=2", ""))),
        (message("doctor/split_world", how="--standalone", nodes=2),
         (ONE_TASK, TORCHRUN.replace("--nnodes=2", "--standalone"))),
        (message("doctor/number_of_nodes", given=3, nodes=2), (ONE_TASK, TORCHRUN.replace("--nnodes=2", "--nnodes=3"))),
        (message("doctor/localhost", nodes=2), (ONE_TASK, TORCHRUN.replace("$ADDRESS", "localhost:29500"))),
        (message("doctor/own_address", nodes=2), (ONE_TASK, f"srun -c8 bash -c '{OWN_ADDRESS}'\n")),
        (message("doctor/lone_starter", starter="accelerate launch", option="num_machines", nodes=2),
         (ONE_TASK, "srun -c8 accelerate launch --multi_gpu --num_processes 4 train.py\n")),
        (message("doctor/lone_starter", starter="deepspeed", option="hostfile", nodes=2),
         (ONE_TASK, "srun -c8 deepspeed --num_gpus 4 train.py\n")),
        (message("doctor/same_node", number=0, nodes=2),
         (ONE_TASK, TORCHRUN.replace("--nnodes", "--node_rank=0 --nnodes"))),
    ],
    "line-continuation": [
        (message("doctor/blank_behind"), (HEAD, START.replace("python", "\\ \n  python"))),
        (message("doctor/begins_with_option", option="--epochs"), (HEAD, START + "  --epochs 3\n")),
        (message("doctor/begins_with_option", option="--epochs"),
         (HEAD, f"{START.rstrip()} \\\n# --lr 1 \\\n  --epochs 3\n")),
    ],
    "early-variable": [
        (message("doctor/early_variable", variable="SLURM_PROCID"),
         (HEAD, START.replace("train.py", "train.py --rank $SLURM_PROCID"))),
        (message("doctor/early_variable", variable="SLURM_NODEID"),
         (ONE_TASK, TORCHRUN.replace("train.py", "--node_rank=$SLURM_NODEID train.py"))),
        (message("doctor/early_variable", variable="SLURM_NODEID"),
         (ONE_TASK, f'F=run_$SLURM_JOB_ID.sh\ncat > $F <<EOF\necho $SLURM_NODEID\n{ON_NODE}EOF\nsrun -c8 bash $F\n')),
        (message("doctor/early_variable", variable="SLURM_NODEID"),
         (ONE_TASK, f"srun -c8 bash <<EOF\n{ON_NODE}EOF\n")),
        (message("doctor/early_variable", variable="SLURM_NODEID"),
         (ONE_TASK, f'srun -c8 bash -c "{ON_NODE.strip()}"\n')),
        (message("doctor/early_variable", variable="SLURM_NODEID"),
         (ONE_TASK, f'T=$(cat <<EOF\n{ON_NODE}EOF\n)\nsrun -c8 bash -c "$T"\n')),
        (message("doctor/early_export", variable="SLURM_PROCID"),
         (HEAD, "export RANK=$SLURM_PROCID\nsrun -c8 python train.py\n")),
        (message("doctor/early_export", variable="SLURM_LOCALID"),
         (HEAD, "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\n" + START)),
    ],
    "lightning": [
        (message("doctor/lightning_nodes", given=4, nodes="2 nodes"),
         (HEAD, "srun -c8 python light.py --num_nodes 4\n")),
        (message("doctor/lightning_nodes", given=2, nodes="1 node"),
         (HEAD.replace("nodes=2", "nodes=1"), "srun -c8 python trainer.py\n")),
        (message("doctor/lightning_tasks", tasks="8 tasks"),
         (head("--ntasks=8", "--exclusive", without="ntasks"), "srun -c8 python trainer.py\n")),
        (message("doctor/lightning_one_node", nodes="2 nodes"), (HEAD, "srun -c8 python no_nodes.py\n")),
    ],
    "unset-variable": [
        (message("doctor/unset_variable", variable="SLURM_CPUS_PER_TASK", option="cpus-per-task"),
         (head("--exclusive", without="cpus"), START.replace("=8", "=$SLURM_CPUS_PER_TASK"))),
    ],
    "export-none": [
        (message("doctor/export_none"), (head("--export=NONE"), START)),
        (message("doctor/export_list", list="A=1"), (HEAD, START.replace("srun", "srun --export=A=1"))),
    ],
    "unknown-option": [
        (message("doctor/unknown_option", option="--log-dri", hint="--log-dir"),
         (HEAD, START.replace("train.py", "--log-dri logs train.py"))),
        (message("doctor/several_options", options="--nnodes=2, --rdzv_backend, --rdzv_endpoint=$HEAD:29400"),
         (HEAD, START.replace("train.py", "--nnodes=2 --rdzv_backend c10d --rdzv_endpoint=$HEAD:29400 train.py"))),
        (message("doctor/option_of_sbatch", option="--requeue"),
         (HEAD, START.replace("train.py", "--requeue train.py"))),
        (message("doctor/foreign_option", option="--nproc-per-node"),
         (HEAD, START.replace("train.py", "--nproc-per-node 4 train.py"))),
        (message("doctor/unknown_variable", variable="MPIDDP_LOG_DRI", hint="MPIDDP_LOG_DIR"),
         (HEAD, "export MPIDDP_LOG_DRI=logs\n" + START)),
    ],
    "background-wait": [
        (message("doctor/background_wait"), (HEAD, START.rstrip() + " &\n")),
        (message("doctor/background_wait"), (HEAD, START.rstrip() + " | tee log &\n")),
        (message("doctor/background_wait"), (HEAD, f"main() {{\n  {START}}}\nmain &\n")),
        (message("doctor/background_wait"), (HEAD, f"(cd a && {START.rstrip()}) &\n")),
        (message("doctor/flux_submit"), ("#flux: -N2\n", FLUX.replace("run", "submit"))),
    ],
    "mpi-option": [
        (message("doctor/mpi_option", option="-genv", library="Open MPI", launcher="mpirun"),
         (HEAD, MODULE.format("openmpi") + "mpirun -genv A 1 python -m mpiddp train.py\n")),
    ],
    "signal-batch": [
        (message("doctor/trap_without_batch", signal="USR1"),
         (head("--signal=USR1@120"), f"trap 'kill $!' USR1\n{START.rstrip()} &\nwait\n")),
        (message("doctor/mpirun_without_batch", launcher="mpirun"),
         (head("--signal=USR1@120"), "mpirun python -m mpiddp train.py\n")),
        (message("doctor/batch_without_trap", signal="USR1"), (head("--signal=B:SIGUSR1@120"), START)),
        (message("doctor/trap_waits", signal="USR1"),
         (head("--signal=B:USR1@120"), "trap 'touch stop' SIGUSR1\n" + START)),
        (message("doctor/one_wait", signal="USR1"),
         (head("--signal=B:USR1@120"), f"trap 'kill -USR1 $!' USR1\n{START.rstrip()} &\nwait\n")),
        (message("doctor/batch_without_trap", signal="USR1"), (head("--signal=B:10@120"), START)),
    ],
    "signal-time": [
        (message("doctor/signal_at_once", seconds=600, walltime=600), (head("--signal=USR1@600", "--time=10"), START)),
        (message("doctor/late_signal", seconds=10), (head("--signal=USR1@10"), START)),
        (message("doctor/stop_at_once", seconds=900, walltime=600),
         (head("--time=10"), START.replace("train.py", "--stop-before 900 train.py"))),
    ],
    "should-stop": [
        (message("doctor/should_stop", option="--stop-before", path="plain.py"),
         (HEAD, START.replace("train.py", "--stop-before 120 plain.py"))),
        (message("doctor/should_stop", option="--signal", path="plain.py"),
         (head("--signal=USR1@120"), START.replace("train.py", "plain.py"))),
    ],
    "requeue": [
        (message("doctor/requeue"), (head("--open-mode=append"), START + REQUEUE)),
        (message("doctor/requeue"),
         (head("--open-mode=append"), START + "echo 'again' && scontrol requeue $SLURM_JOB_ID\n")),
        (message("doctor/no_requeue"), (head("--open-mode=append", "--no-requeue"), START + REQUEUE)),
        (message("doctor/nothing_requeues", option="stop-before"),
         (head("--open-mode=append", "--requeue"), START.replace("train.py", "--stop-before 120 train.py"))),
        (message("doctor/nothing_requeues", option="signal"),
         (head("--open-mode=append", "--requeue", "--signal=USR1@120"), START)),
    ],
    "open-mode": [
        (message("doctor/open_mode"), (head("--requeue"), START + REQUEUE)),
    ],
    "errexit": [
        (message("doctor/errexit"), (head("--requeue", "--open-mode=append"), "set -euo pipefail\n" + START + REQUEUE)),
    ],
    "late-directive": [
        (message("doctor/late_directive", line=8, first=7), (HEAD, "cd a\n#SBATCH --qos=a\n" + START)),
        (message("doctor/late_directives", lines="8-9, 11", first=7),
         (HEAD, "cd a\n#SBATCH --qos=a\n#SBATCH -A b\n\n#SBATCH --time=1:00:00\n" + START)),
        (message("doctor/late_directives", lines="3-6", first=2), ("", f"cd a\n{HEAD.partition(chr(10))[2]}{START}")),
    ],
    "directive-text": [
        (message("doctor/typographic"), (head("#SBATCH \u2013\u2013account=a"), START)),
        (message("doctor/variable_in_directive", variable="$HOME"), (head("--output=$HOME/%j.out"), START)),
        (message("doctor/pbs_comment"), ("#PBS -l select=2:ncpus=8:mpiprocs=1 # nodes\n",
                                         "cd $PBS_O_WORKDIR\nmpirun python -m mpiddp train.py\n")),
        (message("doctor/not_a_directive"), (head("#sbatch --qos=a"), START)),
        (message("doctor/spaced_option"), (head("--qos = a"), START)),
        (message("doctor/typographic"), (head("--account=\u201ca b\u201d"), START)),
        (message("doctor/not_a_directive"), (head("#sbatch --requeue --open-mode=append"), START)),
    ],
    "output-overwritten": [
        (message("doctor/output_in_array", option="--output=out.txt"),
         (head("--array=1-4", "--output=out.txt"), START)),
        (message("doctor/redirection_in_array", file="out.txt"),
         (head("--array=1-4"), START.rstrip() + " > out.txt\n")),
        (message("doctor/same_output", option="--output=out.txt"), (head("--output=out.txt"), START)),
        (message("doctor/output_in_array", option="--checkpoint missing/last.pt"),
         (head("--array=1-4"), f"{START.rstrip()} --lr $SLURM_ARRAY_TASK_ID --checkpoint missing/last.pt\n")),
        (message("doctor/output_in_array", option="--output-dir out"),
         (head("--array=1-4"), f"{START.rstrip()} --output_dir=out\n")),
    ],
    "missing-file": [
        (message("doctor/missing_file", path="missing.py"), (HEAD, START.replace("train.py", "missing.py"))),
        (message("doctor/missing_file", path="missing/bin/activate"), (HEAD, "source missing/bin/activate\n" + START)),
        (message("doctor/misspelt_file", path="missing_plian.py", meant="missing_plain.py"),
         (HEAD, START.replace("train.py", "missing_plian.py"))),
        (message("doctor/missing_image", path="missing.sif"),
         (HEAD, START.replace("python", "apptainer exec --nv missing.sif python"))),
        (message("doctor/missing_file", path="missing.py"),
         (HEAD, "cd /a; cd $SLURM_SUBMIT_DIR; cd b\n" + START.replace("train.py", "missing.py"))),
        (message("doctor/missing_folder", path="missing"), (head("--chdir=missing"), START)),
        (message("doctor/misspelt_file", path="conf/missing_b.yaml", meant="conf/missing-b.yaml"),
         (HEAD, f"{START.rstrip()} --spec conf/missing_b.yaml\n")),
        (message("doctor/missing_file", path="conf/missing.toml"),
         (HEAD, f"CONFIG=conf/missing.toml\n{START.rstrip()} --config=$CONFIG\n")),
        (message("doctor/missing_file", path="/etc/missing.sh"), (HEAD, "source /etc/missing.sh\n" + START)),
    ],
    "missing-module": [
        (message("doctor/missing_module", module="missing/1.2"), (HEAD, MODULE.format("missing/1.2") + START)),
    ],
    "log-folder": [
        (message("doctor/missing_folder", path="missing"), (head("--output=missing/%j.out"), START)),
        (message("doctor/missing_folder", path="missing"),
         (HEAD, START.replace("srun", "srun --output=missing/%t.out"))),
        (message("doctor/node_folder", path="--output=/tmp/%j.out"), (head("--output=/tmp/%j.out"), START)),
        (message("doctor/log_dir", path="/dev/shm/logs"),
         (HEAD, START.replace("train.py", "--log-dir /dev/shm/logs train.py"))),
    ],
    "work-folder": [
        (message("doctor/work_folder", path="train.py"),
         ("#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4\n", "mpirun python -m mpiddp train.py\n")),
    ],
    "other-python": [
        (message("doctor/other_python", path="/usr/bin/python3"),
         (HEAD, "source venv/bin/activate\n" + START.replace("python", "/usr/bin/python3"))),
        (message("doctor/late_activation"), (HEAD, START + "source venv/bin/activate\n")),
        (message("doctor/python_module", line=7),
         (HEAD, "source venv/bin/activate\nmodule load python/3.11\n" + START)),
    ],
    "conda-base": [
        (message("doctor/conda_base"), (HEAD, "source ~/miniforge3/bin/activate\n" + START)),
        (message("doctor/conda_placeholder"), (HEAD, "source ~/miniforge3/bin/activate NAME\n" + START)),
        (message("doctor/conda_base"), (HEAD, "source ~/conda/etc/profile.d/conda.sh\nconda activate base\n" + START)),
    ],
    "conda-init": [
        (message("doctor/conda_init"), (HEAD, "conda activate torch\n" + START)),
        (message("doctor/conda_init"), (HEAD, MODULE.format("gcc/12 openmpi/5") + "conda activate torch\n" + START)),
        (message("doctor/conda_init"), (HEAD, MODULE.format("miniconda/plain") + "conda activate torch\n" + START)),
    ],
    "local-caches": [
        (message("doctor/shared_cache", value="MIOPEN_USER_DB_PATH=$HOME/.miopen"),
         (HEAD, 'export MIOPEN_USER_DB_PATH="$HOME/.miopen"\n' + START)),
        (message("doctor/shared_cache", value="TRITON_CACHE_DIR=/home/me/triton"),
         (HEAD, "export TRITON_CACHE_DIR=/home/me/triton\n" + START)),
    ],
    "copied-variables": [
        (message("doctor/copied_variables", names="MASTER_ADDR, MASTER_PORT", pronoun="them"),
         (HEAD, "export MASTER_ADDR=$(hostname)\nexport MASTER_PORT=29500\n" + START)),
    ],
    "slow-variables": [
        ("NCCL_IB_DISABLE=1", (HEAD, "export NCCL_IB_DISABLE=1\n" + START)),
        ("CUDA_LAUNCH_BLOCKING=1", (HEAD, "export CUDA_LAUNCH_BLOCKING=1\n" + START)),
    ],
    "no-gpus": [
        (message("doctor/no_gpus"), (head(without="gpus"), START.replace("train.py", "--backend nccl train.py"))),
    ],
    "array-values": [
        (message("doctor/array_empty", element="${A[$SLURM_ARRAY_TASK_ID]}", jobs="SLURM_ARRAY_TASK_ID=3", array="A",
                 values=3),
         (head("--array=0-3"), "A=(1 2 3)\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START)),
        (message("doctor/array_empty", element="${A[I-1]}", jobs="SLURM_ARRAY_TASK_ID=3 to 4", array="A", values=2),
         (head("--array=1-4%2"), "A=(1 2)\nI=$SLURM_ARRAY_TASK_ID\n" + START.rstrip() + " --a ${A[I-1]}\n")),
        (message("doctor/array_unused", array="A", values=3, jobs=2),
         (head("--array=0,1"), "A=(1 2 3)\nB=${A[SLURM_ARRAY_TASK_ID]}\n" + START)),
        (message("doctor/array_empty", element="${A[$LSB_JOBINDEX]}", jobs="LSB_JOBINDEX=2", array="A", values=2),
         (f"{LSF}#BSUB -J name[1-2]\n", "A=(1 2)\nB=${A[$LSB_JOBINDEX]}\n" + MPIRUN)),
        (message("doctor/array_empty", element="${A[$SLURM_ARRAY_TASK_ID]}", jobs="SLURM_ARRAY_TASK_ID=2", array="A",
                 values=2),
         (head("--array=0-2"), "A=('a[1]' \"b*\")  # [a]\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START)),
    ],
    "late-option": [
        (message("doctor/late_options", options="--log-dir, --stall", script="parser.py"),
         (HEAD, START.replace("train.py", "parser.py --lr 1 --log-dir logs --stall 900"))),
        (message("doctor/late_option", options="--stop_before", script="parser.py"),
         (HEAD, START.replace("train.py", "parser.py --stop_before=60"))),
    ],
    "node-folder": [
        (message("doctor/first_node_fills", nodes=2, folder="/tmp/$USER/data"),
         (HEAD, "D=/tmp/$USER/data\nmkdir -p $D\ntar -xf a.tar -C $D\n" + START.rstrip() + " --data $D/x\n")),
        (message("doctor/first_node_fills", nodes=2, folder="$SLURM_TMPDIR"),
         (HEAD, "cp -r data $SLURM_TMPDIR/\nexport DATA=$SLURM_TMPDIR/data\n" + START)),
    ],
    "first-line": [(message("doctor/first_line"), (f"\n{HEAD}", START))],
    "other-scheduler": [
        (message("doctor/foreign_directive"), (f"{LSF}#SBATCH --qos=a\n", MPIRUN)),
        (message("doctor/foreign_variable", variable="$SLURM_NTASKS", system="LSF"),
         (LSF, "mpirun -n $SLURM_NTASKS python -m mpiddp train.py\n")),
        (message("doctor/foreign_variable", variable="$PBS_O_WORKDIR", system="Slurm"),
         (HEAD, "cd $PBS_O_WORKDIR\n" + START)),
    ],
    "not-exported": [
        (message("doctor/not_exported", variable="NCCL_DEBUG"), (HEAD, "NCCL_DEBUG=INFO\n" + START)),
        (message("doctor/not_exported", variable="MASTER_PORT"),
         (HEAD, "MASTER_PORT=29500\nsrun -c8 python train.py\n")),
    ],
    "pipe-status": [
        (message("doctor/pipe_status"), (HEAD, f"{START.rstrip()} 2>&1 | tee log\nstatus=$?\n")),
        (message("doctor/pipe_status"), (HEAD, f"{START.rstrip()} \\\n  | tee log || echo failed\n")),
    ],
    "conda-run": [
        (message("doctor/conda_run"), (HEAD, START.replace("python", "conda run -n torch python"))),
    ],
    "output-pattern": [
        (message("doctor/output_pattern", file="%x-%j.log", pattern="%x"), (HEAD, START.rstrip() + " > %x-%j.log\n")),
        (message("doctor/output_pattern", file="log_%j", pattern="%j"), (HEAD, START.rstrip() + " | tee log_%j\n")),
    ],
}
RULES_KEPT = {
    "tasks-per-node": [(ONE_TASK.replace("=2", "=1"), "torchrun --standalone --nproc_per_node=16 a.py --device cpu\n"),
                       (ONE_TASK, "srun -c8 python -m vllm.entrypoints.openai.api_server --model a\n"),
                       (ONE_TASK, "srun -c8 python spawns.py\n"),
                       (ONE_TASK.replace("=2", "=1"), TWO_HALVES),
                       (ONE_TASK.replace("=2", "=1"), TWO_HALVES.replace("torchrun", "srun -c16 --overlap torchrun")),
                       (ONE_TASK.replace("=2", "=1"), TWO_HALVES.replace("export ", "").replace("\ntorch", " torch")),
                       (HEAD, START), (ONE_TASK, TORCHRUN), (LSF.replace("num=4", "num=1/task"), MPIRUN),
                       (ONE_TASK, "srun -c8 accelerate launch --config_file accelerate.yaml --num_processes 8 a.py\n"),
                       (HEAD, "N=$(nproc)\n" + START.replace("srun", "srun -n $N")),
                       (ONE_TASK, START.replace("train.py", "--allow-idle-gpus train.py")),
                       (ONE_TASK, "srun -c 8 python train.py --multiprocessing-distributed\n"),
                       (HEAD, f"for i in 1 2 3; do\n{ALONE} &\ndone\nwait\n"),
                       (HEAD.replace("=2", "=1"), f"{ALONE} &\n{ALONE} &\nwait\n")],
    "uneven-tasks": [("#SBATCH -N2 -n8 -c8 --gres=gpu:4 --exclusive\n", START),
                     ("#SBATCH -N2 -n2 -c8 --gres=gpu:1\n", START),
                     ("#SBATCH -n8 -c8 --gpus-per-task=1\n",
                      START.replace("train.py", "--virtual-local-rank train.py"))],
    "gpus-per-task": [(head("--gpus-per-task=1", without="gpus"),
                       START.replace("train.py", "--virtual-local-rank train.py")),
                      (head("--gpus-per-task=1", without="gpus"), START.replace("srun", "srun --gpu-bind=none"))],
    "one-core": [(head("--exclusive", without="cpus"), START.replace(" --cpus-per-task=8", "")),
                 (head("--cpus-per-gpu=8", without="cpus"), START.replace(" --cpus-per-task=8", ""))],
    "srun-cpus": [(HEAD, "export SRUN_CPUS_PER_TASK=8\nsrun --mpi=pmix python -m mpiddp train.py\n"),
                  (HEAD, "srun --mpi=pmix --cpu-bind=none python -m mpiddp train.py\n"),
                  (HEAD, "srun --mpi=pmix --cpu-bind=v,mask_cpu=0xfe,0xfe00 python -m mpiddp train.py\n"),
                  (HEAD, "mpirun python -m mpiddp train.py\n")],
    "hyper-threads": [(head("--hint=nomultithread", "--threads-per-core=1"),
                       "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\n" + START)],
    "memory": [(head("--mem=0"), START), (head("--mem=200G"), START), (head("--mem-per-cpu=4000"), START),
               (head("--mem-per-cpu=1000"), START),
               (head("--mem-per-cpu=1000", "--exclusive", without="cpus"), START)],
    "exclusive": [(head("--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive", without="ntasks|gpus"), START),
                  (head("--gpus-per-node=8", without="gpus"),
                   f"for i in 1 2; do\n{START.replace('srun', 'srun --gpus-per-node=4').rstrip()} &\ndone\nwait\n")],
    "walltime": [(head("--time=24:00:00"), START), (head("--time=30"), START), (head("--time=1-0"), START),
                 (head("--time=UNLIMITED"), START), (head("--time=24   # minutes"), START),
                 (head("--time=120   # 2 minutes for each of 60 folds"), START),
                 (f"{LSF}#BSUB -W 24:00/host\n", MPIRUN), (f"{LSF}#BSUB -W 1440\n", MPIRUN),
                 (f"{PBS}#PBS -l walltime=2:00:00:00\n", f"cd $PBS_O_WORKDIR\n{MPIRUN}"),
                 ("#flux: -N2 -t 1.5h\n", FLUX)],
    "mpirun-ranks": [(HEAD, "mpirun -n 4 python server.py &\nmpirun -n 4 python -m mpiddp train.py\nwait\n"),
                     (HEAD, "mpirun -n 8 python -m mpiddp train.py\n"),
                     ("#PBS -l select=2:ncpus=64:ngpus=4\n",
                      "cd $PBS_O_WORKDIR\nmpirun -np 8 python -m mpiddp train.py\n"),
                     (HEAD, "mpirun -np $SLURM_NTASKS python -m mpiddp train.py\n")],
    "container-gpus": [(HEAD, START.replace("python", "apptainer exec --nv image.sif python")),
                       (HEAD, 'if test -e /dev/kfd; then NV="--rocm"; else NV="--nv"; fi\n'
                        + START.replace("python", 'apptainer exec "$NV" image.sif python')),
                       (HEAD, "module load site-singularity\n" + START.replace("python", "singularity run $I python")),
                       (HEAD, "export APPTAINER_NV=1\n" + START.replace("python", "apptainer exec image.sif python"))],
    "visible-devices": [(ONE_TASK.replace("=2", "=1"), TWO_HALVES),
                        (ONE_TASK.replace("=2", "=1"), TWO_HALVES.replace(
                            "torchrun --nproc-per-node=2", "mpirun python -m mpiddp --allow-idle-gpus")),
                        (HEAD, "export CUDA_VISIBLE_DEVICES=0\n" + START),
                        (HEAD, "export CUDA_VISIBLE_DEVICES=3,2,1,0\nmpirun python -m mpiddp train.py\n")],
    "step-gpus": [("#flux: -N2 -n8 -g1\n", "flux run -N2 -n8 -c8 -g1 python -m mpiddp train.py\n")],
    "mpi-interface": [(HEAD, MODULE.format("openmpi/5") + START), (HEAD, MODULE.format("cray-mpich") + START.replace(
        " --mpi=pmix", "")), (HEAD, MODULE.format("mpich") + START.replace("pmix", "pmi2"))],
    "several-mpi": [(HEAD, MODULE.format("gcc openmpi") + START)],
    "nested-launcher": [(ONE_TASK, TORCHRUN),
                        (HEAD, START.replace("python", "bash -c 'exec python").rstrip() + "'\n")],
    "no-launcher": [(ONE_TASK, "deepspeed --hostfile hosts --num_gpus 4 --num_nodes 2 a.py\n"),
                    (ONE_TASK, f'if test -z "$A"; then\nexport A=1\nsrun -c8 bash "$0"; exit $?\nfi\n{TORCHRUN}'),
                    (HEAD.replace("=2", "=1"),
                     "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python a.py &\nwait\n"),
                    ('#BSUB -n 8\n#BSUB -R "span[hosts=1]"\n#BSUB -gpu "num=1"\n', "python train.py\n"),
                    ("#PBS -l nodes=1:ppn=8\n", "cd $PBS_O_WORKDIR\npython train.py\n"),
                    ("#SBATCH --ntasks=16\n", "python train.py\n"),
                    (HEAD.replace("=2", "=1"), "python spawns.py\n"),
                    (ONE_TASK, "srun -c8 ray start --block &\npython train.py\n"),
                    ("#SBATCH -N1 --gpus-per-node=4 -c8\n", "torchrun --nproc-per-node=4 train.py\n"),
                    (HEAD, "python prepare.py\n" + START)],
    "no-training": [(HEAD, "pdsh -w $HOSTS python a.py\n"), (HEAD, "$START\n"),
                    (HEAD, "srun -c8 bash prepare.sh\n" + START)],
    "line-continuation": [(HEAD, START.replace("python", "\\\n  python")),
                          (HEAD, "cat > text <<END\na \\ \nb\nEND\n# c \\ \n" + START)],
    "split-world": [(ONE_TASK, "srun -c8 deepspeed --hostfile hosts --num_gpus 4 train.py\n"),
                    (ONE_TASK, "srun -c8 accelerate launch --num_machines 2 --num_processes 8 train.py\n"),
                    (ONE_TASK, "srun -n1 -c8 --gpus=4 torchrun --standalone --nproc_per_node=4 train.py\n"),
                    (ONE_TASK, TORCHRUN), (ONE_TASK, f'srun -c8 bash -c "{OWN_ADDRESS}"\n')],
    "early-variable": [(HEAD, START.replace("python -m mpiddp train.py",
                                            "bash -c 'python -m mpiddp train.py --rank $SLURM_PROCID'")),
                       (ONE_TASK, f"cat > run.sh <<'EOF'\n{ON_NODE}EOF\nsrun -c8 bash run.sh\n"),
                       (ONE_TASK, "cat <<EOF > run.sh\n" + ON_NODE.replace("$SLURM", "\\$SLURM")
                        + "EOF\nsrun -c8 ./run.sh\n"),
                       (HEAD, "export RANK=$SLURM_PROCID\nsrun -c8 bash -c 'RANK=$SLURM_PROCID python a.py'\n")],
    "lightning": [(HEAD, "srun -c8 python own_trainer.py\n"),
                  (HEAD, "srun -c8 python fabric.py\n"),
                  (HEAD, "srun -c8 python other_trainer.py\n"),
                  (HEAD, "srun -c8 python trainer.py\n"), (HEAD, "srun -c8 python light.py --num-nodes=2\n"),
                  (HEAD, "srun -c8 python light.py --num-nodes=$N\n"), (HEAD, "srun -c8 python options.py\n"),
                  (head("--ntasks=8", "--exclusive", "--job-name=bash", without="ntasks"),
                   "srun -c8 python trainer.py\n"),
                  (HEAD.replace("=2", "=1"), "srun -c8 python plain.py\n")],
    "unset-variable": [(head("--tres-per-task=cpu:8", without="cpus"), START.replace("=8", "=$SLURM_CPUS_PER_TASK")),
                       (head("--tres-per-task=cpu=8", without="cpus"), START.replace(" --cpus-per-task=8", "")),
                       (HEAD, START.replace("=8", "=$SLURM_CPUS_PER_TASK")),
                       (head("--exclusive", without="cpus"), START.replace("=8", "=${SLURM_CPUS_PER_TASK:-8}"))],
    "export-none": [(head("--export=NONE"), START.replace("srun", "srun --export=ALL")),
                    (head("--export=NONE"), "unset SLURM_EXPORT_ENV\n" + START),
                    (HEAD, START.replace("srun", "srun --export=A=1,ALL"))],
    "unknown-option": [(HEAD, START.replace("train.py", "--log_dir logs --prefix train.py --log-dri")),
                       (HEAD, START.replace("train.py", "--stall $STALL --quiet train.py"))],
    "background-wait": [(HEAD, START.rstrip() + " &\nwait\n"),
                        (HEAD, START.rstrip() + " &\njob=$!\nwhile kill -0 $job; do sleep 60; done\n"),
                        (HEAD, START.rstrip() + " &\ntail -f --pid=$! log\n"),
                        (HEAD, "srun nvidia-smi -l &\n" + START),
                        ("#flux: -N2\n", FLUX.replace("run", "submit") + "flux queue drain\n")],
    "mpi-option": [(HEAD, MODULE.format("openmpi") + "mpirun -x A=1 --map-by ppr:4:node python -m mpiddp train.py\n")],
    "signal-batch": [(head("--signal=TERM@120"), f"trap 'rm -rf tmp' EXIT TERM\n{START}"),
                     (head("--signal=USR1@120"), f"trap 'echo late' USR1\n{START}"),
                     (head("--signal=B:USR1@60"), f"source handlers.sh\n{START.rstrip()} &\nwait\n"),
                     (head("--signal=B:USR1@60"),
                      f"for s in $SIGNALS; do trap 'kill $!' $s; done\n{START.rstrip()} &\nwait\n"),
                     (head("--signal=B:10@300"), f"trap 'kill -USR1 $!' USR1\n{START.rstrip()} &\nwait; wait\n"),
                     (head("--signal=B:USR1@300"), f"trap 'kill -10 $!' 10\n{START.rstrip()} &\nwait; wait\n"),
                     (head("--signal=USR1@120"), START),
                     (head("--signal=B:USR1@120"), f"trap 'kill -USR1 $!' USR1\n{START.rstrip()} &\nwait; wait\n"),
                     (head("--signal=B:USR1@120"), f"trap 'kill -USR1 $!' USR1\n({START.rstrip()}) &\nwait || wait\n"),
                     (head("--signal=B:USR1@120"), "exec " + START)],
    "signal-time": [(head("--signal=USR1@120", "--time=10"), START.replace("train.py", "--stop-before 120 train.py"))],
    "should-stop": [(HEAD, START.replace("train.py", "--stop-before 120 stops.py")),
                    (head("--signal=USR1@120"), START.replace("train.py", "handles.py")),
                    (HEAD, START.replace("train.py", "plain.py"))],
    "requeue": [(head("--open-mode=append"), START + "echo \"to continue: scontrol requeue $SLURM_JOB_ID\"\n"),
                (head("--requeue", "--open-mode=append", "--signal=USR1@120"), START + REQUEUE)],
    "open-mode": [(HEAD, START + "echo \"to continue: scontrol requeue $SLURM_JOB_ID\"\n"),
                  (head("--requeue", "--open-mode=append"), START + REQUEUE)],
    "errexit": [(head("--requeue", "--open-mode=append"), "set -e\nstatus=0\n" + START.rstrip() + " || " + REQUEUE)],
    "late-directive": [(HEAD, "##SBATCH --qos=a\ncd a\n##SBATCH --qos=a\n" + START)],
    "directive-text": [(head("--comment='costs $5'"), START),
                       (head("#sbatch --array=1-10 job.sh"), START),
                       (head("#sbatch job.sh"), START),
                       (head('--job-name="resnet \u2013 base"', "--comment=a\u2013b"), START),
                       (head("--output=%u-%j.out  # $HOME"), START), (head("##SBATCH --account=$NAME"), START)],
    "output-overwritten": [(head("--array=1-4", "--output=%A_%a.out"), START),
                           (head("--output=out.txt", "--open-mode=append"), START),
                           (head("--output=%x-%A.txt"), START),
                           (head("--array=1-4"), START.rstrip() + " > $SLURM_ARRAY_TASK_ID.txt\n"),
                           (head("--array=1-4%1"), START.rstrip() + " --checkpoint missing/last.pt\n"),
                           (head("--array=1-4"), START.rstrip() + " --out out-$SLURM_ARRAY_TASK_ID --save 10\n"),
                           (head("--array=1-4"), START.rstrip() + " --run-name $SLURM_ARRAY_TASK_ID --out results\n"),
                           (head("--array=1-4"), START.replace("train.py", "tasks.py --out results")),
                           (head("--array=1-4"), START.rstrip() + " --checkpoint start/here.pt\n")],
    "missing-file": [(HEAD, "cp $HOME/missing.py .\n" + START.replace("train.py", "missing.py")),
                     (HEAD, "cd $SCRATCH/run\n" + START.replace("train.py", "missing.py")),
                     (HEAD, "[ -d missing ] || python -m venv missing\nsource missing/bin/activate\n" + START),
                     (HEAD, START.replace("train.py", "-m package.missing")),
                     (HEAD, START.rstrip() + " --checkpoint conf/missing_b.yaml --out conf/missing_b.yaml\n"),
                     (HEAD, START.rstrip() + " --spec conf/missing-c1.yaml --lr 1e-4 --model a.b\n"),
                     (HEAD, "echo > conf/missing_b.yaml\n" + START.rstrip() + " --config conf/missing_b.yaml\n"),
                     (HEAD, START.rstrip() + " --config-name missing.yaml\n"),
                     (HEAD, START.rstrip() + " --config $NAME/missing_b.yaml --data missing/list.txt\n")],
    "missing-module": [(HEAD, MODULE.format("pytorch/2.9") + START),
                       (HEAD, "module use /site\n" + MODULE.format("missing") + START)],
    "log-folder": [(head("--output=here/%j.out"), START), (head("--output=%x-%j.out"), START)],
    "work-folder": [("#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4\n#PBS -l walltime=01:00:00,wd\n",
                     "mpirun python -m mpiddp train.py\n"),
                    ("#PBS -l select=2:ncpus=64:ngpus=4:mpiprocs=4\n",
                     "cd $PBS_O_WORKDIR\nmpirun python -m mpiddp train.py\n")],
    "other-python": [(HEAD, "module load python/3.11\nsource venv/bin/activate\n" + START)],
    "conda-base": [(HEAD, "source ~/miniforge3/bin/activate torch\n" + START),
                   (HEAD, "module load conda\nconda activate\n" + START),
                   (HEAD, "source ~/miniforge3/bin/activate\nconda activate torch\n" + START)],
    "conda-init": [(HEAD, "source ~/miniforge3/etc/profile.d/conda.sh\nconda activate torch\n" + START),
                   (HEAD, 'eval "$(conda shell.bash hook)"\nconda activate torch\n' + START),
                   (HEAD, MODULE.format("anaconda3/2024 openmpi") + "conda activate torch\n" + START),
                   (HEAD, MODULE.format("miniconda/hook") + "conda activate torch\n" + START)],
    "local-caches": [(HEAD, "export TRITON_CACHE_DIR=/tmp/triton\n" + START)],
    "copied-variables": [(ONE_TASK, "export MASTER_ADDR=$(hostname)\n" + TORCHRUN)],
    "slow-variables": [(HEAD, "export NCCL_IB_DISABLE=0 NCCL_DEBUG=INFO\n" + START)],
    "no-gpus": [(head(without="gpus"), START)],
    "array-values": [(head("--array=0-8"), "A=(data/*.yaml)\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START),
                     (head("--array=0-8"), "A=({0..8})\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START),
                     (head("--array=0-8"), "P=data/[a-d].txt\nA=($P)\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START),
                     (head("--array=0-2"), "A=(1 2 3)\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START),
                     (head("--array=1-3"), "A=(1 2 3)\nB=${A[$((SLURM_ARRAY_TASK_ID - 1))]}\n" + START),
                     (head("--array=0-8"), "A=(1 2 3)\nB=${A[$((SLURM_ARRAY_TASK_ID % 3))]}\n" + START),
                     (head("--array=0-8"), "A=($(ls))\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START),
                     (HEAD, "A=(1 2 3)\nB=${A[$SLURM_ARRAY_TASK_ID]}\n" + START)],
    "late-option": [(HEAD, START.replace("train.py", "parser.py --lr 1 --device cpu")),
                    (HEAD, START.replace("train.py", "train.py --log-dir logs")),
                    (HEAD, START.replace("train.py", "plain.py --log-dir logs")),
                    (HEAD, START.replace("train.py", "-m parser --log-dir logs"))],
    "node-folder": [(HEAD, "tar -xf a.tar -C /tmp/data\n" + START),
                    (HEAD.replace("nodes=2", "nodes=1"), f"cp -r a /tmp/data\n{START.rstrip()} --data /tmp/data\n"),
                    (HEAD, f"D=/tmp/data\nsrun -N2 -n2 bash -c 'cp -r a $0' $D\ncp a $D\n{START.rstrip()} --data $D\n"),
                    (HEAD, f"D=/tmp/$USER\nsrun -N2 -n2 bash -c 'cp -r a $D'\ncp a $D\n{START.rstrip()} --data $D\n"),
                    (HEAD, f"S=/work\ncp -r $S/a /tmp/a\nexport DATA=$S\n{START}"),
                    (HEAD, f"{START.rstrip()} --out /tmp/out\ncp -r /tmp/out results\n"),
                    (HEAD, f"mkdir -p /tmp/out\ncp -r code /scratch\n{START.rstrip()} --out /tmp/out\n")],
    "first-line": [(PBS, f"cd $PBS_O_WORKDIR\n{MPIRUN}")],
    "other-scheduler": [(head("#PBS -q a", "#PBS -l select=1", "#PBS -A b"), START),
                        (LSF, "mpirun -n ${SLURM_NTASKS:-8} python -m mpiddp train.py\n")],
    "not-exported": [(HEAD, "export NCCL_DEBUG=INFO\n" + START), (HEAD, "set -a\nNCCL_DEBUG=INFO\n" + START),
                     (HEAD, "NCCL_DEBUG=INFO\nexport NCCL_DEBUG\n" + START),
                     (HEAD, "CUDA_VERSION=12\nmodule load cuda/$CUDA_VERSION\n" + START),
                     (HEAD, "HF_MODEL=a\nsource settings.sh\n" + START),
                     (HEAD, "NCCL_DEBUG=INFO " + START), (HEAD, "EPOCHS=3\n" + START)],
    "pipe-status": [(HEAD, f"set -o pipefail\n{START.rstrip()} 2>&1 | tee log\nstatus=$?\n"),
                    (HEAD, f"{START.rstrip()} 2>&1 | tee log\nstatus=${{PIPESTATUS[0]}}\n"),
                    (HEAD, f"{START.rstrip()} 2>&1 | tee log\n"), (HEAD, f"{START.rstrip()}\nstatus=$?\n")],
    "conda-run": [(HEAD, START.replace("python", "conda run --no-capture-output -n torch python")),
                  (HEAD, START.replace("python", "micromamba run -n torch python"))],
    "output-pattern": [(HEAD, START.rstrip() + " > $(date +%j).log\n"),
                       (HEAD, START.replace("srun", "srun --output=%x-%j.log"))],
}


class Here(Host):
    """A host on which all files and folders exist, except those with `missing` in their names."""

    def exists(self, path: str) -> bool:
        return "missing" not in path or path == "missing_plain.py"

    def is_folder(self, path: str) -> bool:
        return "missing" not in path

    def list_names(self, folder: str) -> list[str]:
        return {".": ["missing_plain.py", "data"], "conf": ["missing-b.yaml", "missing-c2.yaml"]}.get(folder, [])

    def read(self, path: str) -> str | None:
        return {"plain.py": "import torch", "stops.py": "while not mpiddp.should_stop(): pass",
                "light.py": "import lightning as L\nL.Trainer(devices=4, num_nodes=args.num_nodes)",
                "trainer.py": "from lightning import Trainer\nTrainer(devices=4, num_nodes=2)",
                "spawns.py": "import torch\ntorch.multiprocessing.spawn(main, nprocs=4)",
                "wraps.py": "from torch.nn.parallel import DistributedDataParallel\nFullyShardedDataParallel",
                "no_nodes.py": "import lightning.pytorch as pl\npl.Trainer(devices=4)",
                "own_trainer.py": "import lightning as L\nclass Trainer: pass\nTrainer(num_nodes=4)",
                "other_trainer.py": "import lightning as L\nfrom own import Trainer\nTrainer(num_nodes=4)",
                "fabric.py": "from own import Trainer\nimport lightning\nTrainer(lightning.Fabric(num_nodes=2))",
                "options.py": "from lightning import Trainer\nTrainer(**options)",
                "accelerate.yaml": "num_machines: 2\nnum_processes: 4\n",
                "parser.py": "parser = ArgumentParser()\nparser.add_argument('--lr')\nparser.add_argument('--device')",
                "tasks.py": "os.environ['SLURM_ARRAY_TASK_ID']", "/modules/miniconda/plain": "prepend-path PATH /a",
                "/modules/miniconda/hook.lua": "source_sh('bash', 'conda.sh')",
                "handles.py": "signal.signal(signal.SIGUSR1, save)"}.get(path.removeprefix("data/"))


def findings(parts: tuple[str, str]) -> list[Finding]:
    """Return what is found in a script of directives and commands."""
    directives, text = parts
    first = "" if directives.startswith("\n") else "#!/bin/bash\n"
    return check(script(text, first + directives), Here("", {"HOME": "/home/me", "MODULEPATH": "/modules"}))


def test_each_rule_has_scripts_that_break_it_and_scripts_that_do_not() -> None:
    assert set(RULES_BROKEN) == set(RULES_KEPT) == set(RULES)


@pytest.mark.parametrize(("name", "text", "parts"), [
    (name, text, parts) for name, cases in RULES_BROKEN.items() for text, parts in cases])
def test_a_script_that_breaks_a_rule(name: str, text: str, parts: tuple[str, str]) -> None:
    """There is this finding, and no other; its line and its words are complete."""
    (finding,) = findings(parts)
    assert (finding.rule, finding.message) == (name, text)
    assert finding.line is not None
    assert finding.reason
    assert "None" not in f"{finding.advice}{finding.edits}"


@pytest.mark.parametrize(("name", "parts"), [(name, parts) for name, cases in RULES_KEPT.items() for parts in cases])
def test_a_script_that_does_not_break_a_rule(name: str, parts: tuple[str, str]) -> None:
    assert [finding for finding in findings(parts) if finding.rule == name] == []
    assert [finding.rule for finding in findings(parts)] == []


def shown(finding: Finding) -> str:
    """Return what a finding tells to do: the edits with the line's number, and the advice."""
    signs = {Action.REPLACE: "{} {}", Action.INSERT: "<{} {}", Action.REMOVE: "-{}"}
    edits = [signs[edit.action].format(edit.line, edit.text) for edit in finding.edits]
    return "\n".join(filter(None, (*edits, finding.advice)))


CORES_GUESS = "{0} cores for each of {1} are {2} for each of 4: keep {0} if that is the number for one GPU"
CORES_EXAMPLE = "8 is an example: the cores of a node (sinfo -o '%n %c') divided by 4 tasks"


@pytest.mark.parametrize(("text", "rule", "todo"), [
    ("srun -l \\\n  --mpi=pmix python -m mpiddp train.py\n", "srun-cpus",
     "7 srun --cpus-per-task=$SLURM_CPUS_PER_TASK -l \\"),
    ('SRUN="srun --mpi=pmix"\n$SRUN python -m mpiddp train.py\n', "srun-cpus",
     '7 SRUN="srun --cpus-per-task=$SLURM_CPUS_PER_TASK --mpi=pmix"'),
    (f"{MODULE.format('mpich')}SRUN='srun --mpi=pmix -c8'\n# $SRUN --mpi=pmix\neval $SRUN python -m mpiddp train.py\n",
     "mpi-interface", "8 SRUN='srun --mpi=pmi2 -c8'"),
    ("OPTIONS=(--log-dri logs)\n" + START.replace("train.py", '"${OPTIONS[@]}" train.py'), "unknown-option",
     "7 OPTIONS=(--log-dir logs)"),
    (START.replace("train.py", "--nproc-per-node 4 --quiet train.py"), "unknown-option",
     "7 " + START.replace("train.py", "--quiet train.py").strip()),
    ("export MPIDDP_LOG_DRI=logs\n" + START, "unknown-option", "7 export MPIDDP_LOG_DIR=logs"),
    (START.replace("python", "apptainer exec -B /a image.sif python"), "container-gpus",
     "7 " + START.replace("python", "apptainer exec --nv -B /a image.sif python").strip()),
    ("NP=4\nmpirun -n $NP python -m mpiddp train.py\n", "mpirun-ranks", "8 mpirun python -m mpiddp train.py"),
    (START.replace("train.py", "--requeue train.py"), "unknown-option",
     "<7 #SBATCH --requeue\n7 " + START.strip()),
    (START.replace("train.py", "--nnodes 2 --rdzv-backend=c10d train.py"), "unknown-option",
     "7 " + START.strip()),
    ("source ~/conda/bin/activate base\n" + START, "conda-base",
     "write source ~/conda/bin/activate with the name of your environment (conda env list shows it)"),
    ("mpirun -np 4 --bind-to none python -m mpiddp train.py\n", "mpirun-ranks",
     "7 mpirun --bind-to none python -m mpiddp train.py"),
    ("export NCCL_IB_DISABLE=1 A=2\n" + START, "slow-variables", "7 export A=2"),
    ("export MASTER_PORT=1 A=2\n" + START, "copied-variables", "7 export A=2"),
    ("export MASTER_PORT=1\n" + START.replace("train.py", "train.py $MASTER_PORT"), "copied-variables",
     "remove line 7, and what reads these variables"),
    (f"if true; then\n  export NCCL_IB_DISABLE=1\nfi\n{START}", "slow-variables", "8   :"),
    ("cd a\n#SBATCH -A b\n" + START, "late-directive", "<7 #SBATCH -A b\n-8"),
    (f"{START.rstrip()} &\n", "background-wait", "<8 wait"),
    (START.replace("python", "mpirun -n 4 python"), "nested-launcher", "7 " + START.strip()),
    ("set -e\n#SBATCH --requeue --open-mode=append\n" + START + REQUEUE, "errexit",
     f"<9 status=0\n9 {START.strip()} || status=$?\n-10"),
    (START.replace("train.py", "parser.py --log-dir logs --lr 1 --stall=900"), "late-option",
     "7 " + START.replace("train.py", "--log-dir logs --stall=900 parser.py --lr 1").strip()),
    ("cp a /tmp/a\n" + START.rstrip() + " --data /tmp/a\n", "node-folder",
     "7 srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 cp a /tmp/a"),
    ("curl a | tar -x -C /tmp/a\n" + START.rstrip() + " --data /tmp/a\n", "node-folder",
     "run tar -x -C /tmp/a once on each node: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"),
    (START.rstrip() + " --config conf/missing_b.yaml\n", "missing-file",
     "7 " + START.rstrip() + " --config conf/missing-b.yaml"),
    (f"{START.rstrip()} | tee log\nexit $?\n", "pipe-status", "<7 set -o pipefail"),
    (START.rstrip() + " | tee %x.log\n", "output-pattern", "7 " + START.rstrip() + " | tee $SLURM_JOB_NAME.log"),
    ("NCCL_DEBUG=INFO\n" + START, "not-exported", "7 export NCCL_DEBUG=INFO"),
    (START.replace("python", "conda run -n a python"), "conda-run",
     "7 " + START.replace("python", "conda run --no-capture-output -n a python").strip()),
    ("#SBATCH --mem = 64G\n" + START, "directive-text", "7 #SBATCH --mem=64G"),
])
def test_the_line_to_write_instead(text: str, rule: str, todo: str) -> None:
    """It is the line that has to change, also where that is not the launch's."""
    assert {finding.rule: shown(finding) for finding in findings((HEAD, text))
            if finding.rule != "late-directive" or rule == finding.rule} == {rule: todo}


@pytest.mark.parametrize(("parts", "rule", "todo"), [
    ((head("--ntasks-per-node=1", "-c32", without="ntasks|cpus"), START.replace("=8", "=32")), "tasks-per-node",
     f"5 #SBATCH --ntasks-per-node=4\n6 #SBATCH --cpus-per-task=8\n7 {START.strip()}\n"
     + CORES_GUESS.format(32, "1 task", 8)),
    ((head("--ntasks-per-node=1", without="ntasks"), START.replace("=8", "=$SLURM_CPUS_PER_TASK")), "tasks-per-node",
     "5 #SBATCH --cpus-per-task=2\n6 #SBATCH --ntasks-per-node=4\n" + CORES_GUESS.format(8, "1 task", 2)),
    ((HEAD, TORCHRUN), "nested-launcher",
     "4 #SBATCH --ntasks-per-node=1\n6 #SBATCH --cpus-per-task=32\n7 " + TORCHRUN.strip().replace("=8", "=32")),
    ((head(without="cpus"), START.replace(" --cpus-per-task=8", "")), "one-core",
     "<6 #SBATCH --cpus-per-task=8\n6 srun --cpus-per-task=$SLURM_CPUS_PER_TASK --mpi=pmix python -m mpiddp train.py\n"
     + CORES_EXAMPLE),
    ((head("-n 8 -J a  # tasks", "--gpus-per-task=4", without="ntasks|gpus"), START), "tasks-per-node",
     "6 #SBATCH --gpus-per-node=4"),
    ((head("--gpus-per-task=4", "--ntasks=2 -J a  # tasks", without="ntasks|gpus"), START),
     "tasks-per-node", ("4 #SBATCH --cpus-per-task=2\n5 #SBATCH --gpus-per-node=4\n"
                        f"6 #SBATCH --ntasks-per-node=4 -J a  # tasks\n7 {START.strip().replace('=8', '=2')}\n"
                        + CORES_GUESS.format(8, "1 task", 2))),
    (("#BSUB -n 64\n#BSUB -R 'span[ptile=32]'\n#BSUB -gpu num=4\n",
      "module load openmpi/5\nmpirun python -m mpiddp train.py\n"), "tasks-per-node",
     "6 mpirun -n 8 --map-by ppr:4:node python -m mpiddp train.py"),
])
def test_what_belongs_to_tasks_changes_with_them(parts: tuple[str, str], rule: str, todo: str) -> None:
    assert {finding.rule: shown(finding) for finding in findings(parts)} == {rule: todo}


@pytest.mark.parametrize(("parts", "severity", "is_certain"), [
    ((HEAD.replace("=2", "=1"), "python train.py\n"), Severity.ERROR, False),
    ((HEAD, "python -m mpiddp train.py\n"), Severity.ERROR, False),
    ((HEAD, MODULE.format("openmpi") + "python -m mpiddp train.py\n"), Severity.ERROR, True),
    ((HEAD, MODULE.format("openmpi") + "docker run image python -m mpiddp train.py\n"), Severity.ERROR, False),
    ((HEAD, "# our nodes hang without\nexport NCCL_P2P_DISABLE=1\n" + START), Severity.WARNING, False),
    ((HEAD, START.rstrip() + " &\necho started\n"), Severity.ERROR, True),
    ((HEAD, START.rstrip() + " &\ncp model.pt $HOME\n"), Severity.ERROR, False),
    ((ONE_TASK, "srun -c8 python train.py\n"), Severity.WARNING, False),
    ((ONE_TASK.replace("=2", "=1"), "export CUDA_VISIBLE_DEVICES=0\ntorchrun train.py\n"), Severity.WARNING, False),
    ((HEAD, "export NCCL_P2P_DISABLE=1     # our nodes hang without\n" + START), Severity.WARNING, False),
    ((ONE_TASK.replace("=2", "=1"), "export CUDA_VISIBLE_DEVICES=0\ntorchrun --nproc-per-node=4 train.py\n"),
     Severity.ERROR, True),
    (("#SBATCH --mem=900 -c4\n", "python train.py\n"), Severity.NOTE, False),
    (("#SBATCH --mem=64 -c4\n", "python plain.py\n"), Severity.ERROR, False),
    ((head("-p debug", "--time=5:00"), START), Severity.WARNING, False),
    ((head("--time=5:00  # 5 hours"), START), Severity.WARNING, True),
    ((head("--time=5h"), START), Severity.ERROR, True),
])
def test_an_edit_is_certain_only_where_nothing_else_can_be_meant(
    parts: tuple[str, str], severity: Severity, is_certain: bool
) -> None:
    (finding,) = findings(parts)
    assert (finding.severity, bool(finding.edits) and finding.advice == "") == (severity, is_certain)
    assert finding.edits or finding.advice
    assert ("mpiddp" in finding.reason) <= ("mpiddp" in parts[1])


def test_files_of_the_submission(tmp_path: Path) -> None:
    """A script of nearly the same name is suggested; one without should_stop() is found."""
    (tmp_path / "train.py").touch()
    misspelt, plain = (check(script(START.replace("train.py", words)), Host(str(tmp_path)))
                       for words in ("trian.py", "--stop-before 120 train.py"))
    assert [(finding.rule, shown(finding)) for finding in misspelt] == [("missing-file", "6 " + START.strip())]
    assert [finding.rule for finding in plain] == ["should-stop"]
    (finding,) = check(script(START), Host(str(tmp_path / "none")))
    assert (finding.message, shown(finding)) == (message("doctor/missing_file", path="train.py"), "")


@pytest.mark.parametrize("start", ["cat > eval.sh <<EOF", "cat <<-'EOF' | sbatch", "if true; then cat > a.sh << EOF"])
def test_directives_in_a_here_document_are_those_of_another_script(start: str) -> None:
    text = f"#!/bin/bash\n#SBATCH --nodes=1 --qos=$A\n#sbatch -a\n #SBATCH -b\n{START}EOF\n"
    read_script = script(f"{START}{start}\n{text}" + "fi\n" * start.startswith("if"))
    assert len(read_script.directives) == HEAD.count("#SBATCH")
    assert {"late-directive", "directive-text"}.isdisjoint(finding.rule for finding in check(read_script, AllHere()))
    late = script(f"{START}{start}\n{text}" + "fi\n" * start.startswith("if") + "#SBATCH --qos=a\n")
    assert "late-directive" in {finding.rule for finding in check(late, AllHere())}


def test_late_directives_count_for_the_other_rules() -> None:
    found = findings(("", f"cd a\n{HEAD.partition(chr(10))[2]}#SBATCH --time=1\n{START}"))
    assert {finding.rule for finding in found} == {"late-directive", "walltime"}


@pytest.mark.parametrize("text", [
    "srun --mpi=pmix -c 8 --gpus-per-node=4 python -m mpiddp train.py\n", "mpirun python -m mpiddp train.py\n",
    "python -m mpiddp train.py\n", "torchrun --nproc-per-node=4 train.py\n",
    "flux run -N2 -n8 -c8 -g1 python -m mpiddp train.py\n"])
def test_a_script_without_directives(text: str) -> None:
    """It may run in an allocation, of which nothing is known."""
    assert findings(("", text)) == []


def test_variables_of_the_submission() -> None:
    """A job has its own of the batch system's; the others are as they are here."""
    environ = {"SLURM_CPUS_PER_TASK": "64", "SLURM_NTASKS": "1", "LOGS": "/logs", "RANK": "7"}
    read_script = read_from_text("job.sh", HEAD + "srun -n $SLURM_NTASKS -c $SLURM_CPUS_PER_TASK python -m mpiddp "
                                 "--log-dir $LOGS ${NAME:-a.py} --rank ${RANK:-0}\n", environ)
    assert read_script.launches[0].launcher_options == {"ntasks": "8", "cpus-per-task": "8"}
    assert read_script.launches[0].options == ("--log-dir", "/logs")
    assert read_script.launches[0].script_words == ("a.py", "--rank", "${RANK:-0}")


def test_the_document_has_the_table_of_rules() -> None:
    text = (ROOT / "mpiddp/doctor/README.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \| (.*) \|$", text, re.MULTILINE) == [
        (rule.name, rule.summary) for rule in RULES.values()]


def test_findings_as_text_and_as_json() -> None:
    read_script = script("bash -c \"echo 'a\"\nsrun python -m mpiddp --log-dri x train.py\n")
    found = check(read_script, Here())
    text = format_findings(read_script, found, 80, has_colours=True)
    wrong = message("doctor/unknown_option", option="--log-dri", hint="--log-dir")
    line = "    srun python -m mpiddp --log-dri x train.py"
    assert f"job.sh:7: \033[1;31merror\033[0m: {wrong} [unknown-option]\n{line}\n" in text
    both = "srun --cpus-per-task=$SLURM_CPUS_PER_TASK --mpi=pmix python -m mpiddp --log-dir x train.py"
    assert text.count(f"  replace line 7:\n    {both}\n") == 1
    assert text.count("  replace line 7: as above\n") == 2
    assert {finding.edits for finding in found} == {(Edit(Action.REPLACE, 7, both),)}
    assert text.splitlines()[-1] == "job.sh: " + message("doctor/summary", findings="1 error, 2 warnings", line=7)
    assert "\033" not in format_findings(read_script, found, 80, has_colours=False)
    answer = json.loads(as_json(read_script, found))
    assert [(finding["rule"], finding["severity"], finding["line"]) for finding in answer["findings"]] == [
        (finding.rule, finding.severity.name.lower(), finding.line) for finding in found]
    assert answer["findings"][0]["edits"] == [{"action": "replace", "line": 7, "text": both}]


@pytest.mark.parametrize(("directives", "start", "mended"), [
    ("#BSUB -nnodes 4\n", "jsrun --nrs 4 -r 1 --tasks_per_rs 1 -c42 --gpu_per_rs=6 --bind none python -m mpiddp a.py",
     "jsrun --nrs 24 --rs_per_host 6 --tasks_per_rs 1 --cpu_per_rs 7 --gpu_per_rs 1 --bind none python -m mpiddp a.py"),
])
def test_the_line_that_a_launch_becomes(directives: str, start: str, mended: str) -> None:
    findings = check(script(f"{start}\n", f"#!/bin/bash\n{directives}"), Here())
    assert [edit.text for finding in findings for edit in finding.edits] == [mended]


def test_edits_of_adjacent_lines_have_one_title() -> None:
    read_script = script("cd a\n#SBATCH --qos=a\n#SBATCH -A b\n" + START)
    text = format_findings(read_script, check(read_script, Here()), 80, has_colours=False)
    assert "  remove lines 7-8\n  insert before line 6:\n    #SBATCH --qos=a\n    #SBATCH -A b\n" in text
    assert text.endswith("; " + message("doctor/edit_order"))
    read_script = script(f"{START.rstrip()} &\n")
    text = format_findings(read_script, check(read_script, Here()), 80, has_colours=False)
    assert "  insert at the end:\n    wait\n" in text


@pytest.mark.process
@pytest.mark.parametrize(("status", "said"), [(0, "saved\nafter\n"), (7, "saved\n")])
def test_the_wait_that_is_proposed_lasts_until_the_training_has_ended(status: int, said: str) -> None:
    """With `set -e`, too, by which a wait that the signal ends could end the script."""
    job = script(f"set -e\ntrap 'kill -USR1 $job' USR1\n{START}echo after\n", head("--signal=B:USR1@120"))
    text = apply_edits(job.lines, [edit for finding in check(job, Here()) for edit in finding.edits])
    assert START.strip() + " &" in text
    training = f"sh -c 'trap \"sleep 0.5; echo saved; exit {status}\" USR1; echo READY; while :; do sleep 0.1; done'"
    text = text.replace(START.strip(), training).replace(" job=$!;", " job=$!; echo READY;")
    with subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None  # the trap of the training is set, and the script knows its number
            assert [process.stdout.readline() for _ in range(2)] == ["READY\n"] * 2
            process.send_signal(signal.SIGUSR1)
            assert (process.communicate(timeout=support.DEADLINE_S)[0], process.returncode) == (said, status)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def apply_all(read_script: BatchScript, host: Host) -> BatchScript:
    """Return the script after the edits of all findings, which are gone then, and no rule finds its first error."""
    before = check(read_script, host)
    edits = [edit for finding in before for edit in finding.edits]
    after = read_from_text(read_script.path, apply_edits(read_script.lines, edits))
    changed = {(finding.rule, finding.message) for finding in before if finding.edits}
    text = f"{read_script.text}\n---\n{after.text}"
    assert [finding for finding in check(after, host) if (finding.rule, finding.message) in changed] == [], text
    assert [finding for finding in check(after, host) if finding.severity is Severity.ERROR
            and finding.rule not in {finding.rule for finding in before}] == [], text
    return after


def assert_edits_end(read_script: BatchScript, host: Host) -> None:
    """Assert that no finding has an edit after three rounds."""
    last = read_script
    for _ in range(3):
        last = apply_all(last, host)
    assert [finding for finding in check(last, host) if finding.edits] == [], f"{read_script.text}\n---\n{last.text}"


HERE = Here("", {"HOME": "/home/me", "MODULEPATH": "/modules"})


@pytest.mark.parametrize("parts", [parts for cases in RULES_BROKEN.values() for _, parts in cases])
def test_a_finding_is_gone_when_its_edits_are_made(parts: tuple[str, str]) -> None:
    assert_edits_end(script(parts[1], f"#!/bin/bash\n{parts[0]}"), HERE)


COUNTS = st.sampled_from((1, 2, 4, 8))
SBATCH_OPTIONS = (
    ("--nodes={}", "-N {}", "-N{}"), ("--ntasks-per-node={}", "--tasks-per-node={}"), ("--ntasks={}", "-n {}", "-n{}"),
    ("--gpus-per-node={}", "--gres=gpu:a100:{}", "--gpus-per-node=a100:{}"), ("--gpus-per-task={}",),
    ("--cpus-per-task={}", "-c {}", "-c{}"), ("--mem={}", "--mem={}G"), ("--mem-per-cpu={}G",),
    ("--time={}", "-t {}:00", "--time={}h", "--time 24"),
    ("--signal=USR1@{}00", "--signal=B:USR1@120"), ("--exclusive",), ("--requeue", "--no-requeue"),
    ("--hint=multithread",), ("--ntasks-per-core={}",), ("--array=1-{}",), ("--output=out.txt",), ("--export=NONE",))
SBATCH_STARTS = ("", "srun", "srun --mpi=none -n {}", "srun --ntasks-per-node={} -c {}", "mpirun", "mpirun -np {}",
                 "mpirun -n {} --map-by ppr:{}:node", "srun \\\n  -c 8", "srun --ntasks={} --gpus-per-task={}")
MPI_STARTS = ("", "mpirun", "mpiexec -n {} -ppn {}", "mpirun -n $LSB_DJOB_NUMPROC")
FLUX_STARTS = ("", "flux run -N2 -n{} -g{}", "flux run -n{} -c{} -g1")
OTHER_HEADS = {
    "#BSUB -n {0}\n#BSUB -R 'span[ptile={0}]'\n#BSUB -gpu num={1}\n#BSUB -W {2}": MPI_STARTS,
    "#BSUB -n 64\n#BSUB -R 'span[ptile=32]'\n#BSUB -gpu num={1}\n#BSUB -W {2}00": MPI_STARTS,
    "#PBS -l select={0}:ngpus={1}:mpiprocs={2}": MPI_STARTS,
    "#PBS -l select={0}:ncpus=64:ngpus={1} -l walltime=00:0{2}:00": MPI_STARTS,
    "#flux: -N{0} -n8 -g{1} -c{2}": FLUX_STARTS}
PROGRAMS = ("python -m mpiddp train.py", "python train.py", "torchrun --nproc_per_node={} train.py",
            "torchrun --standalone train.py", "accelerate launch --num_processes={} train.py",
            "accelerate launch --config_file accelerate.yaml train.py", "python trainer.py",
            "python light.py --num_nodes {}",
            "python -m mpiddp \\\n    --log-dri /tmp/x train.py",
            "conda run -n a python parser.py --lr 1 | tee %j || exit",
            "python -m mpiddp parser.py --out a/b \\\n    --stall {}00 --config conf/missing_b.yaml > out-%x")


@given(data=st.data())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_edits_of_resources_come_to_an_end(data: st.DataObject) -> None:
    """Whatever resources are asked for, and however the training starts."""
    is_slurm = data.draw(st.booleans())

    def fill(text: str) -> str:
        return re.sub(r"\{\}", lambda _: str(data.draw(COUNTS)), text)

    if is_slurm:
        chosen = data.draw(st.lists(st.sampled_from(SBATCH_OPTIONS[1:]), max_size=8, unique=True))
        options = [fill(data.draw(st.sampled_from(spellings))) for spellings in (SBATCH_OPTIONS[0], *chosen)]
        directives = data.draw(st.sampled_from(("#SBATCH " + " ".join(options), "\n".join(
            f"#SBATCH {option}  # a comment" for option in options))))
        starts = SBATCH_STARTS
    else:
        numbers = data.draw(st.lists(COUNTS, min_size=3, max_size=3))
        directives, starts = data.draw(st.sampled_from([*OTHER_HEADS.items()]))
        directives = directives.format(*numbers)
    start = fill(data.draw(st.sampled_from(starts)))
    program = fill(data.draw(st.sampled_from(PROGRAMS)))
    module = data.draw(st.sampled_from(("", "module load openmpi/5\n", "module load intel-mpi\n")))
    assert_edits_end(script(f"{module}{f'{start} {program}'.strip()}\n", f"#!/bin/bash\n{directives}\ncd data\n"), HERE)


@pytest.mark.process
def test_the_command(quick: Mpi, tmp_path: Path) -> None:
    """Both commands do the same; the status tells what was found."""
    (tmp_path / "train.py").touch()
    (tmp_path / "good.sh").write_text(HEAD + START)
    (tmp_path / "bad.sh").write_text(HEAD + START.replace(" --cpus-per-task=8", ""))
    for command in (("-m", "mpiddp.doctor"), ("-m", "mpiddp", "doctor")):
        good = support.check(alone(quick, *command, "good.sh", cwd=tmp_path))
        assert good.stdout == "good.sh: " + message("doctor/nothing_found", line=6) + "\n"
        bad = support.check(alone(quick, *command, "--json", "bad.sh", cwd=tmp_path), 1)
        assert [finding["rule"] for finding in json.loads(bad.stdout)["findings"]] == ["srun-cpus"]
        for arguments, text in ((("none.sh",), "mpiddp.doctor: none.sh " + message(
                "doctor/unreadable", reason="No such file or directory")), (("--x",), "mpiddp.doctor: ")):
            wrong = support.check(alone(quick, *command, *arguments, cwd=tmp_path), 2)
            assert wrong.stderr.startswith(text)
            assert wrong.stderr.count("\n") == 1
            assert wrong.stdout == ""


@pytest.mark.process
@pytest.mark.parametrize(("text", "line", "reason"), [
    (f"for i in 1 2; do\n{START}", 8, "syntax error: unexpected end of file"),
    (f"{START}if [ $? = 0 ]; then exit 0 fi\n", 8, "syntax error: unexpected end of file"),
    (START, 0, ""),
])
def test_bash_says_what_it_cannot_read(text: str, line: int, reason: str) -> None:
    errors = [*find_syntax_errors(script(text))]
    assert [(error.line, error.message) for error in errors] == (
        [(errors[0].line, message("doctor/shell_syntax", reason=reason))] if line else [])
    assert all(error.line is not None and error.line >= line for error in errors)
    assert not [*find_syntax_errors(script(text, HEAD.replace("/bin/bash", "/bin/zsh")))]


@pytest.mark.process
def test_the_certain_edits_are_a_patch(quick: Mpi, tmp_path: Path) -> None:
    """What is left goes to stderr; the script itself stays as it is."""
    (tmp_path / "train.py").touch()
    bad = head("--time=24:00  # 24 hours", without="cpus") + START.replace(" --cpus-per-task=8", "").rstrip() + " &"
    (job := tmp_path / "job.sh").write_text(bad)
    done = support.check(alone(quick, "-m", "mpiddp.doctor", "--fix", "job.sh", cwd=tmp_path))
    assert job.read_text() == bad
    assert done.stderr.splitlines()[0] == message("doctor/left")
    assert [entry["rule"] for entry in find("doctor/label", done.stderr)] == ["one-core"]
    subprocess.run(["patch", "job.sh"], input=done.stdout, text=True, cwd=tmp_path, check=True,
                   timeout=support.DEADLINE_S)
    assert job.read_text() == bad.replace("24:00", "24:00:00") + "\nwait"
    again = support.check(alone(quick, "-m", "mpiddp.doctor", "--fix", "job.sh", cwd=tmp_path), 1)
    assert (again.stdout, again.stderr.splitlines()[0]) == ("", message("doctor/no_certain_change"))
    job.write_text(HEAD + START)
    same = support.check(alone(quick, "-m", "mpiddp.doctor", "--fix", "job.sh", cwd=tmp_path), 1)
    assert (same.stdout, same.stderr) == ("", "mpiddp.doctor: job.sh " + message("doctor/nothing_to_fix") + "\n")


EXPORTS = "if true; then\n  {}export CUDA_LAUNCH_BLOCKING=1\n  export NCCL_P2P_DISABLE=1\nfi\n"
TEE = START.rstrip() + " | tee log\n"


@pytest.mark.parametrize(("before", "after"), [
    (EXPORTS.format("") + START, f"if true; then\n  :\nfi\n{START}"),
    (EXPORTS.format("# why\n\n  ") + START, f"if true; then\n  # why\n\n  :\nfi\n{START}"),
    (f"{START.rstrip()} &\necho started\nexit 0\n", f"{START.rstrip()} &\necho started\nwait\nexit 0\n"),
    (f"{START.rstrip()} &\nexit $?\n", f"{START.rstrip()} &\nwait\nexit $?\n"),
    (START.replace("srun", "srun --export=A=\"$A\",B='1 2'"),
     START.replace("srun", "srun --export=ALL,A=\"$A\",B='1 2'")),
    (f"echo '\n#SBATCH --qos=a\n'\n{START}", ""),
    (f"case $1 in\na) {TEE}exit $?\n;;\nesac\n", ""),
    (f"if true\nthen {TEE}exit $?\nfi\n", ""),
    (f"if ! {TEE.rstrip()}; then\nexit $?\nfi\n", f"set -o pipefail\nif ! {TEE.rstrip()}; then\nexit $?\nfi\n"),
    (f"{START.rstrip()} &\necho done; exit 0\n", ""),
])
def test_a_script_with_all_certain_edits(before: str, after: str) -> None:
    """The shell reads it; an edit that changes nothing of its finding is not made."""
    host = Here("", {"HOME": "/home/me"})
    fixed = fix(script(before), host, host.environ)
    assert fixed.text == HEAD + (after or before)
    assert fix(fixed, host, host.environ).text == fixed.text


def test_the_components_of_a_job_are_not_mixed() -> None:
    """New directives are the first one's; the others are said not to be followed."""
    components = head("--time=5h", "--partition=a", "-J a", "--qos=b").replace("-J a", "hetjob")
    read_script = script(START, components)
    (finding,) = check(read_script, Here())
    assert (finding.rule, shown(finding)) == ("walltime", "6 #SBATCH --time=5:00:00")
    assert [note.text for note in read_script.not_followed] == ["the options of the job's other components"]


def test_half_of_a_list_of_commands_is_not_changed() -> None:
    (finding,) = findings((HEAD, "mkdir -p /tmp/a && tar -xf a.tar -C /tmp/a\n" + START.rstrip() + " --data /tmp/a\n"))
    assert (finding.rule, finding.edits) == ("node-folder", ())


def test_a_note_is_not_edited() -> None:
    """Programs beside the training may need the variables, and the next job may be written by this one."""
    text = f"{START}cat > next.sh <<'EOF'\nexport MASTER_ADDR=localhost MASTER_PORT=29500\npython eval.py\nEOF\n"
    assert fix(script(text), Here(), {}).text == HEAD + text


def test_edits_that_the_shell_cannot_read_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The edits of other findings are made."""
    def find_broken(context: Context) -> Iterator[Problem]:
        yield Problem(Severity.ERROR, 1, "broken", "", insert_line(len(HEAD.splitlines()) + 1, "if true; then"))

    def find_useless(context: Context) -> Iterator[Problem]:
        yield Problem(Severity.ERROR, 1, "useless", "", insert_line(len(HEAD.splitlines()) + 1, "date"))

    for find_problem in (find_broken, find_useless):
        monkeypatch.setitem(RULES, find_problem.__name__, Rule(find_problem.__name__, "", find_problem))
    fixed = fix(script(f"{START.rstrip()} &\n"), Here(), {})
    assert fixed.text == f"{HEAD}{START.rstrip()} &\nwait\n"
    assert {"broken", "useless"} <= {finding.message for finding in check(fixed, Here())}


def test_values_of_the_users_shell_are_not_shown() -> None:
    """A key is the script's text in findings and edits, also where the shell would have its value."""
    environ = {"WANDB_API_KEY": "s3cr3tkey", "PLACE": "s3cr3t/place", "DATABASE_URL": "postgres://me:s3cr3t@host"}
    for words in ("--export=WANDB_API_KEY=$WANDB_API_KEY", '--export=A="$PLACE",B=1'):
        read_script = read_from_text("job.sh", HEAD + START.replace("srun", f"srun {words}"), environ)
        host = Here("", environ)
        (finding,) = check(read_script, host)
        assert finding.message == message("doctor/export_list", list=words.partition("=")[2])
        assert shown(finding) == "6 " + START.replace("srun", f"srun {words.replace('=', '=ALL,', 1)}").strip()
        assert "s3cr3t" not in as_json(read_script, [finding]) + fix(read_script, host, environ).text


def test_an_address_of_the_users_shell_is_not_shown() -> None:
    environ = {"DATABASE_URL": "postgres://me:s3cr3t@host", "GH_PAT": "s3cr3t"}
    read_script = read_from_text("job.sh", HEAD + START.replace("train.py", "$GH_PAT").replace(
        "srun", "srun -o $DATABASE_URL/x"), environ)
    assert "s3cr3t" not in as_json(read_script, check(read_script, Host("/nowhere", environ)))


def test_many_variables_take_little_time() -> None:
    text = "".join(f"VAR_{number}={number}\n" for number in range(3000)) + START
    context = Context(script(text), Here())
    begin = time.process_time()
    assert list(RULES["not-exported"].find(context)) == []
    assert time.process_time() - begin < 1


@pytest.mark.process
def test_a_patch_has_the_bytes_of_the_script(quick: Mpi, tmp_path: Path) -> None:
    """Also those that are not UTF-8, in the lines around a change and in those that change."""
    (tmp_path / "train.py").touch()
    text = head("--time=24:00  # 24 hours") + "# caf\udce9 \u00e9\n" + START.rstrip() + " --name \udce9 &\n# \udcff\n"
    old = text.encode(errors="surrogateescape")
    (job := tmp_path / "job.sh").write_bytes(old)
    patch = subprocess.run([quick.python, "-m", "mpiddp.doctor", "--fix", "job.sh"], cwd=tmp_path, check=True,
                           capture_output=True, timeout=support.DEADLINE_S).stdout
    subprocess.run(["patch", "job.sh"], input=patch, cwd=tmp_path, check=True, timeout=support.DEADLINE_S)
    assert job.read_bytes() == old.replace(b"24:00", b"24:00:00") + b"wait\n"


@pytest.mark.process
def test_a_centres_launch_line_is_shown_with_findings(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    profile = tmp_path / "site.toml"
    profile.write_text('name = "Testbed"\ncontact = "me"\nlaunch_line = "srun -ul python -m mpiddp train.py"\n'
                       'launch_options = ["--gpus=4", "--x"]\n')
    lines = [message("doctor/site_start", site="Testbed", line="srun -ul python -m mpiddp train.py"),
             message("doctor/site_options", site="Testbed", options="--gpus=4 --x")]
    for start, status, shown in ((START, 0, []), (START.replace(" --cpus-per-task=8", ""), 1, lines)):
        (tmp_path / "job.sh").write_text(HEAD + start)
        done = alone(quick, "-m", "mpiddp.doctor", "job.sh", cwd=tmp_path, env={"MPIDDP_SITE": str(profile)})
        assert [line for line in support.check(done, status).stdout.splitlines() if "Testbed" in line] == shown


def test_a_recipe_with_findings_may_be_converted() -> None:
    read_script = script(TORCHRUN)
    lines = format_findings(read_script, check(read_script, Here()), 80, has_colours=False).splitlines()
    assert lines[-2] == message("doctor/convert_hint", script="job.sh")


def test_a_misspelt_directive_counts_as_it_is_meant() -> None:
    """No other rule asks for what it lacks; options of plugins are left alone."""
    for line in ("#SBATCH --ntask-per-node=4", "#SBATCh --ntasks-per-node=4", "#SBATCH \u2013ntasks-per-node=4",
                 "#SBATCH \u2013\u2013ntasks-per-node=4"):
        (finding,) = findings((head(line, without="ntasks"), START))
        assert (finding.rule, shown(finding)) == ("directive-text", "6 #SBATCH --ntasks-per-node=4")
    (finding,) = findings((head("#SBATCH \u2013c8 \u2014J \u2018a b\u2019", without="cpus"), START))
    assert (finding.rule, shown(finding)) == ("directive-text", "6 #SBATCH -c8 -J 'a b'")
    assert findings((head("--uenv=a", "--view=b", "--image=c", "--mem-per-gp=4G"), START)) == []


@pytest.mark.process
def test_neither_mpi_nor_torch_are_imported(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(HEAD + START)
    code = ("import sys; from mpiddp.doctor.__main__ import main; main(['job.sh'])\n"
            "print(sorted({'mpi4py', 'torch', 'numpy', 'psutil'} & set(sys.modules)))")
    assert support.check(alone(quick, "-c", code, cwd=tmp_path)).stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_without_the_parser(quick: Mpi, tmp_path: Path) -> None:
    code = ("import sys; sys.modules['tree_sitter'] = None\n"
            "from mpiddp.doctor.__main__ import main; sys.exit(main(['a']))")
    done = support.check(alone(quick, "-c", code, cwd=tmp_path), 2)
    assert done.stderr == message("doctor/needs_parser") + "\n"


@pytest.mark.mpi
def test_a_script_that_is_called_doctor_is_run(quick: Mpi, tmp_path: Path) -> None:
    (tmp_path / "doctor").write_text("print('at your service')\n")
    assert "at your service" in support.check(alone(quick, "-m", "mpiddp", "doctor", cwd=tmp_path)).stdout


ODD_WORDS = (
    "srun ", "mpirun -n 4 ", "python -m mpiddp ", "a.py", "\n", "\n", " ", "$A", "${A:-b}", "${A[@]}", "A=1\n", "(",
    ")", "{ ", "}", "'", '"', "`", "$(", "<<EOF\n", "EOF\n", "if [ $A = 1 ]; then ", "fi\n", "for i in 1 2; do ",
    "done\n", "f() { ", "f\n", "eval ", "&", "|", ";", "#SBATCH -n 4\n", "#SBATCH -N\n", "\\", "torchrun ", "-", "--",
    "=", "$((", "))", "case $A in a) ", "esac\n", "bash -c ", "$1", "[[ -n $B ]] && ", "cd ", "\u20ac", "--n=",
    "module load ", "conda activate ", "source ", "trap ", "export ", "> ")
OUR_SCRIPTS = [file.read_text() for file in sorted((ROOT / "batch").glob("*.sh"))]


def test_files_that_may_block(tmp_path: Path) -> None:
    """Neither a FIFO nor the doctor's own input is read; the text that srun's shell gets from the script is."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "link", "/proc/self/fd/0"):
        read_script = read_from_text(str(tmp_path / "job.sh"), f"{HEAD}srun bash {name}\n")
        assert read_script.launches[0].program is Program.OTHER
        assert message("doctor/started_script", file=name) in [note.text for note in read_script.not_followed]
        assert Host(str(tmp_path)).read(name) is None
    assert launch("srun bash /dev/stdin <<'X'\npython -m mpiddp train.py\nX").program is Program.MPIDDP


CALLS = "\n".join(f"f{level}() {{ {'; '.join([f'f{level + 1}'] * 4)}; }}" for level in range(12))


@pytest.mark.parametrize(("text", "note"), [
    ('a=x\n' + 'a="$a$a$a x"\n' * 30 + START, ""),
    ('a=(x)\n' + f'a=({"${a[@]} " * 10})\n' * 20 + START, ""),
    ("a=x\n" + f"a={'$a' * 10}\n" * 30 + f"echo ${{a##*/}}\n{START}", ""),
    (f"{START}{CALLS}\nf12() {{ A=1; }}\nf0\n", message("doctor/many_statements", limit="10000")),
    (f"""{START}a='eval "$a"; eval "$a"'\neval "$a"\n""", ""),
    (START + "echo $A\n" * 20_000, message("doctor/many_statements", limit="10000")),
    ("srun -n1 hostname\n" * 200 + START * 2000, message("doctor/many_launches", number="100")),
])
def test_a_script_that_would_take_for_ever(text: str, note: str) -> None:
    """What grows without end is unknown, and the rest of a script that is too long is not followed."""
    read_script = script(text)
    assert 0 < len(read_script.trainings) <= 100
    assert max(map(len, read_script.variables.values()), default=0) <= 2_000_000
    assert note in [note.text for note in read_script.not_followed] or not note
    assert len(check(read_script, Host())) <= 200


ODD_NUMBERS = st.text("0123456789\u00b2:-.@", max_size=8) | st.sampled_from([
    "", "0", "-1", "4", "\u00b2", "1\u00b2", "\u0664", "1.5", "9" * 400, "9" * 5000])
NUMBERED_HEADS = (
    "#SBATCH --nodes={0} --ntasks={1}\n#SBATCH --gpus={2} --time={3}",
    "#SBATCH --ntasks-per-node={0} --gpus-per-node={1} --cpus-per-task={2}\n#SBATCH --mem={3} --signal=B:USR1@{3}",
    "#SBATCH -N2 --ntasks-per-gpu={0} --gres=gpu:{1} --mem-per-cpu={2}\n#SBATCH --time={3}:00 --ntasks-per-core={3}",
    "#PBS -l select={0}:mpiprocs={1}:ngpus={2} -l walltime={3}:00:00",
    "#PBS -l nodes={0}:ppn={1}:gpus={2} -l walltime={3}",
    '#BSUB -nnodes {0} -n {1}\n#BSUB -gpu "num={2}"\n#BSUB -W {3}',
    "#flux: -N{0} -n{1} -g{2}\n#flux: -t {3}h",
)
NUMBERED_STARTS = (
    "srun torchrun --nproc-per-node={0} --nnodes={1} a.py",
    "accelerate launch --num_processes={0} --num_machines={1} a.py",
    "mpirun -np {0} --map-by ppr:{1}:node python a.py", "srun -n {0} --gpus-per-task={1} python -m mpiddp a.py",
    "A=$(( {0} * {1} * {1} ))\nsrun python -m mpiddp --stop-before {0} ${{{1}}} $A a.py",
)


@given(st.sampled_from(NUMBERED_HEADS), st.sampled_from(NUMBERED_STARTS), st.lists(ODD_NUMBERS, min_size=7, max_size=7))
@settings(max_examples=300, deadline=None)
def test_odd_numbers(head: str, start: str, numbers: list[str]) -> None:
    """A number that is none, is zero or is too long is unknown to the rules and to the conversion."""
    text = f"#!/bin/bash\n{head.format(*numbers)}\nexport OMP_NUM_THREADS={numbers[6]}\n{start.format(*numbers[4:])}\n"
    try:
        read_script = read_from_text("job.sh", text)
    except NotABatchScript as error:
        assert "quote" in str(error) or "directives" in str(error)
        return
    assert all("\n" not in finding.message for finding in check(read_script, Host()))
    assert convert(read_script, Host().read).startswith("#!/bin/bash\n")


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_script_is_too_odd(data: st.DataObject) -> None:
    """A script that was cut and stirred is read, or refused in one line."""
    text = data.draw(st.sampled_from(["", *OUR_SCRIPTS]))
    for word in data.draw(st.lists(st.sampled_from(ODD_WORDS), max_size=40)):
        begin = data.draw(st.integers(0, len(text)))
        text = text[:begin] + word + text[begin + data.draw(st.integers(0, 40)):]
    try:
        read_script = read_from_text("job.sh", HEAD + text)
    except NotABatchScript as error:
        assert "\n" not in str(error)
    else:
        format_findings(read_script, check(read_script, Here()), 80, has_colours=False)
