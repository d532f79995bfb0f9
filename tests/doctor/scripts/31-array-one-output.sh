#!/bin/bash
# after the shape of: a sweep as a job array: train_cifar10 with four learning rates
#SBATCH --job-name=sweep
#SBATCH --array=0-3
#SBATCH --output=logs/sweep.log
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=8
#SBATCH --mem=2G
#SBATCH --time=06:00:00

LRS=(1e-2 3e-3 1e-3 3e-4)
LR=${LRS[$SLURM_ARRAY_TASK_ID]}
source ~/envs/cifar/bin/activate
module load openmpi/4.1.6

srun --mpi=pmix --cpus-per-task="${SLURM_CPUS_PER_TASK}" \
    python -m mpiddp train.py --lr "$LR" --name "lr$LR"
