#!/bin/bash
# after the shape of: AMDResearch/hpcfund#47, a torchrun script whose last line was replaced
#SBATCH -J ddp
#SBATCH -N 2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH -p mi2104x
#SBATCH -t 01:00:00
#SBATCH -o ddp.%j.log

module load rocm openmpi pytorch

export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
export MASTER_PORT=29500
export WORLD_SIZE=8

srun --mpi=pmix --cpus-per-task=32 python -m mpiddp train.py --epochs 5
