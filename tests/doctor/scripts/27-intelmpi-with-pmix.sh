#!/bin/bash
# after the shape of: DKRZ and RWTH jobs with Intel MPI modules
#SBATCH --job-name=gempy
#SBATCH --output=./result_%J.txt
#SBATCH --time=01:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=48
#SBATCH --cpus-per-task=1
#SBATCH --exclusive
#SBATCH --account=ab0123

module load intel-oneapi-compilers/2023.2.1
module load intel-oneapi-mpi/2021.10.0
source ~/.bashrc
conda activate gempy

launch="srun --mpi=pmix --cpus-per-task=1 --cpu-bind=cores"
$launch python -m mpiddp --device=cpu train.py --threads 1
