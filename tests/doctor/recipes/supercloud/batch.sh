#!/bin/bash
# after the shape of: MIT SuperCloud, "Pytorch DistributedDataParallel": LLsub batch.sh, or sbatch batch.sh
#SBATCH --job-name=torch_test
#SBATCH -o torch_test-%j.out
#SBATCH -N 2
#SBATCH --tasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH -c 4

module load pytorch
module load mpi/openmpi

# Rank 0 listens on this host and port.
export MASTER_ADDR=$(hostname -s)
export MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

MPI_FLAGS="--tag-output -x MASTER_ADDR -x MASTER_PORT"
mpirun ${MPI_FLAGS} python train.py
