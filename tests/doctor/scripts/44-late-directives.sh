#!/bin/bash
# after the shape of: a job script with its modules before its options
#SBATCH --job-name=audio
#SBATCH --partition=gpu_h100
#SBATCH --output=training_%j.out

module load 2024 PyTorch/2.6.0-foss-2024a-CUDA-12.6.0 OpenMPI/5.0.3-GCC-13.3.0

#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=48:00:00

srun --mpi=pmix --cpus-per-task=16 python -m mpiddp train.py
