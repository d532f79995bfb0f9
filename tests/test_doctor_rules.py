"""The doctor's rules: for each, scripts that break it, and scripts that do not, but come near."""

from __future__ import annotations

import re

import pytest

from mpiddp.doctor.batch_script import BatchScript, read_from_text
from mpiddp.doctor.context import Host
from mpiddp.doctor.findings import Finding
from mpiddp.doctor.rules import RULES, check
from tests.messages import message

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
    """Return a script of directives and commands."""
    return read_from_text("job.sh", head + text)


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
    "memory": [
        (message("doctor/memory_unit", option="mem", size=64), (head("--mem=64"), START)),
        (message("doctor/memory_per_rank", size="1.0"), (head("--mem=4G"), START)),
    ],
    "walltime": [
        (message("doctor/minutes", option="--time=24:00", minutes="24 minutes"), (head("--time=24:00"), START)),
        (message("doctor/short_walltime", seconds="60 seconds"), (head("-t 1"), START)),
        (message("doctor/minutes", option="--time=48", minutes="48 minutes"), (head("-t 48"), START)),
        (message("doctor/minutes", option="--time=30", minutes="30 minutes"), (head("--time=30   # 30 hours"), START)),
        (message("doctor/refused_walltime", time="abc", program="sbatch"), (head("-t abc"), START)),
        (message("doctor/refused_walltime", time="24h", program="sbatch"), (head("--time=24h"), START)),
        (message("doctor/refused_walltime", time="24:00:00", program="bsub"), (f"{LSF}#BSUB -W 24:00:00\n", MPIRUN)),
        (message("doctor/minutes", option="-W 36", minutes="36 minutes"), (f"{LSF}#BSUB -W 36\n", MPIRUN)),
        (message("doctor/minutes", option="-l walltime=48:00", minutes="48 minutes"),
         (f"{PBS}#PBS -l walltime=48:00\n", f"cd $PBS_O_WORKDIR\n{MPIRUN}")),
        (message("doctor/refused_walltime", time="2d", program="qsub"),
         (f"{PBS}#PBS -l walltime=2d\n", f"cd $PBS_O_WORKDIR\n{MPIRUN}")),
        (message("doctor/refused_walltime", time="12:00:00", program="flux batch"),
         ("#flux: -N2 -t 12:00:00\n", FLUX)),
        (message("doctor/minutes", option="--time=5:00", minutes="5 minutes"),
         (head("-p debug", "--time=5:00"), START)),
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
        (message("doctor/early_export", variable="SLURM_PROCID"),
         (HEAD, "export RANK=$SLURM_PROCID\nsrun -c8 python train.py\n")),
        (message("doctor/early_export", variable="SLURM_LOCALID"),
         (HEAD, "export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID\n" + START)),
    ],
    "unknown-option": [
        (message("doctor/unknown_option", option="--log-dri", hint="--log-dir"),
         (HEAD, START.replace("train.py", "--log-dri logs train.py"))),
        (message("doctor/foreign_option", option="--rdzv_endpoint"),
         (HEAD, START.replace("train.py", "--rdzv_endpoint=$HEAD:29400 train.py"))),
        (message("doctor/foreign_option", option="--nproc-per-node"),
         (HEAD, START.replace("train.py", "--nproc-per-node 4 train.py"))),
        (message("doctor/unknown_variable", variable="MPIDDP_LOG_DRI", hint="MPIDDP_LOG_DIR"),
         (HEAD, "export MPIDDP_LOG_DRI=logs\n" + START)),
    ],
    "background-wait": [
        (message("doctor/background_wait"), (HEAD, START.rstrip() + " &\n")),
        (message("doctor/background_wait"), (HEAD, START.rstrip() + " | tee log &\n")),
        (message("doctor/background_wait"), (HEAD, f"(cd a && {START.rstrip()}) &\n")),
        (message("doctor/flux_submit"), ("#flux: -N2\n", FLUX.replace("run", "submit"))),
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
    ],
    "conda-base": [
        (message("doctor/conda_base"), (HEAD, "source ~/miniforge3/bin/activate\n" + START)),
        (message("doctor/conda_placeholder"), (HEAD, "source ~/miniforge3/bin/activate NAME\n" + START)),
        (message("doctor/conda_base"), (HEAD, "source ~/conda/etc/profile.d/conda.sh\nconda activate base\n" + START)),
    ],
    "conda-init": [
        (message("doctor/conda_init"), (HEAD, "conda activate torch\n" + START)),
        (message("doctor/conda_init"), (HEAD, MODULE.format("gcc/12 openmpi/5") + "conda activate torch\n" + START)),
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
    "first-line": [(message("doctor/first_line"), (f"\n{HEAD}", START))],
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
    "one-core": [(head("--exclusive", without="cpus"), START.replace(" --cpus-per-task=8", "")),
                 (head("--cpus-per-gpu=8", without="cpus"), START.replace(" --cpus-per-task=8", ""))],
    "srun-cpus": [(HEAD, "export SRUN_CPUS_PER_TASK=8\nsrun --mpi=pmix python -m mpiddp train.py\n"),
                  (HEAD, "srun --mpi=pmix --cpu-bind=none python -m mpiddp train.py\n"),
                  (HEAD, "srun --mpi=pmix --cpu-bind=v,mask_cpu=0xfe,0xfe00 python -m mpiddp train.py\n"),
                  (HEAD, "mpirun python -m mpiddp train.py\n")],
    "memory": [(head("--mem=0"), START), (head("--mem=200G"), START), (head("--mem-per-cpu=4000"), START),
               (head("--mem-per-cpu=1000"), START),
               (head("--mem-per-cpu=1000", "--exclusive", without="cpus"), START)],
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
    "line-continuation": [(HEAD, START.replace("python", "\\\n  python")),
                          (HEAD, "cat > text <<END\na \\ \nb\nEND\n# c \\ \n" + START)],
    "split-world": [(ONE_TASK, "srun -c8 deepspeed --hostfile hosts --num_gpus 4 train.py\n"),
                    (ONE_TASK, "srun -c8 accelerate launch --num_machines 2 --num_processes 8 train.py\n"),
                    (ONE_TASK, "srun -n1 -c8 --gpus=4 torchrun --standalone --nproc_per_node=4 train.py\n"),
                    (ONE_TASK, TORCHRUN), (ONE_TASK, f'srun -c8 bash -c "{OWN_ADDRESS}"\n'),
                    (ONE_TASK, "srun -c8 bash -c 'torchrun --standalone --nproc_per_node=4 train.py $SLURM_PROCID'\n")],
    "early-variable": [(HEAD, START.replace("python -m mpiddp train.py",
                                            "bash -c 'python -m mpiddp train.py --rank $SLURM_PROCID'")),
                       (ONE_TASK, f"cat > run.sh <<'EOF'\n{ON_NODE}EOF\nsrun -c8 bash run.sh\n"),
                       (ONE_TASK, "cat <<EOF > run.sh\n" + ON_NODE.replace("$SLURM", "\\$SLURM")
                        + "EOF\nsrun -c8 ./run.sh\n"),
                       (HEAD, "export RANK=$SLURM_PROCID\nsrun -c8 bash -c 'RANK=$SLURM_PROCID python a.py'\n")],
    "unknown-option": [(HEAD, START.replace("train.py", "--log_dir logs --prefix train.py --log-dri")),
                       (HEAD, START.replace("train.py", "--stall $STALL --quiet train.py"))],
    "background-wait": [(HEAD, START.rstrip() + " &\nwait\n"),
                        (HEAD, START.rstrip() + " &\njob=$!\nwhile kill -0 $job; do sleep 60; done\n"),
                        (HEAD, START.rstrip() + " &\ntail -f --pid=$! log\n"),
                        (HEAD, "srun nvidia-smi -l &\n" + START),
                        ("#flux: -N2\n", FLUX.replace("run", "submit") + "flux queue drain\n")],
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
    "late-directive": [(HEAD, "##SBATCH --qos=a\ncd a\n##SBATCH --qos=a\n" + START)],
    "directive-text": [(head("--comment='costs $5'"), START),
                       (head("#sbatch --array=1-10 job.sh"), START),
                       (head("#sbatch job.sh"), START),
                       (head('--job-name="resnet \u2013 base"', "--comment=a\u2013b"), START),
                       (head("--output=%u-%j.out  # $HOME"), START), (head("##SBATCH --account=$NAME"), START)],
    "missing-file": [(HEAD, "cp $HOME/missing.py .\n" + START.replace("train.py", "missing.py")),
                     (HEAD, START.replace("python", "uv run --directory=$COPY python").replace("train", "missing")),
                     (HEAD, START.replace("srun", "srun --chdir=/project").replace("train.py", "missing.py")),
                     (HEAD, "cd $SCRATCH/run\n" + START.replace("train.py", "missing.py")),
                     (HEAD, "[ -d missing ] || python -m venv missing\nsource missing/bin/activate\n" + START),
                     (HEAD, START.replace("train.py", "-m package.missing")),
                     (HEAD, START.rstrip() + " --checkpoint conf/missing_b.yaml --out conf/missing_b.yaml\n"),
                     (HEAD, START.rstrip() + " --spec conf/missing-c1.yaml --lr 1e-4 --model a.b\n"),
                     (HEAD, "echo > conf/missing_b.yaml\n" + START.rstrip() + " --config conf/missing_b.yaml\n"),
                     (HEAD, START.rstrip() + " --config-name missing.yaml\n"),
                     (HEAD, START.rstrip() + " --config $NAME/missing_b.yaml --data missing/list.txt\n")],
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
    "first-line": [(PBS, f"cd $PBS_O_WORKDIR\n{MPIRUN}")],
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
    return check(script(text, first + directives), Here("", {"HOME": "/home/me"}))


def test_each_rule_has_scripts_that_break_it_and_scripts_that_do_not() -> None:
    assert set(RULES_BROKEN) == set(RULES_KEPT) == {rule.name for rule in RULES}


@pytest.mark.parametrize(("name", "text", "parts"), [
    (name, text, parts) for name, cases in RULES_BROKEN.items() for text, parts in cases])
def test_a_script_that_breaks_a_rule(name: str, text: str, parts: tuple[str, str]) -> None:
    """There is this finding, and no other; its line and its words are complete."""
    (finding,) = findings(parts)
    assert (finding.rule, finding.message) == (name, text)
    assert finding.line is not None
    assert finding.reason
    assert "None" not in f"{finding.advice}{finding.write}"


@pytest.mark.parametrize(("name", "parts"), [(name, parts) for name, cases in RULES_KEPT.items() for parts in cases])
def test_a_script_that_does_not_break_a_rule(name: str, parts: tuple[str, str]) -> None:
    assert [finding for finding in findings(parts) if finding.rule == name] == []
    assert [finding.rule for finding in findings(parts)] == []
