#!/bin/bash
# after the shape of: CSCfi/csc-user-guide:docs/support/tutorials/ml-multi.md
#SBATCH --account=project_2000123
#SBATCH --partition=gpumedium
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=288
#SBATCH --gres=gpu:gh200:4
#SBATCH --mem=640G
#SBATCH --time=1:00:00

module purge
module load python-pytorch/2.9

RDZV_HOST=$(hostname)
RDZV_PORT=29400
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

srun torchrun \
    --nnodes=$SLURM_JOB_NUM_NODES \
    --nproc_per_node=4 \
    --rdzv_id=$SLURM_JOB_ID \
    --rdzv_backend=c10d \
    --rdzv_endpoint="$RDZV_HOST:$RDZV_PORT" \
    train.py --batch-size 64
