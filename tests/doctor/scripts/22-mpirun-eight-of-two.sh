#!/bin/bash -l
# after the shape of: ULHPC/tutorials:deep_learning/horovod/app/multinode-multigpu-test.sh
#SBATCH -c 2              # 2 CPU-core for each process
#SBATCH -N 2              # 2 nodes
#SBATCH -p gpu
#SBATCH --gpus-per-node 4
#SBATCH -t 30
#SBATCH --export=ALL

module load mpi/OpenMPI/4.1.6-GCC-13.2.0
source $HOME/envs/ddp/bin/activate

mpirun -n 8 python -m mpiddp train.py
