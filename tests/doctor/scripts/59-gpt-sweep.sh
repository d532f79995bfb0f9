#!/usr/bin/env bash
# by an author who did not know the doctor's rules
#SBATCH -J gpt-sweep
#SBATCH -A lm-scaling
##SBATCH -p debug
#SBATCH -N 2 --ntasks-per-node=1
#SBATCH --gpus-per-node=a100:4
#SBATCH -c 64
#SBATCH --mem=480G
#SBATCH -t 0-12
#SBATCH -a 1-6%2
#SBATCH -o logs/%A_%a.log

# One array task for each line of sweep.txt; each trains its own model on 8 GPUs.

source "$HOME/miniforge3/bin/activate" gpt
set -eu

settings=$(sed -n "${SLURM_ARRAY_TASK_ID}p" sweep.txt)
: "${settings:?sweep.txt has no line $SLURM_ARRAY_TASK_ID}"

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))     # each array task has a SLURM_JOB_ID of its own

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / SLURM_GPUS_ON_NODE))

# $settings without quotes: several arguments
srun python -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node gpu \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head_node:$port" \
    train_gpt.py $settings \
    --out "runs/$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID"
