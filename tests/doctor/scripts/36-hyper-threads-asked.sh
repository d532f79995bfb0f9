#!/bin/bash
# after the shape of: a user's job on nodes with two threads per core
#SBATCH --job-name=rnn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --hint=multithread
#SBATCH --time=04:00:00
#SBATCH --output=rnn-%j.out

module load pytorch openmpi/5.0.3
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --mpi=pmix --hint=multithread --cpus-per-task=$SLURM_CPUS_PER_TASK python -m mpiddp train.py
