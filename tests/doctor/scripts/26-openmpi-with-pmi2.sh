#!/bin/bash
# after the shape of: fed-cifar10 on Cedar, and SCITAS jobs with openmpi and --mpi=pmi2
#SBATCH --chdir=/scratch/me/fedcifar
#SBATCH --job-name=fed-cifar10
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:2
#SBATCH --mem=64G
#SBATCH --time=0-01:00:00
#SBATCH --output=fed_cifar10_%j.out

module purge
module load gcc/11.3.0 openmpi/4.1.5 python/3.10.4
source /home/me/venvs/adv/bin/activate

srun --mpi=pmi2 --cpus-per-task=12 python3 -m mpiddp /scratch/me/fedcifar/train.py
deactivate
