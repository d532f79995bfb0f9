#!/bin/bash
# after the shape of: a venv and an absolute Python
#SBATCH --job-name=cosmo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.std

module load openmpi/5.0.5
source /home/me/software/miniconda3/bin/activate cosy

TRAIN=train.py
export OMPI_MCA_pml=ucx
srun --mpi=pmix --cpus-per-task=16 /usr/bin/python3 -m mpiddp $TRAIN --n_tasks 2
