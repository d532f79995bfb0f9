"""python -m mpiddp.doctor: what it reads in a job script."""

from __future__ import annotations

from pathlib import Path

import pytest

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
from mpiddp.doctor.directives import parse_flux_time, parse_slurm_time
from tests.messages import message

HEAD = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
"""
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
    'if [ -n "$SLURM_CPUS_PER_TASK" ]; then C=$((2 * (SLURM_CPUS_PER_TASK - 4))); else C=1; fi\n'
    "srun --mpi=pmix -c ${C:-2} python -m mpiddp ${SCRIPT:-train.py}",
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


def test_a_variable_that_depends_on_the_job_is_unknown() -> None:
    found = script('if [ "$(hostname)" = a ]; then N=1; else N=2; fi\nfor i in 1 2; do M=$i; done\nread -r K\n'
                   "srun -n $N -c $M -N $K python -m mpiddp a.py")
    assert found.launches[0].launcher_options == {"ntasks": "$N", "cpus-per-task": "$M", "nodes": "$K"}
    assert found.variables == {}


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
    ("python -u -X faulthandler -m mpiddp --prefix --show 0 -m pkg.train --lr 1", Program.MPIDDP, ("pkg.train", "--lr", "1")),
    ("mpiddp a.py", Program.MPIDDP, ("a.py",)),
    ("torchrun --standalone --nproc_per_node=4 --rdzv_backend c10d a.py --lr 1", Program.TORCHRUN, ("a.py", "--lr", "1")),
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
    ("jsrun -n 4 -a 1 -c7 --gpu_per_rs 1", "jsrun", {"nrs": "4", "tasks_per_rs": "1", "cpu_per_rs": "7", "gpu_per_rs": "1"}),
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


def test_a_shell_script_that_is_started_is_read(tmp_path: Path) -> None:
    (tmp_path / "task.sh").write_text("conda activate e\ntorchrun --nproc_per_node=$N --node_rank $SLURM_NODEID $1\n")
    (job := tmp_path / "job.sh").write_text(HEAD + "export N=4\nsrun bash task.sh train.py\nsrun ./none.sh\n")
    first, second = read(str(job)).launches
    assert (first.program, first.script, first.followed) == (Program.TORCHRUN, "train.py", "task.sh")
    assert first.options == ("--nproc_per_node=4", "--node_rank", "$SLURM_NODEID")
    assert (second.program, second.script) == (Program.OTHER, "./none.sh")


def test_our_own_scripts_are_read() -> None:
    """Each starts mpiddp, and its script is known."""
    from tests.support import ROOT

    for file in sorted((ROOT / "batch").glob("*.sh")):
        found = read(str(file))
        assert [training.script for training in found.trainings] == ["train.py"] * (1 + (file.name == "enroot.sh"))
        assert found.not_followed == ()
        assert not any(training.has_unknown_options for training in found.trainings)
