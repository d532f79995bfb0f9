#!/bin/bash
# after the shape of: a torchrun line in which only the program was replaced
#SBATCH --job-name=clip
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=18
#SBATCH --time=12:00:00
#SBATCH --output=%x_%j.out

module load pytorch/2.9 openmpi
set -x

OPTIONS=(
    --nproc-per-node 4
    --log-directory logs
)
srun --mpi=pmix --cpus-per-task=18 python -m mpiddp "${OPTIONS[@]}" train.py --dataset laion
