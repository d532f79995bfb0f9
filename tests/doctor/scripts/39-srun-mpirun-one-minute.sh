#!/bin/bash
# after the shape of: a copied test job: uOttawa's mpi.sh, with both launchers
#SBATCH --time=00:01:00
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --job-name=testmpi
#SBATCH --output=mpi-%j.out

module load openmpi/5.0.3 pytorch
srun --mpi=pmix --cpus-per-task=8 mpirun -n 64 python3 -m mpiddp train.py
