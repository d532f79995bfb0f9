#!/bin/bash
# after the shape of: MIT SuperCloud, "Pytorch DistributedDataParallel": batch.sh
#SBATCH --job-name=torch_test
#SBATCH -o torch_test.log-%j
#SBATCH -N 2
#SBATCH --tasks-per-node=2
#SBATCH --gres=gpu:volta:2
#SBATCH -c 20

source /etc/profile
module load anaconda/Python-ML-2025a
module load mpi/openmpi-4.1.8
module load cuda/12.6
module load nccl/2.23.4-cuda12.6

export NCCL_DEBUG=INFO
MPI_FLAGS="--tag-output --mca btl ^openib"

mpirun ${MPI_FLAGS} python -m mpiddp torch_test.py
