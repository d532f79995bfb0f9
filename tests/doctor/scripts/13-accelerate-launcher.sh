#!/bin/bash
# after the shape of: stas00/ml-engineering:orchestration/slurm/launchers/accelerate-launcher.slurm
#SBATCH --job-name=sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one task per node: accelerate starts the rest
#SBATCH --cpus-per-task=96
#SBATCH --gres=gpu:8
#SBATCH --time=10:00:00
#SBATCH --exclusive
#SBATCH --partition=hopper
#SBATCH --output=%x-%j.out

echo "START TIME: $(date)"
set -eo pipefail
set -x

source /fsx/shared/miniforge3/bin/activate trl

LOG_PATH="logs/main_log.txt"
GPUS_PER_NODE=8
NNODES=$SLURM_NNODES
NUM_PROCESSES=$((NNODES * GPUS_PER_NODE))
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000

LAUNCHER="python -u -m accelerate.commands.launch \
    --rdzv_conf rdzv_backend=c10d,rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT \
    --config_file configs/fsdp.yaml \
    --num_processes $NUM_PROCESSES \
    --num_machines $NNODES \
    --main_process_ip $MASTER_ADDR \
    --main_process_port $MASTER_PORT \
    --machine_rank \$SLURM_PROCID \
    --role \$(hostname -s): --tee 3 \
    "
PROGRAM="finetune.py --model_name_or_path meta/llama --bf16"
export CMD="$LAUNCHER $PROGRAM"
echo $CMD

SRUN_ARGS="--wait=60 --kill-on-bad-exit=1 --cpus-per-task $SLURM_CPUS_PER_TASK"
srun $SRUN_ARGS --jobid $SLURM_JOB_ID bash -c "$CMD" 2>&1 | tee -a $LOG_PATH
echo "END TIME: $(date)"
