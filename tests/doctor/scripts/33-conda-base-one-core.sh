#!/bin/bash
# after the shape of: a student's job on a2, with miniconda in the home
#SBATCH --job-name=gpt2
#SBATCH --partition=a2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --mem=64G
#SBATCH --time=02:00:00
#SBATCH --error=logs/%j.err
#SBATCH --output=logs/%j.out

source ~/miniconda3/bin/activate
module load openmpi/4.1.6

srun --mpi=pmix python -m mpiddp train.py --workers 4
